"""Show where a small host would grow on a task, and by what, before anything is planted.

    python examples/look.py --task mnist1d --host conv1d --after 3 --svg map.svg

The host learns by itself first; then one backward pass over training examples shows what every blueprint promises in
every slot.
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
        task: What to learn: digits, mnist1d, fashion-mnist, cifar10 or charlm.
        host: The network: mlp, conv, resnet, vit, conv1d or gpt; by default as suits the task.
        after: Epochs to learn before; 0 looks at a fresh host.
        examples: To look at, rounded up to whole minibatches.
        draws: Of the initial values of what might be planted.
        layers: Whether to show the host's own layers, too.
        seed: All randomness follows from it.
        text: The UTF-8 file that charlm learns; by default the text of Python's help.
        svg: File for a map of slots and blueprints.
        download: Fetch the data if they are not on this machine.
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
