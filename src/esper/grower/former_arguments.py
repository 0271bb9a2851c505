"""Former arguments of `esper.Grower`: they still work, and warn."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from esper.control.controller import Controller
from esper.errors import ConfigError
from esper.former import warn_of_former
from esper.grower.evaluators import Constrained, Metric, Refit
from esper.grower.refit import Counterfactual

P = ParamSpec("P")
T = TypeVar("T")

_EVALUATORS = {
    "metric": "esper.Metric(evaluate, name, higher_is_better)",
    "higher_is_better": "esper.Metric(evaluate, name, higher_is_better)",
    "objective": "esper.Constrained(evaluate, objective, limits)",
    "constraints": "esper.Constrained(evaluate, objective, limits)",
    "evidence": "esper.Refit(evaluate)",
}
"""By former keyword the evaluator that takes its place."""


def accept_former_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Accept the former call of `Grower`: the controller third, and ``metric``, ``objective``, ... as keywords."""

    @functools.wraps(function)
    def construct(owner: Any, *arguments: Any, **keywords: Any) -> Any:
        model_and_optimizer, rest = arguments[:2], list(arguments[2:])
        if rest and isinstance(rest[0], str | Path | Controller):
            warn_of_former("the third argument of Grower is now evaluate: give the controller as controller=...")
            keywords["controller"] = rest.pop(0)
        former = {name: keywords.pop(name) for name in _EVALUATORS if name in keywords}
        if former and (rest or "evaluate" in keywords):
            for name in former:
                warn_of_former(f"{name}= of Grower is now part of evaluate: give {_EVALUATORS[name]}")
            if rest:
                rest[0] = _wrap(rest[0], **former)
            else:
                keywords["evaluate"] = _wrap(keywords["evaluate"], **former)
        return cast("Any", function)(owner, *model_and_optimizer, *rest, **keywords)

    return construct


def _wrap(
    evaluate: Any,
    *,
    metric: str | None = None,
    higher_is_better: bool | None = None,
    objective: str | None = None,
    constraints: dict[str, float] | None = None,
    evidence: str = Counterfactual.DEPENDENCE,
) -> Any:
    if metric is not None:
        evaluate = Metric(evaluate, metric, higher_is_better)
    elif higher_is_better is not None:
        raise ConfigError(f"higher_is_better={higher_is_better} needs metric=...: give it too, or omit both")
    if objective is not None:
        evaluate = Constrained(evaluate, objective, constraints)
    elif constraints:
        raise ConfigError(f"constraints on {', '.join(constraints)}, but no objective: give objective=... too")
    if evidence not in tuple(Counterfactual):
        raise ConfigError(f"evidence is {evidence!r}: give one of {', '.join(Counterfactual)}")
    return Refit(evaluate) if evidence == Counterfactual.REFIT else evaluate
