"""Several sets of validation data: growth is about one of them, and may cost others no more than is said.

`evaluate` then returns a `Score` for each set, by name. The figures of the objective are those of a model that is
measured on it alone; a constraint is about a loss, which may rise by a share of what it was before growth began.

What a network scores falls by `ConstraintSet.penalty` where it breaks a constraint: at least by `PENALTY`, the whole
range of an accuracy. So the contribution of a seed without which the constraint would hold is negative, for gates,
rules and policies alike; and the grower prunes at once the seed without which the `excess` is smallest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, cast

from torch import Tensor

from esper.config.arguments import Advice, NonNegativeFloat, describe_value
from esper.errors import ConfigError
from esper.grower.scores import ACCURACY, LOSS, ROUNDING, Metrics, check_number, parse_metrics

PENALTY = 1.0
"""What the score of a network loses that breaks a constraint, besides the share by which it does."""


class Score(NamedTuple):
    """How a model does on one set of validation data."""

    loss: float | Tensor
    accuracy: float | Tensor | None = None
    """A fraction in [0, 1], where there is such a thing."""


Limits = Annotated[
    Mapping[str, NonNegativeFloat],
    Advice(
        "give a mapping from the names of sets that evaluate measures to the share by which their loss may rise, such "
        "as {'source': 0.01}"
    ),
]
"""By which share the losses of sets may rise, by name."""


class ConstraintSet:
    """What is measured, and what must hold.

    Args:
        objective: The set that growth is about; None: evaluate measures a single one, which has no name.
        limits: By which share the losses of other sets may rise.

    Raises:
        ConfigError: there are limits without an objective, or one on the objective.
    """

    def __init__(self, objective: str | None, limits: Mapping[str, float]) -> None:
        if limits and objective is None:
            raise ConfigError(
                f"constraints on {', '.join(limits)}, but no objective: say objective=..., the set that growth is about"
            )
        if objective in limits:
            raise ConfigError(f"constraints: {objective!r} is the objective, which is to fall; constrain other sets")
        self.objective, self.limits = objective, dict(limits)
        self.references: dict[str, float] = {}
        """Losses before growth, by set."""

    def read(self, returned: object) -> Figures:
        """What `evaluate` returned, checked: the objective's figures, and the losses of other sets.

        Raises:
            ConfigError: it is none of what is expected.
        """
        if self.objective is None:
            return parse_metrics(returned)
        names = [self.objective, *self.limits]
        if not isinstance(returned, Mapping) or not all(name in returned for name in names):
            raise ConfigError(
                f"evaluate returned {describe_value(cast(object, returned))}: it must return a mapping of "
                f"{', '.join(names)} to esper.Score(loss=..., accuracy=...) each"
            )
        sets = cast("Mapping[Any, Any]", returned)
        figures = _read_score(self.objective, sets[self.objective])
        for name in self.limits:
            figures[name_loss(name)] = _read_score(name, sets[name])[LOSS]
        return figures

    def set_references(self, figures: Figures) -> None:
        """Take these figures for those of the model before growth.

        Raises:
            ConfigError: a loss is not above zero, so that no share of it can be told, or not finite.
        """
        for name in self.limits:
            loss = figures[name_loss(name)]
            if not (math.isfinite(loss) and loss > 0):
                raise ConfigError(
                    f"constraints: the loss of {name!r} is {loss:g} before growth: a share of it can be told of finite "
                    "losses above 0 alone"
                )
            self.references[name] = loss

    def find_broken(self, figures: Figures) -> dict[str, float]:
        """By set, the share by which its loss has risen, where that is more than may be."""
        rises = {name: figures[name_loss(name)] / reference - 1 for name, reference in self.references.items()}
        return {name: rise for name, rise in rises.items() if not rise <= self.limits[name] + ROUNDING}

    def excess(self, figures: Figures) -> float:
        """By how much more losses have risen than they may, as a share, in all: 0 where all constraints hold."""
        broken = self.find_broken(figures)
        return sum(math.inf if math.isnan(rise) else rise - self.limits[name] for name, rise in broken.items())

    def penalty(self, figures: Figures) -> float:
        """What is taken off the score: 0 where all constraints hold."""
        broken = self.find_broken(figures)
        return PENALTY * len(broken) + min(self.excess(figures), PENALTY * len(broken))

    def describe(self, broken: Mapping[str, float]) -> str:
        """In words, to come after a sentence; nothing where nothing is broken."""
        return "".join(f"; {name} loss up {rise:.1%}, at most {self.limits[name]:.1%}" for name, rise in broken.items())


def name_loss(name: str) -> str:
    """The name of a set's loss among the figures."""
    return f"{name} {LOSS}"


def _read_score(name: str, value: Any) -> Figures:
    """Figures of one set of data."""
    if not isinstance(value, Score):
        raise ConfigError(f"evaluate returned {describe_value(value)} for {name!r}: give an esper.Score")
    parts = {LOSS: value.loss} if value.accuracy is None else {LOSS: value.loss, ACCURACY: value.accuracy}
    return parse_metrics({part: check_number(figure, f"the {part} of {name!r}") for part, figure in parts.items()})
