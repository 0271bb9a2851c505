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


class Metric:
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

    def __call__(self, model: GrowingModel) -> Any:
        """The result of ``evaluate``."""
        return self.evaluate(model)


class Constrained:
    """Growth is about one of several sets of validation data, and the loss on others may rise by so much at most.

    While a constraint is broken, the module without which it is broken by least is pruned, and none is kept;
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
        objective: Annotated[Name, Advice("give the name of a set of data that evaluate measures")] | None,
        limits: Limits | None = None,
    ) -> None:
        self.evaluate, self.objective, self.limits = evaluate, objective, dict(limits or {})

    def __call__(self, model: GrowingModel) -> Any:
        """The result of ``evaluate``."""
        return self.evaluate(model)


class Refit:
    """Modules on trial are judged by a fork of the model that trains on without them, not by switching them off.

    What a model loses when a module is switched off is more than it has gained by it, since host and module train
    together. A fork costs another pass per minibatch for each module on trial; it needs ``loss`` in the configuration
    and `Grower.isolated_backward` in the loop. A module has a contribution from its fork's second decision on.

    Args:
        evaluate: Measures the model, and its forks.

    Raises:
        ConfigError: it is not a function.
    """

    @check_arguments(ConfigError, evaluate=EVALUATE_ADVICE)
    def __init__(self, evaluate: Evaluate) -> None:
        self.evaluate = evaluate

    def __call__(self, model: GrowingModel) -> Any:
        """The result of ``evaluate``."""
        return self.evaluate(model)


@dataclass(frozen=True)
class Criterion:
    """What growth is about, taken from an evaluator and those that it wraps."""

    evaluate: Evaluate
    """The innermost function."""
    metric: str | None = None
    higher_is_better: bool | None = None
    objective: str | None = None
    constraints: dict[str, float] = field(default_factory=dict[str, float])
    """Relative increase of the loss that is allowed, by set."""
    evidence: Counterfactual = Counterfactual.DEPENDENCE

    def to_dict(self) -> dict[str, Any]:
        """All but the function, as plain values, for a run's configuration and for comparing saved states."""
        values = {name: value for name, value in vars(self).items() if name != "evaluate"}
        return {**values, "evidence": self.evidence.value}


def read_criterion(evaluate: Evaluate) -> Criterion:
    """The criterion of an evaluator; that of a plain function has the accuracy, or else the loss, as its metric.

    Raises:
        ConfigError: it wraps another one of its kind.
    """
    fields: dict[str, Any] = {}
    kinds: set[type] = set()
    while isinstance(evaluate, Metric | Constrained | Refit):
        if type(evaluate) in kinds:
            raise ConfigError(f"evaluate is an esper.{type(evaluate).__name__} of another one: leave one of them out")
        kinds.add(type(evaluate))
        match evaluate:
            case Metric():
                fields |= {"metric": evaluate.name, "higher_is_better": evaluate.higher_is_better}
            case Constrained():
                fields |= {"objective": evaluate.objective, "constraints": evaluate.limits}
            case Refit():
                fields["evidence"] = Counterfactual.REFIT
        evaluate = evaluate.evaluate
    return Criterion(evaluate, **fields)
