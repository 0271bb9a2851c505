"""Arguments of `esper.Grower` that have another place since version 0.3; they still work for one version, and warn."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from esper.control.controller import Controller
from esper.errors import ConfigError
from esper.grower.evaluators import Constrained, Metric, Refit
from esper.grower.isolated import Counterfactual

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
    """Let a constructor take the controller as its third argument, and what are evaluators now as keywords."""

    @functools.wraps(function)
    def construct(*arguments: Any, **keywords: Any) -> Any:
        if len(arguments) == 4 and isinstance(arguments[3], str | Path | Controller):
            _warn("the third argument of Grower is evaluate now", "give the controller as controller=...")
            *arguments, keywords["controller"] = arguments  # type: ignore[assignment]
        former = {name: keywords.pop(name) for name in _EVALUATORS if name in keywords}
        if former and "evaluate" in keywords:
            for name in former:
                _warn(f"{name}= of Grower is part of evaluate now", f"give {_EVALUATORS[name]}")
            keywords["evaluate"] = _wrap(keywords["evaluate"], **former)
        return function(*arguments, **keywords)  # type: ignore[arg-type]

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
        raise ConfigError(f"higher_is_better={higher_is_better} of what? Say metric=... too, or leave it out")
    if objective is not None or constraints:
        evaluate = Constrained(evaluate, objective, constraints)
    if evidence not in tuple(Counterfactual):
        raise ConfigError(f"evidence is {evidence!r}: give one of {', '.join(Counterfactual)}")
    return Refit(evaluate) if evidence == Counterfactual.REFIT else evaluate


def _warn(what: str, instead: str) -> None:
    warnings.warn(f"{what}: {instead}; the former way goes in version 0.4", DeprecationWarning, stacklevel=3)
