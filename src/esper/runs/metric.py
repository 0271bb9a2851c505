"""The metric by which a run's growth is measured. The run's metadata name it, and all views of the run read it here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

LOSS, ACCURACY = "loss", "accuracy"
"""Metrics whose names need no explanation."""
SCORE = "score"
"""Name of the scalar for the score, where that differs from the metric."""
SCORE_MEANING = (
    "Score is test accuracy (in loss-based suites, the relative loss reduction) minus rent, the price of added "
    "parameters."
)
J_MEANING = "J is the same on validation data; controllers maximize it."
"""Definitions for pages, at the first use of these words; `J_MEANING` follows `SCORE_MEANING`."""
REFIT = "refit"
"""Value of the metadata ``counterfactual`` in runs that compare seeds in their test period with forks."""
METRIC_NAME = f"COALESCE((SELECT json_extract(value, '$') FROM metadata WHERE key = 'metric'), '{ACCURACY}')"
"""SQL for the name of a run's metric."""


@dataclass(frozen=True)
class RunMetric:
    """A metric on validation data, under the user's name for it; in populations usually accuracy."""

    metric: str = ACCURACY
    """Name of the metric."""
    higher_is_better: bool = True
    reference: float | None = None
    """Where lower is better: the value at which the score is 0; the score is the relative reduction below it."""

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Self:
        """The metric that a run's metadata name; accuracy if they name none or an invalid one."""
        name, rises, reference = (metadata.get(key) for key in ("metric", "higher_is_better", "reference"))
        if not isinstance(name, str) or not isinstance(rises, bool):
            return cls()
        return cls(name, rises, float(reference) if isinstance(reference, int | float) else None)

    def metadata(self) -> dict[str, Any]:
        """The metadata from which `from_metadata` builds this metric."""
        return asdict(self)

    @property
    def scalar(self) -> str:
        """Name of the scalar that holds the metric's values, in its own units."""
        return f"validation_{self.metric}"

    @property
    def train_scalar(self) -> str:
        """Name of the scalar that holds the metric's values in training, if they are recorded."""
        return f"train_{self.metric}"

    @property
    def is_loss(self) -> bool:
        """Whether the metric is the validation loss; then there is no other metric."""
        return self.metric == LOSS

    @property
    def direction(self) -> str:
        """Whether higher or lower is better, for metrics whose names need an explanation."""
        if self.metric in (LOSS, ACCURACY):
            return ""
        return f"{'higher' if self.higher_is_better else 'lower'} is better"


LOSS_REDUCTION = RunMetric("loss_gone")
"""The metric of populations on a suite whose objective is the loss: its relative reduction below that of guessing."""


def describe_contributions(metadata: Mapping[str, Any]) -> str:
    """A sentence that defines a run's contributions and their units, depending on its metadata."""
    metric = RunMetric.from_metadata(metadata)
    text = "Contribution: how much the model depends on a slot's seed, "
    if metric.higher_is_better:
        text += f"{metric.metric} on validation data with it less that without it."
    else:
        text += f"{metric.metric} on validation data without it less that with it, as a share of that without it."
    if metadata.get("counterfactual") == REFIT:
        text += " Of seeds on probation, without it is a copy of the model that trains on without the seed."
    return text
