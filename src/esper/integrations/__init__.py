"""Other libraries on growth, each of an extra, and what their callbacks share."""

import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor

from esper.grower import Grower


class MeanLoss:
    """The mean of the losses since the last `pop`."""

    def __init__(self) -> None:
        self._sum: float | Tensor = 0.0
        self._count = 0

    def add(self, loss: float | Tensor, count: int = 1) -> None:
        """Add the mean loss of ``count`` minibatches, without waiting for its device."""
        self._sum = self._sum + loss * count
        self._count += count

    def pop(self) -> float:
        mean = float(self._sum) / self._count
        self._sum, self._count = 0.0, 0
        return mean

    def state_dict(self) -> dict[str, Any]:
        return {"sum": float(self._sum), "count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sum, self._count = state["sum"], state["count"]


def step_grower(
    grower: Grower, losses: MeanLoss, log_metrics: Callable[[dict[str, float]], Any], log: logging.Logger
) -> bool:
    """Take a decision on the mean loss, and log it and the model's growth; returns whether training should stop."""
    decision = grower.step(train_loss=losses.pop())
    log.info("%s", decision)
    seeds = grower.model.seeds.values()
    fossils = sum(seed.fossilized for seed in seeds)
    log_metrics(
        {
            **({f"growth/{decision.metric}": decision.value} if decision.metric else {}),
            "growth/op": float(decision.op),
            "growth/loss": decision.loss,
            "growth/score": decision.score,
            "growth/live": float(len(seeds) - fossils),
            "growth/fossils": float(fossils),
            "growth/added_parameters": float(grower.model.added_parameters),
            **{f"growth/contribution/{slot}": value for slot, value in decision.contributions.items()},
        }
    )
    return decision.finished
