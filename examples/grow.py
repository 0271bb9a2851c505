"""Grow a small host on a small data set, and compare it with the same host without growth.

    python examples/grow.py --task digits --host conv --epochs 20 --run-dir runs/grown

After every epoch the controller plants, keeps or removes modules, and a picture shows what has grown where. The same
host is trained on the same minibatches without growth. At the end modules still on probation are decided on, and both
models are measured on test data that nothing else reads. `esper dash`, `esper report RUN` and `esper runs` read the
run's directory.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Literal

import torch
import tyro
from rich.console import Console
from zoo.data import Minibatch, load
from zoo.hosts import HOSTS
from zoo.picture import GrowthPicture
from zoo.training import (
    ORDER,
    Score,
    build_model,
    cross_entropy,
    host_for,
    make_optimizer,
    measure,
    numpy_generator,
    train_epoch,
)

import esper
import esper.growth.export
from esper.errors import EsperError
from esper.lifecycle.actions import Op


def main(
    task: str = "digits",
    host: str | None = None,
    controller: str = "look",
    epochs: int | None = None,
    seed: int = 0,
    rent: float = 0.0,
    counterfactual: Literal["dependence", "refit"] = "dependence",
    text: Path | None = None,
    run_dir: Path | None = None,
    export: Path | None = None,
    download: bool = False,
    device: str = "cpu",
) -> None:
    """Grow a host on a task.

    Args:
        task: Data set: digits, mnist1d, fashion-mnist, cifar10 or charlm.
        host: The network that grows: mlp, conv, resnet, vit, conv1d or gpt; by default one for the task.
        controller: Decides what grows: look, heuristic, none, random, periodic, all_at_start, all_at_plateau, or the
            directory of a run of `esper train`.
        epochs: Passes over the training data, with a decision after each (default: the host's).
        seed: Random seed.
        rent: Price of added parameters: the score is accuracy - rent * log1p(added / host parameters).
        counterfactual: How a seed on probation is measured: by switching it off (dependence), or against a copy of the
            model that is trained on without it (refit).
        text: UTF-8 file for charlm (default: the text of Python's help).
        run_dir: New folder for the run and the model.
        export: File for the grown model without Esper: its name ends in .pt2 or .onnx.
        download: Download the data if they are missing.
        device: Torch device.
    """
    torch.set_num_threads(1)  # faster for networks this small, and sums are rounded alike on all machines
    host = host_for(task, host)
    kind, splits = HOSTS[host], load(task, download=download, text=text).to(device)
    epochs = kind.epochs if epochs is None else epochs

    # The model with its slots, and who decides what grows there
    model = build_model(host, splits, seed)
    optimizer = make_optimizer(model, kind)

    def loss(batch: Minibatch) -> torch.Tensor:
        return cross_entropy(model(batch.inputs), batch)

    def validate(model: torch.nn.Module) -> Score:
        return measure(model, splits.validation)

    grower = esper.Grower(
        model,
        optimizer,
        esper.Refit(validate) if counterfactual == "refit" else validate,
        controller=controller,
        classes=splits.classes,
        horizon=epochs,
        rent=rent,
        train_size=len(splits.train),
        seed=seed,
        loss=loss,
        run=run_dir,
    )

    # The same host without growth, to compare with
    bare = build_model(host, splits, seed)
    bare_optimizer = make_optimizer(bare, kind)

    # Train both on the same minibatches and decide, epoch by epoch
    print(
        f"{host} learns {task}. After each epoch, {epochs} in all, a small module may be planted behind a layer\n"
        "(germinate). It is on probation first, and then kept for good (fossilize) or removed (prune)."
    )
    with GrowthPicture(Console(), model) as picture:
        for epoch in range(1, epochs + 1):
            order, same_order = (numpy_generator(seed, ORDER, epoch) for _ in range(2))
            trained = train_epoch(model, optimizer, splits.train, kind.batch_size, order, grower.isolated_backward)
            train_epoch(bare, bare_optimizer, splits.train, kind.batch_size, same_order)
            bare_accuracy = measure(bare, splits.validation).accuracy
            decision = grower.step(train_loss=trained.loss, train_accuracy=trained.accuracy)
            line = (
                f"epoch {epoch}/{epochs}: accuracy {decision.value:.3f} (without growth {bare_accuracy:.3f}), "
                f"loss {decision.loss:.3f}, added {model.added_parameters}: {decision.what}"
            )
            picture.add_epoch(line, acted=decision.op is not Op.WAIT, grown=decision.value, bare=bare_accuracy)
        ending = grower.finish()
        picture.draw()
    print(ending)

    for slot, kept in model.seeds.items():
        print(f"kept {kept.blueprint.name} in {slot}: {kept.parameter_count} parameters")
    grown, without = measure(model, splits.test), measure(bare, splits.test)
    added = model.added_parameters
    score = grown.accuracy - rent * math.log1p(added / model.host_parameters)
    print(f"{host} on {task}, on test data:")
    print(f"accuracy without growth {without.accuracy:.3f}, with growth {grown.accuracy:.3f}")
    print(f"loss without growth {without.loss:.3f}, with growth {grown.loss:.3f}")
    print(f"{model.host_parameters} parameters + {added}; score {score:.3f}")
    if run_dir is not None:
        esper.save(model, run_dir / "model")
        print(f"model: {run_dir / 'model'}\nrun: {run_dir}")
    if export is not None:
        esper.growth.export.export(model.finalize(), export, next(splits.train.in_order(2)).inputs)
        print(f"exported: {export}")


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except EsperError as error:
        sys.exit(f"error: {error}")
