"""Runs of a model in its owner's loop, one for each kind of thing that growth may be about."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import esper
from esper import Decision
from factories import RINGS, Loop, make_data, validate

DECISIONS = 10


@torch.no_grad()
def with_mae(model: nn.Module) -> dict[str, float]:
    """A metric of a size of its own, better the lower it is."""
    model.eval()
    inputs, labels = make_data(64, seed=1)
    wrong = (model(inputs).softmax(1) - nn.functional.one_hot(labels, RINGS)).abs().mean()
    return {"loss": validate(model)[0], "mae": 5000 * float(wrong)}


@dataclass(frozen=True)
class Kind:
    """What a run is about."""

    metric: str
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    own: Callable[[Decision], float] = lambda decision: decision.score
    """Its value when a decision was made."""

    def grow(self, run: Path) -> list[Decision]:
        """A run of the kind, in which something germinates, blends and is kept or pruned."""
        loop = Loop("heuristic", run=run, **self.options)
        decisions = [loop.epoch() for _ in range(DECISIONS)]
        loop.grower.close()
        return decisions


KINDS = {
    "accuracy": Kind("accuracy"),
    "loss": Kind("loss", {"evaluate": lambda model: validate(model)[0]}, lambda decision: decision.loss),
    "mae": Kind(
        "mae", {"evaluate": esper.Metric(with_mae, "mae", higher_is_better=False)}, lambda decision: decision.value
    ),
}
