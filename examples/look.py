"""Show in which slots of a small host modules would help, and which, before anything is planted.

    python examples/look.py --task mnist1d --host conv1d --after 3 --svg map.svg

The host is trained first. Then one backward pass over training examples estimates for every blueprint in every slot
how much it would lower the loss.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import tyro
from zoo.data import load
from zoo.hosts import HOSTS
from zoo.training import (
    ORDER,
    build_model,
    example_losses,
    host_for,
    make_optimizer,
    measure,
    numpy_generator,
    train_epoch,
)

from esper.errors import EsperError


def main(
    task: str = "digits",
    host: str | None = None,
    after: int = 5,
    examples: int = 256,
    draws: int = 3,
    layers: bool = False,
    seed: int = 0,
    text: Path | None = None,
    svg: Path | None = None,
    download: bool = False,
) -> None:
    """Train a host, and look where it would grow.

    Args:
        task: Data set: digits, mnist1d, fashion-mnist, cifar10 or charlm.
        host: The network: mlp, conv, resnet, vit, conv1d or gpt; by default one for the task.
        after: Epochs of training before the look.
        examples: Number of training examples, rounded up to whole minibatches.
        draws: Number of initial values drawn for each module.
        layers: Show the host's own layers, too.
        seed: Random seed.
        text: UTF-8 file for charlm (default: the text of Python's help).
        svg: File for a map of slots and blueprints.
        download: Download the data if they are missing.
    """
    torch.set_num_threads(1)
    host = host_for(task, host)
    kind, splits = HOSTS[host], load(task, download=download, text=text)
    model = build_model(host, splits, seed)
    optimizer = make_optimizer(model, kind)
    for epoch in range(1, after + 1):
        train_epoch(model, optimizer, splits.train, kind.batch_size, numpy_generator(seed, ORDER, epoch))
        accuracy = measure(model, splits.validation).accuracy
        print(f"epoch {epoch}/{after}: accuracy {accuracy:.3f}", flush=True)

    batches = splits.train.in_order(kind.batch_size)
    look = model.look(example_losses, batches, examples=examples, draws=draws, layers=layers, seed=seed)
    print(look)
    if svg is not None:
        look.to_svg(svg)
        print(f"map: {svg}")


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except EsperError as error:
        sys.exit(f"error: {error}")
