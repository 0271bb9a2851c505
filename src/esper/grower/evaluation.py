"""What growth is about, and how one model is measured on it: as it is, and without each of its modules.

The wrappers of ``evaluate`` can be nested: ``Refit(Constrained(measure_two_sets, "target", {"source": 0.01}))``. Each
can be called with the model like the function that it wraps.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from esper.config.arguments import Advice, Name, check_arguments
from esper.engine.measurements import Evaluation
from esper.errors import ConfigError
from esper.grower.refit import SeedlessFork
from esper.grower.scores import EXPECTED, Limits, Metrics, Score
from esper.grower.validation import ExampleMean
from esper.growth.hooks import find_tensors
from esper.growth.model import GrowingModel
from esper.lifecycle.table import SeedTable
from esper.numerics.arrays import Bools, Floats, Ints
from esper.numerics.modules import keep_buffers, keep_modes

Number: TypeAlias = float | Tensor
"""A tensor holds a single one, or one value per example, of which the mean counts and the spread shows the error."""
Evaluate: TypeAlias = Callable[
    [GrowingModel], Number | tuple[Number, Number] | Mapping[str, Number] | Mapping[str, Score]
]
"""Measures a model on validation data: a loss, a pair of loss and accuracy, or metrics by name with ``loss`` among
them; under `esper.Constrained` a `Score` per set. It must give the same metrics for the same model. It is called in
`eval` mode and without gradients (`torch.enable_grad` brings them back), and changes neither modes nor buffers."""
EVALUATE_ADVICE = f"give a function that takes the model and returns {EXPECTED}"
ESTIMATED = "error estimated from"
ROUNDING = 2 * torch.finfo(torch.float32).eps
"""Relative difference between outputs for equal rows of one minibatch."""
ROUNDING_OF_RUNS = 1e-4
"""Largest relative difference between measurements of one model that comes of the order of sums on a device."""


@dataclass(frozen=True)
class Criterion:
    """What growth is about: the settings of all wrappers around a function that measures."""

    evaluate: Evaluate
    """The innermost function."""
    metric: str | None = None
    higher_is_better: bool | None = None
    objective: str | None = None
    constraints: dict[str, float] = field(default_factory=dict[str, float])
    """Relative increase of the loss that is allowed, by set."""
    refit: bool = False
    """Whether modules on probation are compared with forks."""

    def to_dict(self) -> dict[str, Any]:
        """All fields but the function, as plain values, for a run's configuration and for comparing saved states."""
        return {name: value for name, value in vars(self).items() if name != "evaluate"}


class Evaluator:
    """Wraps a function that measures a model, and is called in its place; ``criterion`` are fields of `Criterion`."""

    def __init__(self, evaluate: Evaluate, **criterion: Any) -> None:
        self.evaluate, self.criterion = evaluate, criterion

    def __call__(self, model: GrowingModel) -> Any:
        return self.evaluate(model)


def read_criterion(evaluate: Evaluate) -> Criterion:
    """The criterion of nested evaluators, or of a plain function."""
    fields: dict[str, Any] = {}
    kinds: set[type] = set()
    while isinstance(evaluate, Evaluator):
        if type(evaluate) in kinds:
            raise ConfigError(f"evaluate wraps esper.{type(evaluate).__name__} twice: remove one of them")
        kinds.add(type(evaluate))
        fields |= evaluate.criterion
        evaluate = evaluate.evaluate
    return Criterion(evaluate, **fields)


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
        super().__init__(evaluate, metric=name, higher_is_better=higher_is_better)


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
    """

    @check_arguments(ConfigError, evaluate=EVALUATE_ADVICE)
    def __init__(
        self,
        evaluate: Evaluate,
        objective: Annotated[Name, Advice("give the name of a set of data that evaluate measures")],
        limits: Limits | None = None,
    ) -> None:
        super().__init__(evaluate, objective=objective, constraints=dict(limits or {}))


class Refit(Evaluator):
    """Measures a module against a fork of the model that trains without it, instead of switching it off.

    Switching a module off overstates its benefit, since host and module have adapted to each other. A fork costs one
    more pass per minibatch for each module that is not kept yet. It requires ``loss`` in the configuration and a call
    of `Grower.isolated_backward` in the loop. A module has a contribution from its fork's second decision on.

    Args:
        evaluate: Measures the model and its forks.
    """

    @check_arguments(ConfigError, evaluate=EVALUATE_ADVICE)
    def __init__(self, evaluate: Evaluate) -> None:
        super().__init__(evaluate, refit=True)


@dataclass(frozen=True)
class ModelEvaluation(Evaluation):
    """One model on validation data, with all its metrics; none of a model that has diverged, which is not measured."""

    metrics: Metrics = field(default_factory=Metrics)
    """Metrics of the model as it is."""
    ablated: dict[str, Metrics] = field(default_factory=dict[str, Metrics])
    """Metrics by slot: with its module switched off, or switched on where it does not count yet."""
    constant_output: bool = False
    """Whether the model gave the same output for all examples; False where that was not checked."""
    estimated_from: Ints | None = None
    """By slot, the number of decisions that the error of its loss was estimated from; 0 where examples show it."""

    def describe_error(self, place: int) -> str:
        """How the error in a slot was estimated; empty where examples show it, or nothing does."""
        decisions = 0 if self.estimated_from is None else int(self.estimated_from[place])
        return f"{ESTIMATED} {decisions} decisions" if decisions else ""


def measure_model(
    model: GrowingModel,
    table: SeedTable,
    evaluate: Evaluate,
    parse: Callable[[object], Metrics],
    baseline: Metrics | None,
    due: Bools,
    forks: Mapping[str, SeedlessFork | None] = MappingProxyType({}),
) -> tuple[Metrics, dict[str, Metrics], bool]:
    """Measure the model as it is, and with each module that is ``due``, bool ``[1, S]``, at another alpha.

    A module that counts is switched off, or replaced by its fork if ``forks`` has its slot; where that is None, it is
    not measured. A module that does not count yet is put in at full alpha. ``parse`` checks what ``evaluate`` returns,
    and ``baseline`` are metrics of the model as it is, if known.
    Returns ``metrics``, ``ablated`` and ``constant_output`` of a `ModelEvaluation`.
    """
    outputs, ablated = OutputComparison(), dict[str, Metrics]()

    def measure() -> Metrics:
        with torch.no_grad(), keep_modes(model), keep_buffers(model):
            model.eval()
            return parse(evaluate(model))

    if baseline is None:
        with model.register_forward_hook(outputs.compare, with_kwargs=True):
            baseline = measure()
    for place, slot in enumerate(model.slots.values()):
        if slot.seed is None or not due[0, place]:
            continue
        if slot.name not in forks:
            with slot.seed.temporary_alpha(0.0 if table.blended[0, place] else 1.0):
                ablated[slot.name] = measure()
        elif (fork := forks[slot.name]) is not None:
            ablated[slot.name] = fork.run(measure)
    return baseline, ablated, outputs.compared and not outputs.varied


def find_changes(first: Metrics, second: Metrics) -> dict[str, float]:
    """The metrics that differ between two measurements of the same model, and by how much.

    By 0 if only the values of single examples differ, which then belong to other examples.
    """
    changes = dict[str, float]()
    for name in first.keys() & second.keys():
        one, other = first[name], second[name]
        same = math.isclose(one, other, rel_tol=ROUNDING_OF_RUNS)
        if isinstance(one, ExampleMean) and isinstance(other, ExampleMean):
            same = one.examples.shape == other.examples.shape
            same = same and np.allclose(one.examples, other.examples, rtol=ROUNDING_OF_RUNS, atol=ROUNDING_OF_RUNS)
        if not same:
            changes[name] = abs(one - other)
    return changes


def store_contributions(model: GrowingModel, contributions: Floats) -> None:
    """Store with each module its contribution, ``[1, S]``, for `GrowingModel.summary`; NaN keeps the earlier one."""
    for slot, contribution in zip(model.slots.values(), contributions[0].tolist(), strict=True):
        if slot.seed is not None and math.isfinite(contribution):
            slot.seed.contribution = contribution


class OutputComparison:
    """Compares a model's outputs for different examples, until some of them differ."""

    def __init__(self) -> None:
        self.compared = False
        """Whether there were outputs for different examples."""
        self.varied = False
        """Whether some outputs differ, or may differ where that is not known."""

    @torch.no_grad()
    def compare(self, _: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        """Forward hook of the model."""
        if self.varied or torch.compiler.is_compiling():
            return
        if any(leaf.is_nested or leaf.layout is not torch.strided for leaf in find_tensors(output)):
            self.varied = True
            return
        outputs = [rows for rows in _find_rows(output) if rows.is_floating_point()]
        if outputs and any(map(_have_different_rows, _find_rows((arguments, keywords)))):
            self.compared = True
            self.varied = any(map(_have_different_rows, outputs))


def _find_rows(value: Any) -> list[Tensor]:
    """The tensors in ``value`` that may hold several examples, ``[N, ...]``."""
    dense = [leaf for leaf in find_tensors(value) if not leaf.is_nested and leaf.layout is torch.strided]
    return [leaf for leaf in dense if leaf.dim() > 0 and len(leaf) > 1 and leaf.numel() and not leaf.is_complex()]


def _have_different_rows(rows: Tensor) -> bool:
    """Whether the examples are not all the same."""
    first = rows[:1]
    if not rows.is_floating_point():
        return bool((rows != first).any())
    return not bool(torch.isclose(rows, first, rtol=ROUNDING, atol=0.0).all())
