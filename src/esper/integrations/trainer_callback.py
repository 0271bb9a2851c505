"""What callbacks of trainers share: when to decide, what the logger is told of it, and the mean loss between."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor

from esper.grower import Decision, Grower


def decide(
    grower: Grower, losses: MeanLoss, log_figures: Callable[[dict[str, float]], Any], log: logging.Logger
) -> bool:
    """Let the grower decide on the mean loss, and log what it did; whether training is to stop."""
    decision = grower.step(train_loss=losses.take())
    log.info("%s", decision)
    log_figures(figures(decision, grower))
    return decision.finished


def finish(grower: Grower, log: logging.Logger) -> None:
    """Let the grower judge what is unfinished, and log its verdict."""
    log.info("%s", grower.finish())


def figures(decision: Decision, grower: Grower) -> dict[str, float]:
    """Numbers for a logger: the operation (an `esper.lifecycle.actions.Op`), what was measured, what has grown."""
    seeds = grower.model.seeds.values()
    fossils = sum(seed.fossilized for seed in seeds)
    return {
        **({f"growth/{decision.metric}": decision.value} if decision.metric else {}),
        "growth/op": float(decision.op),
        "growth/loss": decision.loss,
        "growth/score": decision.score,
        "growth/live": float(len(seeds) - fossils),
        "growth/fossils": float(fossils),
        "growth/added_parameters": float(grower.model.added_parameters),
        **{f"growth/contribution/{slot}": value for slot, value in decision.contributions.items()},
    }


class MeanLoss:
    """The mean of the losses since it was last taken: an `esper.serialization.state_files.Stateful`."""

    def __init__(self) -> None:
        self._sum: float | Tensor = 0.0
        self._count = 0

    def add(self, loss: float | Tensor, count: int = 1) -> None:
        """The mean over ``count`` minibatches; a tensor's value is not waited for."""
        self._sum = self._sum + loss * count
        self._count += count

    def take(self) -> float:
        """The mean; from then on it counts anew."""
        mean = float(self._sum) / self._count
        self._sum, self._count = 0.0, 0
        return mean

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"sum": float(self._sum), "count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was called."""
        self._sum, self._count = state["sum"], state["count"]
