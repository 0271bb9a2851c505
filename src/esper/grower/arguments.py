"""What a grower is told, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from esper.errors import ConfigError
from esper.grower.figures import ACCURACY, LOSS, ROUNDING, Figures, figures, number
from esper.rl.conduct import Conduct
from esper.training.governor.detectors import GovernorSettings

SEEDS = 2**63
"""So many there are."""


def require_sizes(classes: int | None, horizon: int | None, rent: float, train_size: int, seed: object) -> None:
    """Refuse what is out of range.

    Raises:
        ConfigError: it is; the message says of what.
    """
    if classes == 1:
        raise ConfigError(
            "classes is 1, and nobody can guess among one: say classes=2 for one output that tells yes from no; a task "
            "without classes is judged by its loss alone"
        )
    if (
        (classes is not None and classes < 2)
        or (horizon is not None and horizon < 1)
        or train_size < 1
        or not 0 <= rent < math.inf
    ):
        told = "" if classes is None else f"classes {classes}, "
        raise ConfigError(
            f"{told}horizon {horizon}, train_size {train_size} and rent {rent}: "
            f"give at least {'2, ' if told else ''}1, 1 and 0"
        )
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < SEEDS:
        raise ConfigError(f"seed is {seed!r}: give a whole number from 0 to {SEEDS - 1}")


def require_conduct(conduct: Conduct, horizon: int | None) -> None:
    """Refuse what could not act in so many decisions; None: as many as anybody wants.

    Raises:
        ConfigError: the governor's penalty was changed, or some slots would never be measured.
    """
    if horizon is not None:
        try:
            conduct.require_measurements(horizon)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    usual = GovernorSettings().penalty
    if conduct.governor is not None and conduct.governor.penalty != usual:
        raise ConfigError(
            f"conduct.governor.penalty is {conduct.governor.penalty}: it is a price in reward, which nobody is paid "
            f"where one model grows; leave it at {usual}"
        )


@dataclass(frozen=True)
class Heard:
    """What a grower hears at each step, checked."""

    train_loss: float
    train_accuracy: float | None
    whole: Figures | None
    """Of the model as it is, if that is known already."""


def heard(
    train_loss: object, train_accuracy: object, val_loss: object, accuracy: object, metrics: Mapping[str, Any] | None
) -> Heard:
    """What the arguments of a step mean.

    Raises:
        ConfigError: one is no number, an accuracy no fraction, or figures are given without the validation loss.
    """
    loss = number(train_loss, "train_loss")
    known = None if train_accuracy is None else number(train_accuracy, "train_accuracy")
    if known is not None and not 0 <= known <= 1 + ROUNDING:
        raise ConfigError(f"train_accuracy is {known:g}: give a fraction in [0, 1], or leave it out")
    if val_loss is None and accuracy is None and metrics is None:
        return Heard(loss, known, None)
    if val_loss is None:
        raise ConfigError("accuracy and metrics belong to a val_loss: give that too, or none of them")
    given = {LOSS: val_loss} if accuracy is None else {LOSS: val_loss, ACCURACY: accuracy}
    others = cast(object, {} if metrics is None else metrics)
    if not isinstance(others, Mapping) or given.keys() & set(cast("Mapping[Any, Any]", others)):
        raise ConfigError("metrics: give a mapping of the names of figures other than loss and accuracy to numbers")
    return Heard(loss, known, figures({**given, **cast("Mapping[Any, Any]", others)}))
