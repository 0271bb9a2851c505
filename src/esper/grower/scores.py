"""What growth is about: metrics that ``evaluate`` returned, the score of a model, and constraints on other data.

The *score* is higher for a better model. Where the metric is, too, such as accuracy::

    score = metric - penalty

For a loss, and any other metric that is better the lower it is, it is the relative improvement over a reference::

    score = (reference - metric) / |reference| - penalty

The reference of the loss is that of guessing, ln(classes), where the number of classes is known. Otherwise, for a
model that was trained before and starts above that, and for other metrics, it is the first value that was measured.

The *contribution* of a module is the score with it less the score without it. Of a metric that is better the lower it
is, the reference is then the value without the module, as it is now::

    contribution = (without - with) / |without|

So .02 is a fiftieth of the present loss, early and late in training. Once a value of zero or below was measured, whose
shares mean nothing, the greater of ``|without|`` and ``|reference|`` divides. The tolerances of gates, the margins of
rules and rent are in units of contributions.

Where the metric is a mean over validation examples whose values are known (`esper.Validation`, or an ``evaluate`` that
returns one value per example), a contribution has the standard error of the mean of the differences, example by
example, and for a loss that of a ratio.

A *constraint* limits by how much the loss on another set of data may rise, relative to its value before growth. With
``excess`` as the sum of ``rise - limit`` over the broken constraints::

    penalty = PENALTY * broken + min(excess, PENALTY * broken)

Each broken constraint so costs at least the whole range of an accuracy. A module without which a constraint would hold
has a negative contribution, and the grower prunes the module without which ``excess`` is smallest.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, cast

import numpy as np
from torch import Tensor

from esper.config.arguments import Advice, NonNegativeFloat, describe_value, read_number
from esper.engine.governor import skill
from esper.errors import ConfigError
from esper.grower.validation import ExampleMean, compute_difference_error
from esper.runs.reader import ACCURACY, LOSS, RunMetric
from esper.serialization import from_plain

UNKNOWN = math.nan
PENALTY = 1.0
"""Least loss of score per broken constraint."""
ROUNDING = 1e-6
"""Largest excess of the mean of float32 hits over 1."""
EXPECTED = (
    "a loss, a pair (loss, accuracy), or a mapping of names to numbers with the key 'loss', such as "
    "{'loss': 0.3, 'f1': 0.8}; in a pair or a mapping a value may be a tensor with one value per example"
)

Metrics = dict[str, float]
"""Metrics of a model on validation data, by name; ``loss`` is always among them."""
Limits = Annotated[
    Mapping[str, NonNegativeFloat],
    Advice(
        "give a mapping from names of sets that evaluate measures to the maximum relative increase of their loss, such "
        "as {'source': 0.01}"
    ),
]
"""Largest relative increase of the loss that is allowed, by set."""


class Score(NamedTuple):
    """Loss and accuracy of a model on one validation set; may be tensors with one value per example."""

    loss: float | Tensor
    accuracy: float | Tensor | None = None
    """A fraction in [0, 1]; None if the task has no accuracy."""


def check_number(value: object, name: str) -> float:
    """A number, or a tensor or array that holds a single one, as a float; infinite if it is too large for one."""
    if isinstance(value, ExampleMean):
        return value
    try:
        return read_number(value)
    except ValueError as error:
        raise ConfigError(
            f"{name} is {describe_value(value)}: give a number, or a tensor that holds a single one"
        ) from error


def parse_metrics(result: object) -> Metrics:
    """The checked metrics in a ``result`` of ``evaluate``: a loss, a pair of loss and accuracy, or a mapping."""
    metrics = _name_metrics(result)
    loss, accuracy = metrics[LOSS], metrics.get(ACCURACY)
    # With a loss that is not finite any accuracy will do: training may have blown up.
    if accuracy is None or not math.isfinite(loss):
        return metrics
    if 0 <= accuracy <= 1 + ROUNDING:
        return {**metrics, ACCURACY: min(accuracy, 1.0)}
    advice = "return the fraction of correct predictions"
    if accuracy > 1:
        advice = "divide percentages by 100"
        if 0 <= loss <= 1:
            advice += ", or return (loss, accuracy) in this order if the two are swapped"
        advice += "; a metric that is not a fraction needs its own name, and esper.Metric"
    raise ConfigError(f"evaluate returned loss {loss:g} and accuracy {accuracy:g}, which is not in [0, 1]: {advice}")


def _name_metrics(result: object) -> Metrics:
    named: dict[Any, Any] = {}
    if isinstance(result, Mapping):
        named = dict(cast("Mapping[Any, Any]", result))
    elif isinstance(result, tuple | list):
        pair = cast("Sequence[Any]", result)
        named = dict(zip((LOSS, ACCURACY), pair, strict=True)) if len(pair) == 2 else {}
    else:
        try:
            return {LOSS: check_number(result, "the loss of evaluate")}
        except ConfigError:
            pass  # the message below lists all that is accepted
    if LOSS not in named or not all(isinstance(name, str) for name in named):
        raise ConfigError(f"evaluate returned {describe_value(cast(object, result))}: it must return {EXPECTED}")
    return {name: _read_figure(value, f"{name!r} of what evaluate returned") for name, value in named.items()}


def _read_figure(value: object, name: str) -> float:
    """The mean of one value per example ``[N]``, or a number."""
    mean = ExampleMean.read(value)
    return check_number(value, name) if mean is None else mean


def name_loss(name: str) -> str:
    """The name of a constrained set's loss among the metrics."""
    return f"{name} {LOSS}"


class ConstraintSet:
    """Limits on the losses of other sets of validation data than the ``objective``, which growth is about.

    An objective of None: ``evaluate`` measures a single set, without a name.
    """

    def __init__(self, objective: str | None, limits: Mapping[str, float]) -> None:
        if objective in limits:
            raise ConfigError(f"constraints: {objective!r} is the objective: constrain other sets")
        self.objective, self.limits = objective, dict(limits)
        self.references: dict[str, float] = {}
        """Losses before growth, by set."""

    def parse_metrics(self, result: object) -> Metrics:
        """The checked metrics in a ``result`` of ``evaluate``: those of the objective, and ``NAME loss`` of others."""
        if self.objective is None:
            return parse_metrics(result)
        names = [self.objective, *self.limits]
        scores = cast("Mapping[object, object]", result)
        if not isinstance(result, Mapping) or not all(name in scores for name in names):
            raise ConfigError(
                f"evaluate returned {describe_value(scores)}: it must return a mapping from "
                f"{', '.join(names)} to an esper.grower.scores.Score(loss=..., accuracy=...) each"
            )
        found: dict[str, Metrics] = {}
        for name in names:
            value = scores[name]
            if not isinstance(value, Score):
                raise ConfigError(
                    f"evaluate returned {describe_value(value)} for {name!r}: give an esper.grower.scores.Score"
                )
            parts = {part: number for part, number in value._asdict().items() if number is not None or part == LOSS}
            found[name] = parse_metrics(
                {part: _read_figure(number, f"the {part} of {name!r}") for part, number in parts.items()}
            )
        return found[self.objective] | {name_loss(name): found[name][LOSS] for name in self.limits}

    def set_references(self, metrics: Metrics) -> None:
        """Take the losses of the model before growth as the ones that limits are relative to."""
        for name in self.limits:
            loss = metrics[name_loss(name)]
            if not (math.isfinite(loss) and loss > 0):
                raise ConfigError(
                    f"constraints: the loss of {name!r} is {loss:g} before growth, but limits are relative to it: "
                    "return a finite loss above 0"
                )
            self.references[name] = loss

    def find_broken(self, metrics: Metrics) -> dict[str, float]:
        """The relative increase of the loss on each set whose constraint is broken, by set."""
        rises = {name: metrics[name_loss(name)] / reference - 1 for name, reference in self.references.items()}
        # Negated, so that a NaN breaks the constraint.
        return {name: rise for name, rise in rises.items() if not rise <= self.limits[name] + ROUNDING}

    def compute_excess(self, metrics: Metrics) -> float:
        """The sum of ``rise - limit`` over broken constraints; 0 where all hold."""
        broken = self.find_broken(metrics)
        return sum(math.inf if math.isnan(rise) else rise - self.limits[name] for name, rise in broken.items())

    def compute_penalty(self, metrics: Metrics) -> float:
        """The part of the score that broken constraints cost; 0 where all hold."""
        most = PENALTY * len(self.find_broken(metrics))
        return most + min(self.compute_excess(metrics), most)

    def describe_broken(self, broken: Mapping[str, float]) -> str:
        """The end of a sentence about broken constraints; empty if none is broken."""
        return "".join(f"; {name} loss up {rise:.1%}, at most {self.limits[name]:.1%}" for name, rise in broken.items())


class Scores:
    """Computes the score of one model from its metrics, relative to the first that are measured.

    Without a ``metric`` it is accuracy where there is one, and otherwise the loss. Without ``classes`` there are as
    many as ``outputs``, if there is an accuracy. A model that was ``trained`` before may start worse than guessing: the
    reference of the loss is then at least the first loss. ``penalty`` computes what is taken off the score.
    """

    def __init__(
        self,
        metric: str | None,
        higher_is_better: bool | None,
        classes: int | None,
        outputs: int | None,
        *,
        trained: bool = False,
        penalty: Callable[[Metrics], float] = lambda _: 0.0,
    ) -> None:
        directions = {LOSS: False, ACCURACY: True}
        if metric is not None and metric not in directions and higher_is_better is None:
            raise ConfigError(f"metric={metric!r}: give higher_is_better=True or False")
        if metric in directions and higher_is_better is (not directions[metric]):
            raise ConfigError(
                f"metric={metric!r} with higher_is_better={higher_is_better}, but "
                f"{'higher' if directions[metric] else 'lower'} is better: omit higher_is_better, or use another name "
                "for another metric"
            )
        # Attributes, by name, are what is saved.
        self._penalty, self._trained = penalty, trained
        self.metric = metric or ""
        """Empty until it is known."""
        self._is_named, self._higher_is_better = metric is not None, higher_is_better
        self._classes, self._outputs = classes or 0, outputs or 0
        self.has_reference, self._reference = False, UNKNOWN
        """Whether finite metrics were measured, to which scores are relative, and the reference of the metric."""
        self._first_train_loss = self._first_loss = self._first_accuracy = UNKNOWN
        self.noise = self.loss_noise = 0.0
        """By how much metric and loss differ between two measurements of the same model."""
        self._lowest = UNKNOWN
        """The lowest value of the metric so far, with or without modules."""
        # Before anything is measured the model's outputs count as classes.
        likely_classes = max(self._classes or self._outputs, 2)
        self.chance_loss = math.log(likely_classes)
        """The loss of guessing, where the number of classes is known; otherwise the first that was measured."""
        self.chance_score = 1 / likely_classes
        """The score of guessing, where the number of classes is known; otherwise the first that was measured."""

    def set_reference(self, metrics: Metrics, train_loss: float) -> None:
        """Take the first finite metrics as the reference of scores; later ones change nothing."""
        metric = self.metric or (ACCURACY if ACCURACY in metrics else LOSS)
        value, loss = float(self._read(metrics, metric)), float(metrics[LOSS])
        if self.has_reference or not (math.isfinite(loss) and math.isfinite(value)):
            return
        # An accuracy shows that the outputs are classes.
        if ACCURACY in metrics and not self._classes:
            if self._outputs < 2:
                raise ConfigError(
                    "evaluate returns an accuracy, but the number of classes is not known from the model's output: "
                    "give classes=... (2 for yes/no)"
                )
            self._classes = self._outputs
        self.has_reference, self.metric = True, metric
        self._first_train_loss = train_loss if math.isfinite(train_loss) else loss
        self._first_loss, self._first_accuracy = loss, float(metrics.get(ACCURACY, UNKNOWN))
        # The level of chance: that of guessing where it is known, or else that of the start.
        self.chance_loss = math.log(self._classes) if self._classes else loss
        if self._trained:
            self.chance_loss = max(self.chance_loss, loss)
        if metric == ACCURACY:
            self.chance_score = 1 / self._classes
        elif self._rises(metric):
            self.chance_score = value
        else:
            self.chance_score, self._reference = 0.0, self.chance_loss if metric == LOSS else value

    def get_value(self, metrics: Metrics) -> float:
        """The metric that growth is about, in its own units; NaN before the first finite metrics."""
        if not self.has_reference:
            return UNKNOWN
        if ACCURACY in metrics and not self._is_named and self.metric == LOSS:
            raise ConfigError(
                "the metric is the loss, because the first measurement had no accuracy, but this one has: always pass "
                "the accuracy to step with val_loss, or choose the metric with esper.Metric"
            )
        return self._read(metrics, self.metric)

    def compute_score(self, metrics: Metrics) -> float:
        """The score; NaN before the first finite metrics, and where the metric is not finite."""
        if not self.has_reference:
            return UNKNOWN
        value = self.get_value(metrics)
        score = value if self._rises(self.metric) else _relative_improvement(value, self._reference)
        return score - self._penalty(metrics)

    def record_values(self, measured: Iterable[Metrics]) -> None:
        """Record whether the metric can be zero or negative; call it with all that was measured at once, first."""
        if self.has_reference:
            self._lowest = float(np.fmin.reduce([self._lowest, *map(self.get_value, measured)]))

    def compute_contribution(self, baseline: Metrics, toggled: Metrics, *, counts: bool) -> tuple[float, float]:
        """What a module is worth, with its standard error over validation examples; NaN where either is not known.

        In ``toggled`` the module is switched off if it ``counts`` in the model as it is, and switched on otherwise.
        """
        value, other = self.get_value(baseline), self.get_value(toggled)
        if not self.has_reference or self._rises(self.metric):
            gain = self.compute_score(baseline) - self.compute_score(toggled)
            return gain if counts else -gain, compute_difference_error(value, other, noise=self.noise)
        # A share of the value without the module, if the metric has always been above zero.
        with_module, without = (value, other) if counts else (other, value)
        is_share = self._lowest > 0 and without != 0
        size = (abs(without) if self._lowest > 0 else max(abs(without), abs(self._reference))) or 1.0
        # Where the value without the module is infinite, all of it is gone.
        infinite = math.isinf(without) and value != other
        share = math.copysign(1.0, other - value) if infinite else (other - value) / size
        gain = share - (self._penalty(baseline) - self._penalty(toggled))
        weight = 1 - with_module / without if is_share else 0.0
        error = compute_difference_error(with_module, without, weight, noise=self.noise) / size
        return gain if counts else -gain, error

    def compute_progress(self, metrics: Metrics | None) -> float | None:
        """The value whose fall is progress, NaN without metrics; None: the loss is that value."""
        if not self._is_named or self.metric == LOSS:
            return None
        return UNKNOWN if metrics is None else metrics[self.metric] * (-1 if self._rises(self.metric) else 1)

    def metric_spec(self) -> RunMetric | None:
        """Name, direction and reference of the metric that growth is about; None until it is known."""
        if not self.has_reference:
            return None
        rises = self._rises(self.metric)
        return RunMetric(self.metric, rises, None if rises else self._reference)

    def check_train_accuracy(self, accuracy: float) -> None:
        """Refuse a training accuracy, NaN where it is not known, if growth is about another metric."""
        if not math.isnan(accuracy) and self.metric not in ("", ACCURACY):
            raise ConfigError(f"train_accuracy has no use when the metric is {self.metric!r}: omit it")

    @property
    def has_chance_level(self) -> bool:
        """Whether loss and score of guessing are known."""
        return self.has_reference and self._classes > 0

    def compute_skills(self, metrics: Metrics, train_loss: float) -> tuple[float, float]:
        """Skill by accuracy, and by losses: 0 for a network that has learned nothing, 1 for a perfect one, NaN unknown.

        By losses it is the greatest improvement of those of training and of validation: a network that overfits has not
        forgotten anything. It is one over chance, or over the start, since a loss may have another scale.
        """
        if not self.has_reference:
            return UNKNOWN, UNKNOWN
        over_chance = self.improvement_over_chance(metrics, train_loss)
        by_losses = max(*over_chance, *self.improvement_over_start(metrics, train_loss))
        return self._compute_accuracy_skill(metrics), by_losses

    def improvement_over_chance(self, metrics: Metrics, train_loss: float) -> tuple[float, float]:
        """Relative improvement over the loss of chance, of the training and the validation loss."""
        # Without classes there is no loss of guessing, and training and validation may differ in scale.
        chance_train_loss = self.chance_loss if self._classes else self._first_train_loss
        by_training = _relative_improvement(train_loss, chance_train_loss)
        return by_training, _relative_improvement(metrics[LOSS], self.chance_loss)

    def improvement_over_start(self, metrics: Metrics, train_loss: float) -> tuple[float, float]:
        """Relative improvement over the losses that were measured first, of the training and the validation loss."""
        by_training = _relative_improvement(train_loss, self._first_train_loss)
        return by_training, _relative_improvement(metrics[LOSS], self._first_loss)

    def improvement_of_accuracy(self, metrics: Metrics) -> float:
        """The share of the errors of the first measurement that is gone; NaN where there is no accuracy."""
        first = self._first_accuracy
        return (metrics.get(ACCURACY, UNKNOWN) - first) / ((1 - first) or 1.0)

    def shows_skill(self, metrics: Metrics, threshold: float) -> bool:
        """Whether skill by accuracy exceeds ``threshold``; without an accuracy, whether a metric beats its start."""
        by_accuracy = self._compute_accuracy_skill(metrics)
        if not math.isnan(by_accuracy):
            return by_accuracy > threshold
        return self.metric not in (LOSS, ACCURACY) and self.compute_score(metrics) > self.chance_score

    def _compute_accuracy_skill(self, metrics: Metrics) -> float:
        if not self._classes or ACCURACY not in metrics:
            return UNKNOWN
        return float(skill(np.array(metrics[ACCURACY]), self._classes))

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values."""
        return {name: value for name, value in vars(self).items() if name != "_penalty"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was called."""
        vars(self).update(from_plain(self.state_dict(), state, "scores"))

    def _rises(self, metric: str) -> bool:
        """Whether higher is better."""
        return metric == ACCURACY if self._higher_is_better is None else self._higher_is_better

    def _read(self, metrics: Metrics, metric: str) -> float:
        """The value of ``metric``, which may be infinitely bad, as where training blew up."""
        if metric not in metrics:
            raise ConfigError(
                f"growth is about {metric!r}, but evaluate gave {', '.join(metrics)}: return a mapping that has it "
                "each time, or name another metric=..."
            )
        value, best = metrics[metric], math.inf if self._rises(metric) else -math.inf
        if (math.isnan(value) or value == best) and math.isfinite(metrics[LOSS]):
            problem = "is not a number" if math.isnan(value) else f"is {value}, better than any can be,"
            raise ConfigError(
                f"evaluate gave a {metric} that {problem} with the loss {metrics[LOSS]:g}: return what it is worth "
                "where it is not defined, such as 0, or the most that you count"
            )
        return value


def _relative_improvement(value: float, reference: float) -> float:
    return (reference - value) / (abs(reference) or 1.0)
