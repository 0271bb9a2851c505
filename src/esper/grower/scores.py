"""The one *score* of a model that growth is about, whatever its owner measures.

It is better the higher it is. Of a metric that is better the higher it is, such as accuracy, it is the metric itself.
Of a loss, and of any other metric that is better the lower it is, it is the share that is gone,
``(reference - value) / |reference|``: 0 at the reference, 1 where nothing is left. The loss's reference is that of
guessing, ln(classes), where the number of classes is known; otherwise, as for other metrics, it is the first value that
was measured. A model that was trained on something else before may begin with more than that; it is then the reference.
Where a constraint is broken, a penalty is taken off (`esper.grower.scores`). Contributions, what gates tolerate,
the margins of rules and rent are in units of the score.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from esper.config.arguments import describe_value, read_number
from esper.engine.governor import skill
from esper.errors import ConfigError
from esper.runs.metric import ACCURACY, LOSS, Metric
from esper.serialization.state_files import from_plain

UNKNOWN = math.nan


class Scores:
    """Scores figures of one model. Some of what that takes is known only once the first are there, see `set_reference`.

    Args:
        metric: Name of the figure that growth is about; None: accuracy where there is one, otherwise the loss.
        higher_is_better: Whether the metric is; None: as is known of loss and accuracy.
        classes: How many there are to choose from, as far as the user said so.
        outputs: How many the model has: so many classes are there if there is an accuracy and nothing else was said.
        trained: Whether the model was trained on something else before, so that it may begin worse than guessing: it is
            then compared with what it began with.
        penalty: What is taken off the score for what else was measured.

    Raises:
        ConfigError: metric and direction do not fit together.
    """

    def __init__(
        self,
        metric: str | None,
        higher_is_better: bool | None,
        classes: int | None,
        outputs: int | None,
        *,
        trained: bool = False,
        penalty: Callable[[Figures], float] = lambda _: 0.0,
    ) -> None:
        _require_direction(metric, higher_is_better)
        self._penalty = penalty
        self._trained = trained
        self.metric = metric or ""
        """Empty until it is known."""
        self._named = metric is not None
        self._higher = higher_is_better
        self._classes = classes or 0
        self._outputs = outputs or 0
        self._has_reference = False
        self._reference = UNKNOWN
        self._first_train_loss = self._first_loss = self._first_accuracy = UNKNOWN
        self.chance_loss = math.log(self.likely_classes)
        """The loss of guessing, where the number of classes is known; otherwise the first that was measured."""
        self.chance_score = 1 / self.likely_classes
        """The score of guessing, where the number of classes is known; otherwise the first that was measured."""

    def set_reference(self, figures: Figures, train_loss: float) -> None:
        """Take the first finite figures as the reference of scores; later ones change nothing.

        Raises:
            ConfigError: the metric is not among them, or there is an accuracy but nobody knows of how many classes.
        """
        metric = self.metric or (ACCURACY if ACCURACY in figures else LOSS)
        value = self._value(figures, metric)
        if self._has_reference or not (math.isfinite(figures[LOSS]) and math.isfinite(value)):
            return
        if ACCURACY in figures and not self._classes:
            if self._outputs < 2:
                raise ConfigError(
                    "evaluate gives an accuracy, but the model's output does not show how many classes there are: say "
                    "classes=... (2 for yes and no)"
                )
            self._classes = self._outputs
        self._has_reference, self.metric = True, metric
        self._first_train_loss = train_loss if math.isfinite(train_loss) else figures[LOSS]
        self._first_loss, self._first_accuracy = figures[LOSS], figures.get(ACCURACY, UNKNOWN)
        self.chance_loss = math.log(self._classes) if self._classes else figures[LOSS]
        if self._trained:
            self.chance_loss = max(self.chance_loss, figures[LOSS])
        if metric == ACCURACY:
            self.chance_score = 1 / self._classes
        elif self._rises(metric):
            self.chance_score = value
        else:
            self.chance_score, self._reference = 0.0, self.chance_loss if metric == LOSS else value

    def score(self, figures: Figures) -> float:
        """NaN before the first figures that are finite, and where these are not.

        Raises:
            ConfigError: the metric is not among the figures, or these name an accuracy as the first ones did not, or
                the metric is no number, or too good to be one, although the loss is finite.
        """
        if not self._has_reference:
            return UNKNOWN
        if ACCURACY in figures and not self._named and self.metric == LOSS:
            raise ConfigError(
                "growth is about the loss, since what was measured first had no accuracy, but now there is one: hand "
                "it to step together with val_loss, or say metric='loss' or metric='accuracy'"
            )
        value = self._value(figures, self.metric)
        score = value if self._rises(self.metric) else _relative_improvement(value, self._reference)
        return score - self._penalty(figures)

    def progress(self, figures: Figures | None) -> float | None:
        """What must fall for growth to make progress, NaN without figures; None: the loss."""
        if not self._named or self.metric == LOSS:
            return None
        return UNKNOWN if figures is None else figures[self.metric] * (-1 if self._rises(self.metric) else 1)

    def metric_spec(self) -> Metric | None:
        """The metric that growth is about; None until it is known."""
        if not self._has_reference:
            return None
        rises = self._rises(self.metric)
        return Metric(self.metric, rises, None if rises else self._reference)

    def value(self, figures: Figures) -> float:
        """What growth is about, as it was measured; NaN before the first figures that are finite."""
        return self._value(figures, self.metric) if self._has_reference else UNKNOWN

    def check_train_accuracy(self, accuracy: float) -> None:
        """Refuse an accuracy of training, NaN where it is not known, if growth is about something else.

        Raises:
            ConfigError: it is.
        """
        if not math.isnan(accuracy) and self.metric not in ("", ACCURACY):
            raise ConfigError(f"train_accuracy means nothing where growth is about {self.metric!r}: leave it out")

    @property
    def likely_classes(self) -> int:
        """How many there are, as far as can be told before anything is measured."""
        return max(self._classes or self._outputs, 2)

    @property
    def has_chance_level(self) -> bool:
        """Whether the loss and the score of guessing are, so that a network can be said to do no better."""
        return self._has_reference and self._classes > 0

    def skills(self, figures: Figures, train_loss: float) -> tuple[float, float]:
        """By accuracy, and by the losses: 0 for a network that has learned nothing, 1 for a perfect one, NaN: unknown.

        By the losses it is the greater of the shares that are gone of those of training and of validation: a network
        that overfits has not forgotten anything.
        """
        if not self._has_reference:
            return UNKNOWN, UNKNOWN
        return self._by_accuracy(figures), max(self.improvement_over_chance(figures, train_loss))

    def improvement_over_chance(self, figures: Figures, train_loss: float) -> tuple[float, float]:
        """The shares of chance's losses that are gone, of training and of validation."""
        first = self.chance_loss if self._classes else self._first_train_loss
        return _relative_improvement(train_loss, first), _relative_improvement(figures[LOSS], self.chance_loss)

    def improvement_over_start(self, figures: Figures, train_loss: float) -> tuple[float, float]:
        """The shares of the losses that were measured first which are gone, of training and of validation."""
        return _relative_improvement(train_loss, self._first_train_loss), _relative_improvement(
            figures[LOSS], self._first_loss
        )

    def accuracy_gained(self, figures: Figures) -> float:
        """The share of errors that is gone since the first measurement; NaN where there is no accuracy."""
        first = self._first_accuracy
        return (figures.get(ACCURACY, UNKNOWN) - first) / ((1 - first) or 1.0)

    def shows_skill(self, figures: Figures, least: float) -> bool:
        """Whether skill by accuracy is more than ``least``; without one, whether a metric is better than at first."""
        by_accuracy = self._by_accuracy(figures)
        if not math.isnan(by_accuracy):
            return by_accuracy > least
        return self.metric not in (LOSS, ACCURACY) and self.score(figures) > self.chance_score

    def _by_accuracy(self, figures: Figures) -> float:
        if not self._classes or ACCURACY not in figures:
            return UNKNOWN
        return float(skill(np.array(figures[ACCURACY]), self._classes))

    def state_dict(self) -> dict[str, Any]:
        """What is known by now."""
        return {name: value for name, value in vars(self).items() if name != "_penalty"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was called.

        Raises:
            CheckpointError: it is of another make.
        """
        vars(self).update(from_plain(self.state_dict(), state, "scores"))

    def _rises(self, metric: str) -> bool:
        return metric == ACCURACY if self._higher is None else self._higher

    def _value(self, figures: Figures, metric: str) -> float:
        """The value of ``metric``, which may be infinitely bad, as where training blew up."""
        if metric not in figures:
            raise ConfigError(
                f"growth is about {metric!r}, but evaluate gave {', '.join(figures)}: return a mapping that has it "
                "each time, or name another metric=..."
            )
        value, best = figures[metric], math.inf if self._rises(metric) else -math.inf
        if (math.isnan(value) or value == best) and math.isfinite(figures[LOSS]):
            what = "is not a number" if math.isnan(value) else f"is {value}, better than any can be,"
            raise ConfigError(
                f"evaluate gave a {metric} that {what} with the loss {figures[LOSS]:g}: return what it is worth where "
                "it is not defined, such as 0, or the most that you count"
            )
        return value


def _relative_improvement(value: float, reference: float) -> float:
    return (reference - value) / (abs(reference) or 1.0)


def _require_direction(metric: str | None, higher_is_better: bool | None) -> None:
    directions = {LOSS: False, ACCURACY: True}
    if metric is None and higher_is_better is not None:
        raise ConfigError(f"higher_is_better={higher_is_better} of what? Say metric=... too, or leave it out")
    if metric is None:
        return
    if metric not in directions and higher_is_better is None:
        raise ConfigError(
            f"metric={metric!r}: say whether it is better the higher it is, higher_is_better=True or False"
        )
    if metric in directions and higher_is_better is (not directions[metric]):
        raise ConfigError(
            f"metric={metric!r} with higher_is_better={higher_is_better}: it is better the "
            f"{'higher' if directions[metric] else 'lower'} it is; leave higher_is_better out, or give a figure "
            "of another meaning another name"
        )


ROUNDING = 1e-6
"""Largest excess of the mean of float32 hits over 1."""
EXPECTED = (
    "a number (a loss), a pair (loss, accuracy), or a mapping of names to numbers that has 'loss', such as "
    "{'loss': 0.3, 'f1': 0.8}"
)

Figures = dict[str, float]
"""What was measured of a model on validation data, by name; ``loss`` is always among them."""


def check_number(value: object, what: str) -> float:
    """A number, or a tensor or array that holds a single one; what is too large for a float is infinite.

    Raises:
        ConfigError: it is something else; ``what`` says where it came from.
    """
    try:
        return read_number(value)
    except ValueError as error:
        raise ConfigError(
            f"{what} is {describe_value(value)}: give a number, or a tensor that holds a single one"
        ) from error


def parse_metrics(returned: object) -> Figures:
    """What `evaluate` returned, checked and by name.

    A loss that is not finite is no mistake of the user's, as training may have blown up; nor is then any accuracy.

    Raises:
        ConfigError: it is none of what is `EXPECTED`, or the accuracy is no fraction.
    """
    figures = _name_figures(returned)
    loss, accuracy = figures[LOSS], figures.get(ACCURACY)
    if accuracy is None or not math.isfinite(loss):
        return figures
    if 0 <= accuracy <= 1 + ROUNDING:
        return {**figures, ACCURACY: min(accuracy, 1.0)}
    advice = "return the fraction that is right, which is 0 where nothing is"
    if accuracy > 1:
        advice = "divide percentages by 100"
        if 0 <= loss <= 1:
            advice += ", or return (loss, accuracy) in this order if the two are swapped"
        advice += "; a figure that is no fraction needs a name of its own, and metric=..."
    raise ConfigError(f"evaluate gave loss {loss:g} and accuracy {accuracy:g}, which is not in [0, 1]: {advice}")


def _name_figures(returned: object) -> Figures:
    if isinstance(returned, Mapping):
        named = cast("Mapping[Any, Any]", returned)
        if LOSS in named and all(isinstance(name, str) for name in named):
            return {name: check_number(value, f"{name!r} of what evaluate returned") for name, value in named.items()}
    elif isinstance(returned, tuple | list):
        pair = cast("Sequence[Any]", returned)
        if len(pair) == 2:
            return {
                name: check_number(value, f"the {name} of evaluate")
                for name, value in zip((LOSS, ACCURACY), pair, strict=True)
            }
    else:
        try:
            return {LOSS: check_number(returned, "the loss of evaluate")}
        except ConfigError:
            pass  # the sentence below says more
    raise ConfigError(f"evaluate returned {describe_value(cast(object, returned))}: it must return {EXPECTED}")
