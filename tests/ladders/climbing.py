"""A ladder that kills its own process: ``python climbing.py FOLDER STEP``; at a step below 0 it goes on to its end."""

import os
import signal
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.ladders.rungs import Ladder
from ladders.small import DEPTHS, STEPS, Decoder, evaluate, learn, make_optimizer, tokens


class Killed(BaseException):
    """The end of a process, in tests within one."""


def die() -> None:
    """As by ``kill -9``."""
    os.kill(os.getpid(), signal.SIGKILL)


def climb(folder: Path, last: int = -1, end: object = die) -> Ladder:
    """A ladder with dropout and a shuffling loader, which ends after ``last`` steps of this process."""
    model = Decoder()
    torch.manual_seed(3)
    done = 0

    def learn_or_end(model: nn.Module, optimizer: torch.optim.Optimizer, batch: list[Tensor]) -> None:
        nonlocal done
        if done == last:
            end()
        learn(model, optimizer, batch[0])
        done += 1

    return esper.ladder(
        model,
        learn_or_end,
        data=DataLoader(TensorDataset(tokens()), batch_size=12, shuffle=True),
        depths=DEPTHS,
        steps=STEPS,
        optimizer=make_optimizer(model),
        evaluate=evaluate,
        example_input=tokens(12),
        folder=folder,
    )


if __name__ == "__main__":
    climb(Path(sys.argv[1]), int(sys.argv[2]))
