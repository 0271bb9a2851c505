"""What growth is about, as objects that wrap ``evaluate``: a metric by name, constraints, evidence from refitting.

They may wrap each other: ``Refit(Constrained(measure_two_sets, "target", {"source": 0.01}))``. Each is a function of
the model itself, and so may be called by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from esper.config.arguments import Advice, Name, check_arguments
from esper.errors import ConfigError
from esper.grower.evaluation import Evaluate
from esper.grower.isolated import Counterfactual
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
    """Growth is about one metric by name, plateaus included.

    ```python
    grower = esper.Grower(model, optimizer, esper.Metric(measure, "f1", higher_is_better=True))
    ```

    Args:
        evaluate: Returns a mapping of names to numbers that has ``loss`` and this metric.
        name: The metric.
        higher_is_better: Required for all metrics but ``loss`` and ``accuracy``.

    Raises:
        ConfigError: an argument is of another kind.
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
    """Growth is about one of several sets of validation data, and the loss on the others may rise only by a limit.

    While a constraint is broken, no module is kept, and the one without which it is broken least is pruned;
    `esper.grower.scores` has the formula.

    ```python
    grower = esper.Grower(model, optimizer, esper.Constrained(measure, "target", {"source": 0.01}))
    ```

    Args:
        evaluate: Returns an `esper.Score` for each set, by name.
        objective: The set that growth is about.
        limits: Relative increase of the loss on other sets that is allowed, over what it is when the grower is made.

    Raises:
        ConfigError: an argument is of another kind.
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
    """Modules on trial are judged by a fork of the model that trains on without them, not by switching them off.

    What a model loses when a module is switched off is more than it has gained by it, since host and module train
    together. A fork costs another pass per minibatch for each module on trial; it needs ``loss`` in the configuration
    and `Grower.isolated_backward` in the loop. A module has a contribution from its fork's second decision on.

    Args:
        evaluate: Measures the model, and its forks.

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
    """The criterion of an evaluator. For a plain function the metric is accuracy where there is one, or else the loss.

    Raises:
        ConfigError: an evaluator wraps another one of its kind.
    """
    fields: dict[str, Any] = {}
    kinds: set[type] = set()
    while isinstance(evaluate, Evaluator):
        if type(evaluate) in kinds:
            raise ConfigError(f"evaluate is an esper.{type(evaluate).__name__} of another one: leave one of them out")
        kinds.add(type(evaluate))
        fields |= evaluate.describe_criterion()
        evaluate = evaluate.evaluate
    return Criterion(evaluate, **fields)
