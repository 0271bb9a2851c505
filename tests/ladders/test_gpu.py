"""A ladder on a GPU has the rungs of one on the CPU, and goes on there once it was killed."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import esper
from esper.ladders.rungs import Ladder
from gpu import CPU, GPU, needs_gpu
from ladders.climbing import Killed
from ladders.small import DEPTHS, STEPS, Decoder, compute_loss, learn, make_optimizer, tokens

TOTAL = 36


def climb(folder: Path, device: torch.device, last: int = -1) -> Ladder:
    """A ladder without dropout, in float64, which ends after ``last`` steps."""
    model, done = Decoder(dropout=0).to(device, torch.float64), 0

    def learn_or_end(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
        nonlocal done
        if done == last:
            raise Killed
        learn(model, optimizer, batch)
        done += 1

    return esper.ladder(
        model,
        learn_or_end,
        data=[tokens(16).to(device), tokens(16, seed=4).to(device)],
        depths=DEPTHS,
        steps=STEPS,
        optimizer=make_optimizer(model),
        evaluate=lambda model: compute_loss(model, tokens(16, seed=2).to(device)),
        folder=folder,
    )


@needs_gpu
def test_rungs_are_those_of_the_cpu(tmp_path: Path) -> None:
    near, far = climb(tmp_path / "cpu", CPU), climb(tmp_path / "gpu", GPU)
    for one, other in zip(far.rungs, near.rungs, strict=True):
        assert (one.depth, one.flops) == (other.depth, other.flops)
        assert one.loss == pytest.approx(other.loss, rel=1e-6)
        found, expected = (load_file(rung.path / "model.safetensors") for rung in (one, other))
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


@needs_gpu
@pytest.mark.parametrize("last", range(2, TOTAL, 9))
def test_killed_it_goes_on(tmp_path: Path, last: int) -> None:
    with pytest.raises(Killed):
        climb(tmp_path / "killed", GPU, last)
    resumed, whole = climb(tmp_path / "killed", GPU), climb(tmp_path / "whole", GPU)
    for one, other in zip(resumed.rungs, whole.rungs, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-9)
