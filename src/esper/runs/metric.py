"""What the growth that a run tells of is about: its metadata name it once, and every view of the run reads it here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

LOSS, ACCURACY = "loss", "accuracy"
"""Figures of which it is known what they are."""
SCORE = "score"
"""Scalar of the score, where that is not the metric itself."""
REFIT = "refit"
"""Metadata ``evidence`` of runs whose seeds on trial are compared with forks."""
METRIC_NAME = f"COALESCE((SELECT json_extract(value, '$') FROM metadata WHERE key = 'metric'), '{ACCURACY}')"
"""SQL for the name of a run's metric."""


@dataclass(frozen=True)
class Metric:
    """A figure on validation data, under the name that its owner gave it. Populations are about accuracy, mostly."""

    metric: str = ACCURACY
    """Its name."""
    higher_is_better: bool = True
    reference: float | None = None
    """Of a metric that is better the lower it is: the value at which the score, the share of it that is gone, is 0."""

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Self:
        """As the run's metadata say; accuracy where they do not, or say what is none."""
        name, rises, reference = (metadata.get(key) for key in ("metric", "higher_is_better", "reference"))
        if not isinstance(name, str) or not isinstance(rises, bool):
            return cls()
        return cls(name, rises, float(reference) if isinstance(reference, int | float) else None)

    def metadata(self) -> dict[str, Any]:
        """What `of` reads."""
        return asdict(self)

    @property
    def scalar(self) -> str:
        """The scalar of the metric's values, in its own units."""
        return f"validation_{self.metric}"

    @property
    def train_scalar(self) -> str:
        """The scalar of the metric's values in training, where these are known."""
        return f"train_{self.metric}"

    @property
    def is_loss(self) -> bool:
        """Whether it is the validation loss, so that there is no figure beside that."""
        return self.metric == LOSS

    @property
    def direction(self) -> str:
        """Which way is up, where that does not go without saying."""
        if self.metric in (LOSS, ACCURACY):
            return ""
        return f"{'higher' if self.higher_is_better else 'lower'} is better"


LOSS_REDUCTION = Metric("loss_gone")
"""What populations on a suite about the loss are about: the share of a guess's loss that is gone."""


def contributions(metadata: Mapping[str, Any]) -> str:
    """What contributions in a run are, and in which units, as its metadata say."""
    about = Metric.from_metadata(metadata)
    told = "Contribution: how much the model depends on a slot's seed, "
    if about.higher_is_better:
        told += f"{about.metric} on validation data with it less that without it."
    else:
        whole = "" if about.reference is None else f", {about.reference:.4g}"
        what = "that of guessing, or else the first" if about.is_loss else "the first"
        told += f"{about.metric} on validation data without it less that with it, as a share of {what}{whole}."
    if metadata.get("evidence") == REFIT:
        told += " Of seeds on trial, without it is a copy of the model that trains on without the seed."
    return told
