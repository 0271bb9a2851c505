"""What a grower is told, checked."""

from __future__ import annotations

import math

from esper.errors import ConfigError
from esper.grower.measuring import Score
from esper.growth.model import GrowingModel
from esper.rl.conduct import Conduct
from esper.training.governor.settings import GovernorSettings


def checked(model: GrowingModel, classes: int | None, horizon: int, rent: float, train_size: int) -> int:
    """The number of classes.

    Raises:
        ConfigError: it is unknown, or an argument is out of range.
    """
    if classes is None:
        classes = model.outputs
    if classes is None:
        raise ConfigError("the model returns no tensor that shows how many classes there are: say classes=...")
    if classes == 1:
        raise ConfigError(
            "classes is 1, and nobody can guess among one: say classes=2 for one output that tells yes from no; a task "
            "without classes is judged by its loss alone"
        )
    if classes < 2 or horizon < 1 or train_size < 1 or not 0 <= rent < math.inf:
        raise ConfigError(
            f"classes {classes}, horizon {horizon}, train_size {train_size} and rent {rent}: "
            "give at least 2, 1, 1 and 0"
        )
    return classes


def require_conduct(conduct: Conduct, horizon: int) -> None:
    """Refuse what could not act in so many decisions.

    Raises:
        ConfigError: the governor's penalty was changed, or some slots would never be measured.
    """
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


def whole_score(val_loss: float | None, accuracy: float | None) -> Score | None:
    """What is known of the model as it is, if anything.

    Raises:
        ConfigError: only half of it is given.
    """
    if (val_loss is None) != (accuracy is None):
        raise ConfigError("give both val_loss and accuracy, or neither")
    return None if val_loss is None or accuracy is None else Score(val_loss, accuracy)
