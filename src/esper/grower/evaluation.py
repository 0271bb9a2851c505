"""Measure one model on validation data: as it is, and with each of its modules switched off or replaced by a fork."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from esper.config.arguments import Advice, Name, check_arguments
from esper.engine.measurements import Evaluation
from esper.errors import ConfigError
from esper.grower.refit import Counterfactual, SeedlessFork
from esper.grower.scores import EXPECTED, LOSS, Limits, Metrics, Score, Scores
from esper.grower.validation import compute_difference_error
from esper.growth.hooks import find_tensors
from esper.growth.model import GrowingModel
from esper.lifecycle.table import SeedTable
from esper.numerics.arrays import Bools, Floats
from esper.numerics.modules import keep_modes

Number: TypeAlias = float | Tensor
"""A tensor holds a single one, or one value per example, of which the mean counts and the spread shows the error."""
Evaluate: TypeAlias = Callable[
    [GrowingModel], Number | tuple[Number, Number] | Mapping[str, Number] | Mapping[str, Score]
]
"""Measures a model on validation data: a loss, a pair of loss and accuracy, or metrics by name with ``loss`` among
them; under `esper.Constrained` a `Score` for each of several sets by name. It chooses its data and device, must give
the same metrics for the same model, and may leave the model in `eval` mode."""


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
        """The kind of counterfactual."""
        return {"counterfactual": Counterfactual.REFIT}


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
    counterfactual: Counterfactual = Counterfactual.DEPENDENCE

    def to_dict(self) -> dict[str, Any]:
        """All fields but the function, as plain values, for a run's configuration and for comparing saved states."""
        values = {name: value for name, value in vars(self).items() if name != "evaluate"}
        return {**values, "counterfactual": self.counterfactual.value}


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


@dataclass(frozen=True)
class ModelEvaluation(Evaluation):
    """One model on validation data, with all its metrics; none of a model that has diverged, which is not measured."""

    metrics: Metrics = field(default_factory=Metrics)
    """Metrics of the model as it is."""
    ablated: dict[str, Metrics] = field(default_factory=dict[str, Metrics])
    """Metrics by slot: with its module switched off, or switched on where it does not count yet."""
    constant_output: bool = False
    """Whether the model gave the same output for all examples; False where that was not checked."""


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

    A module that counts is compared with its absence: in the model, or in its fork if ``forks`` has its slot; where
    that is None, it is not measured. A module that does not count yet is put in at full alpha, and compared with the
    model as it is. ``parse`` reads and checks what ``evaluate`` returns, and ``baseline`` are metrics that are known.
    Returns ``metrics``, ``ablated`` and ``constant_output`` of a `ModelEvaluation`.
    """
    detector, ablated = ConstantOutputDetector(), dict[str, Metrics]()
    with keep_modes(model):
        if baseline is None:
            with detector.watch(model):
                baseline = parse(evaluate(model))
        for place, slot in enumerate(model.slots.values()):
            if slot.seed is None or not due[0, place]:
                continue
            if slot.name not in forks:
                with slot.seed.temporary_alpha(0.0 if table.blended[0, place] else 1.0):
                    ablated[slot.name] = parse(evaluate(model))
            elif (fork := forks[slot.name]) is not None:
                ablated[slot.name] = fork.run(lambda: parse(evaluate(model)))
    return baseline, ablated, detector.is_constant


def compute_contributions(
    metrics: Metrics,
    ablated: dict[str, Metrics],
    constant_output: bool,
    due: Bools,
    slots: Iterable[str],
    table: SeedTable,
    scores: Scores,
) -> ModelEvaluation:
    """The evaluation ``[1]`` of a measured model, with contributions ``[1, S]`` by score and by loss."""
    by_score, by_loss, score_error, loss_error = np.full((4, *table.stage.shape), np.nan)
    scores.record_values([metrics, *ablated.values()])
    for place, slot in enumerate(slots):
        if slot in ablated:
            variant, counts = ablated[slot], bool(table.blended[0, place])
            by_score[0, place] = scores.compute_contribution(metrics, variant, counts=counts)
            # A module that does not count yet was switched on, not off.
            by_loss[0, place] = (1.0 if counts else -1.0) * (variant[LOSS] - metrics[LOSS])
            score_error[0, place] = scores.compute_contribution_error(metrics, variant, counts=counts)
            loss_error[0, place] = compute_difference_error(metrics[LOSS], variant[LOSS])
    progress = scores.compute_progress(metrics)
    return ModelEvaluation(
        loss=np.array([float(metrics[LOSS])]),
        accuracy=np.array([scores.compute_score(metrics)]),
        accuracy_contribution=by_score,
        loss_contribution=by_loss,
        accuracy_error=score_error,
        loss_error=loss_error,
        fresh=due,
        progress=None if progress is None else np.array([progress]),
        metrics=metrics,
        ablated=ablated,
        constant_output=constant_output,
    )


def store_contributions(model: GrowingModel, contributions: Floats) -> None:
    """Store with each module its contribution, ``[1, S]``, for `GrowingModel.summary`; NaN keeps the earlier one."""
    for slot, contribution in zip(model.slots.values(), contributions[0].tolist(), strict=True):
        if slot.seed is not None and math.isfinite(contribution):
            slot.seed.contribution = contribution


ROUNDING = 2 * torch.finfo(torch.float32).eps
"""Relative difference between outputs for equal rows of one minibatch."""


class ConstantOutputDetector:
    """Watches a model's calls until one of its outputs differs between examples."""

    def __init__(self) -> None:
        self._varied = self._compared = False

    @property
    def is_constant(self) -> bool:
        """Whether different examples had equal outputs in every minibatch; False where that is not known."""
        return self._compared and not self._varied

    @contextmanager
    def watch(self, model: GrowingModel) -> Generator[None]:
        """Watch the calls of ``model`` within the block."""
        handle = model.register_forward_hook(self._compare_rows, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    @torch.no_grad()
    def _compare_rows(self, _: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        if self._varied or torch.compiler.is_compiling():
            return
        if any(leaf.is_nested or leaf.layout is not torch.strided for leaf in find_tensors(output)):
            self._varied = True  # not known: assume that outputs differ
            return
        inputs, outputs = _find_rows((arguments, keywords)), _find_rows(output)
        outputs = [rows for rows in outputs if rows.is_floating_point()]
        if outputs and any(_have_different_rows(rows) for rows in inputs):
            self._compared = True
            self._varied = any(_have_different_rows(rows) for rows in outputs)


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
