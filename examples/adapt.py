"""Adapt a trained host to data that have changed, and show what was tried and what it is worth.

    python examples/adapt.py --task digits --host resnet --shift inversion

The host learns a task and is frozen; then the data change, and `esper.adapt` tries what may grow where on a few of the
changed examples.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable
from typing import Literal

import torch
import tyro
from torch import Tensor, nn
from zoo.data import Minibatch, load
from zoo.hosts import HOSTS
from zoo.training import (
    ORDER,
    build_model,
    cross_entropy,
    host_for,
    make_optimizer,
    measure,
    numpy_generator,
    train_epoch,
)

import esper
from esper.errors import ConfigError, EsperError
from esper.growth.blueprints import get

BATCH = 50
"""Changed examples in a batch."""
NOISE = 1.0
"""Standard deviation, where inputs are normalised."""
Shift = Literal["noise", "inversion", "rotation", "cycled", "merged"]


def change(batch: Minibatch, shift: Shift, classes: int, generator: torch.Generator) -> Minibatch:
    """A minibatch after the shift, which changes its inputs or its labels."""
    inputs, labels = batch
    match shift:
        case "noise":
            return Minibatch(inputs + NOISE * torch.randn(inputs.shape, generator=generator), labels)
        case "inversion":
            return Minibatch(-inputs, labels)
        case "rotation":  # images by a quarter, signals by time
            return Minibatch(inputs.rot90(1, (-2, -1)) if inputs.dim() > 3 else inputs.flip(-1), labels)
        case "cycled":
            return Minibatch(inputs, (labels + 1) % classes)
        case "merged":
            return Minibatch(inputs, labels // 2)


def offer_everywhere(network: nn.Module, host: str, inputs: Tensor) -> dict[str, list[str]]:
    """Low-rank updates of every layer that has them; behind blocks their copies and what that kind of host offers."""
    layers = [name for name, part in network.named_modules() if isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d)]
    offers = dict.fromkeys(layers, ("lora_4",))
    offers |= dict.fromkeys(HOSTS[host].sites, (*HOSTS[host].blueprints, "block_copy"))
    slots = esper.attach(copy.deepcopy(network), list(offers), inputs).slots  # of a copy, to see what fits where
    served = {name: [one for one in offers[name] if get(one).supports(slot.site)] for name, slot in slots.items()}
    return {name: blueprints for name, blueprints in served.items() if blueprints}


@torch.no_grad()
def measure_accuracy(model: nn.Module, batches: Iterable[Minibatch]) -> float:
    """Accuracy in evaluation mode; the model's own mode is restored."""
    was_training, right, count = model.training, 0, 0
    model.eval()
    for batch in batches:
        right += int((model(batch.inputs).argmax(1) == batch.targets).sum())
        count += len(batch.targets)
    model.train(was_training)
    return right / count


def main(
    task: str = "digits",
    host: str | None = None,
    shift: Shift = "inversion",
    examples: int = 200,
    protect: float | None = None,
    training_flops: float | None = None,
    epochs: int | None = None,
    seed: int = 0,
    download: bool = False,
) -> None:
    """Train a host, change its data, and adapt it.

    Args:
        task: What the host has learned: digits, mnist1d, fashion-mnist or cifar10.
        host: The network: mlp, conv, resnet, vit or conv1d; by default one for the task.
        shift: How the data change: noise, inversion, rotation, cycled or merged (classes).
        examples: Number of changed examples, rounded up to batches of 50.
        protect: Maximum relative increase of the loss on held-out old data (default: unlimited).
        training_flops: Maximum FLOPs of the trials (default: unlimited).
        epochs: Epochs of training before the data change (default: the host's).
        seed: Random seed.
        download: Download the data if they are missing.
    """
    torch.set_num_threads(1)
    host = host_for(task, host)
    if task == "charlm":
        raise ConfigError("charlm is text: its data change in none of these ways, which are for images and signals")
    kind, splits = HOSTS[host], load(task, download=download)

    if not BATCH < examples <= len(splits.validation):
        raise ConfigError(f"--examples {examples}: give {BATCH + 1} to {len(splits.validation)}")

    # Of the validation data some examples change, and as many others stay, to show what is forgotten
    spare, count = list(splits.validation.in_order(BATCH)), -(-examples // BATCH)
    generator = torch.Generator().manual_seed(0)
    new = [change(batch, shift, splits.classes, generator) for batch in spare[:count]]
    test = [change(batch, shift, splits.classes, generator) for batch in splits.test.in_order(BATCH)]
    old = None if protect is None else spare[count : 2 * count]

    # The host learns the task as it was
    model = build_model(host, splits, seed)
    optimizer = make_optimizer(model, kind)
    for epoch in range(1, (kind.epochs if epochs is None else epochs) + 1):
        train_epoch(model, optimizer, splits.train, kind.batch_size, numpy_generator(seed, ORDER, epoch))
    print(f"{host} on {task}: test accuracy {measure(model, splits.test).accuracy:.3f}", flush=True)
    plain = model.finalize("drop").eval()

    # Then it is frozen, and whatever may grow is tried
    inputs = new[0].inputs[:2]
    model = esper.attach(plain, offer_everywhere(plain, host, inputs), inputs, freeze_host=True)
    before = measure_accuracy(model, test)
    adaptation = esper.adapt(
        model,
        lambda model, batch: cross_entropy(model(batch.inputs), batch),
        new,
        score=lambda model, batch: measure_accuracy(model, [batch]),
        source=old,
        tolerance=protect,
        training_flops=training_flops,
        seed=seed,
    )
    print(adaptation)
    print(f"test data with {shift}: accuracy {measure_accuracy(model, test):.3f}, the host's {before:.3f}")


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except EsperError as error:
        sys.exit(f"error: {error}")
