"""Wrappers of ``evaluate`` that choose the metric, set constraints, or measure modules by refitting.

They can be nested: ``Refit(Constrained(measure_two_sets, "target", {"source": 0.01}))``. Each can be called with the
model like the function it wraps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from esper.config.arguments import Advice, Name, check_arguments
from esper.errors import ConfigError
from esper.grower.evaluation import Evaluate
from esper.grower.refit import Counterfactual
from esper.grower.scores import EXPECTED, Limits
from esper.growth.model import GrowingModel

EVALUATE_ADVICE = f"give a function that takes the model and returns {EXPECTED}"


class Evaluator:
    """Wraps a function that measures a model, and is called in its place."""

    evaluate: Evaluate

    def __call__(self, model: GrowingModel) -> Any:
        """The result of ``evaluate``."""
        return self.evaluate(model)

    def describe_criterion(self) -> dict[str, Any]:
        """The fields of `Criterion` that this evaluator sets."""
        raise NotImplementedError


class Metric(Evaluator):
    """Makes one named metric the target of growth. Plateaus are also measured on it.

    ```python
    grower = esper.Grower(model, optimizer, esper.Metric(measure, "f1", higher_is_better=True))
    ```

    Args:
        evaluate: Returns a mapping of names to numbers, with ``loss`` and this metric.
        name: Name of the metric.
        higher_is_better: Required for metrics other than ``loss`` and ``accuracy``.

    Raises:
        ConfigError: an argument has the wrong type.
    """

    @check_arguments(ConfigError, evaluate=EVALUATE_ADVICE)
    def __init__(
        self,
        evaluate: Evaluate,
        name: Annotated[Name, Advice("give the name of a figure that evaluate returns")],
        higher_is_better: bool | None = None,
    ) -> None:
        self.evaluate, self.name, self.higher_is_better = evaluate, name, higher_is_better

    def describe_criterion(self) -> dict[str, Any]:
        """The metric and its direction."""
        return {"metric": self.name, "higher_is_better": self.higher_is_better}


class Constrained(Evaluator):
    """Improves one of several validation sets while limiting the increase of the loss on the others.

    While a constraint is broken, no module is kept. The module whose removal reduces the violation most is pruned.
    `esper.grower.scores` has the formula.

    ```python
    grower = esper.Grower(model, optimizer, esper.Constrained(measure, "target", {"source": 0.01}))
    ```

    Args:
        evaluate: Returns a mapping of set names to `esper.grower.scores.Score`.
        objective: Name of the set to improve.
        limits: Maximum relative increase of the loss per other set, relative to the loss when the grower is made.

    Raises:
        ConfigError: an argument has the wrong type.
    """

    @check_arguments(ConfigError, evaluate=EVALUATE_ADVICE)
    def __init__(
        self,
        evaluate: Evaluate,
        objective: Annotated[Name, Advice("give the name of a set of data that evaluate measures")],
        limits: Limits | None = None,
    ) -> None:
        self.evaluate, self.objective, self.limits = evaluate, objective, dict(limits or {})

    def describe_criterion(self) -> dict[str, Any]:
        """The objective and the limits on other sets."""
        return {"objective": self.objective, "constraints": self.limits}


class Refit(Evaluator):
    """Measures a module against a fork of the model that trains without it, instead of switching it off.

    Switching a module off overstates its benefit, since host and module have adapted to each other. A fork costs one
    more pass per minibatch for each module that is not kept yet. It requires ``loss`` in the configuration and a call
    of `Grower.isolated_backward` in the loop. A module has a contribution from its fork's second decision on.

    Args:
        evaluate: Measures the model and its forks.

    Raises:
        ConfigError: ``evaluate`` is not a function.
    """

    @check_arguments(ConfigError, evaluate=EVALUATE_ADVICE)
    def __init__(self, evaluate: Evaluate) -> None:
        self.evaluate = evaluate

    def describe_criterion(self) -> dict[str, Any]:
        """The kind of evidence."""
        return {"evidence": Counterfactual.REFIT}


@dataclass(frozen=True)
class Criterion:
    """What growth is about: the settings of an evaluator and of those that it wraps."""

    evaluate: Evaluate
    """The innermost function."""
    metric: str | None = None
    higher_is_better: bool | None = None
    objective: str | None = None
    constraints: dict[str, float] = field(default_factory=dict[str, float])
    """Relative increase of the loss that is allowed, by set."""
    evidence: Counterfactual = Counterfactual.DEPENDENCE

    def to_dict(self) -> dict[str, Any]:
        """All fields but the function, as plain values, for a run's configuration and for comparing saved states."""
        values = {name: value for name, value in vars(self).items() if name != "evaluate"}
        return {**values, "evidence": self.evidence.value}


def read_criterion(evaluate: Evaluate) -> Criterion:
    """The criterion of an evaluator; of a plain function accuracy where there is one, or else the loss."""
    fields: dict[str, Any] = {}
    kinds: set[type] = set()
    while isinstance(evaluate, Evaluator):
        if type(evaluate) in kinds:
            raise ConfigError(f"evaluate wraps esper.{type(evaluate).__name__} twice: remove one of them")
        kinds.add(type(evaluate))
        fields |= evaluate.describe_criterion()
        evaluate = evaluate.evaluate
    return Criterion(evaluate, **fields)
