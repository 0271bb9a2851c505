"""What `evaluate` may return, what is refused with a sentence, and what growth is about."""

import math
import re
from decimal import Decimal
from fractions import Fraction
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import esper
from esper.control.rules import Heuristic, HeuristicSettings
from esper.errors import ConfigError, DivergedError
from esper.grower import Grower
from esper.grower.backend import FOSSIL_INTERVAL
from esper.grower.scores import PENALTY, Scores
from esper.lifecycle.actions import Op
from factories import Loop
from grower.divergence import CLASSES, EPOCHS, Training, data


def growth_about(
    evaluate: Any, metric: str | None = None, higher_is_better: bool | None = None, **options: Any
) -> dict[str, Any]:
    """Arguments of a grower: of growth about that metric, if one is named."""
    return {"evaluate": evaluate if metric is None else esper.Metric(evaluate, metric, higher_is_better), **options}


def grower(evaluate: Any, **options: Any) -> tuple[Training, Grower]:
    """With two unfinished seeds."""
    training = Training()
    found = Grower(training.model, training.optimizer, controller="all_at_start", **growth_about(evaluate, **options))
    return training, found


class LossAndAccuracy(NamedTuple):
    loss: float
    accuracy: float


ACCEPTED: dict[str, tuple[Any, float, float]] = {
    "a loss": (0.75, 0.75, 0.0),
    "a whole number": (2, 2.0, 0.0),
    "a tensor": (torch.tensor(0.75), 0.75, 0.0),
    "a tensor with a gradient": (torch.tensor(0.75, requires_grad=True), 0.75, 0.0),
    "a tensor of one": (torch.tensor([0.75], dtype=torch.bfloat16), 0.75, 0.0),
    "a number of numpy's": (np.float32(0.75), 0.75, 0.0),
    "an array of no axes": (np.array(0.75), 0.75, 0.0),
    "a fraction": (Fraction(3, 4), 0.75, 0.0),
    "a pair": ((0.75, 0.5), 0.75, 0.5),
    "a list": ([0.75, 0.5], 0.75, 0.5),
    "a named pair": (LossAndAccuracy(0.75, 0.5), 0.75, 0.5),
    "a pair of tensors": ((torch.tensor(0.75), torch.tensor(0.5)), 0.75, 0.5),
    "a mapping with a loss": ({"loss": 0.75}, 0.75, 0.0),
    "a mapping with accuracy": ({"loss": 0.75, "accuracy": np.float64(0.5), "f1": 0.3}, 0.75, 0.5),
    "a mapping with what is not used": ({"loss": 0.75, "auc": math.nan, "psnr": math.inf}, 0.75, 0.0),
    "a hair too many hits": ((0.75, 1 + 1e-7), 0.75, 1.0),
    "a negative loss": (-3.5, -3.5, 0.0),
    "no loss at all": (0.0, 0.0, 0.0),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_measures_are_understood(name: str) -> None:
    returned, loss, score = ACCEPTED[name]
    decision = grower(lambda _: returned)[1].step(train_loss=1.0)
    assert (decision.loss, decision.score) == (loss, score)


REFUSED: dict[str, tuple[Any, str]] = {
    "nothing": (None, "evaluate returned None: it must return a loss"),
    "text": ("0.3", r"a str, '0\.3'"),
    "truth": (True, "a bool, True"),
    "a complex number": (torch.tensor(1j), "complex64"),
    "a decimal": (Decimal("0.3"), "Decimal"),
    "a vector": (torch.rand(3), r"a tensor of shape \(3,\)"),
    "a pair in a tensor": (torch.tensor([0.3, 0.5]), r"a tensor of shape \(2,\)"),
    "an array": (np.zeros((2, 2)), r"an array of shape \(2, 2\)"),
    "an empty mapping": ({}, "a mapping with the keys"),
    "a mapping without a loss": ({"f1": 0.3}, "with the key 'loss'"),
    "names that are none": ({"loss": 0.3, 3: 0.5}, "a mapping of names to numbers"),
    "a mapping with text": ({"loss": 0.3, "f1": "high"}, "'f1' of what evaluate returned is a str"),
    "a mapping with a matrix": ({"loss": 0.3, "f1": torch.rand(2, 2)}, "'f1' of what evaluate returned is a tensor"),
    "three": ((0.3, 0.5, 0.7), "a tuple"),
    "one in a tuple": ((0.3,), "a tuple"),
    "a pair with nothing": ((0.3, None), "'accuracy' of what evaluate returned is None"),
    "a pair of matrices": ((torch.rand(3, 1, 2), 0.5), "'loss' of what evaluate returned is a tensor"),
    "a percentage": ((1.3, 87.0), r"divide percentages by 100"),
    "a swapped pair": ((0.87, 1.3), "in this order if the two are swapped"),
    "less than nothing": ((0.3, -0.1), r"accuracy -0\.1, which is not in \[0, 1\]"),
    "an accuracy that is not a number": ((0.3, math.nan), "return the fraction of correct"),
    "a generator": ((one for one in (0.3, 0.5)), "a generator"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_measure_is_refused_with_a_sentence(name: str) -> None:
    returned, sentence = REFUSED[name]
    with pytest.raises(ConfigError, match=sentence):
        grower(lambda _: returned)[1].step(train_loss=1.0)


@pytest.mark.parametrize(
    "given",
    [
        {"accuracy": 0.5},
        {"metrics": {"f1": 0.5}},
        {"val_loss": 0.9, "accuracy": 50.0},
        {"val_loss": 0.9, "accuracy": 0.5, "metrics": {"accuracy": 0.5}},
        {"val_loss": 0.9},  # where others came with an accuracy
        {"train_accuracy": 1.5},
        {"train_accuracy": math.nan},
    ],
)
def test_halves_and_doubles_are_refused(given: dict[str, Any]) -> None:
    loop = Loop("none")
    loop.epoch()
    with pytest.raises(ConfigError):
        loop.grower.step(train_loss=1.0, **given)


@pytest.mark.parametrize("loss", [10**400, 1e308, -1e308, torch.tensor(3e38), np.float64(1e300), 10**30])
def test_losses_may_be_as_large_as_they_like(loss: Any) -> None:
    found = grower(lambda _: (loss, 0.5))[1]
    for _ in range(2):
        found.step(train_loss=loss)
    found.state_dict()


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"metric": "accuracy", "higher_is_better": False}, "higher is better"),
    ({"metric": "loss", "higher_is_better": True}, "lower is better"),
    ({"metric": "f1"}, "give higher_is_better=True or False"),
]


@pytest.mark.parametrize(("options", "sentence"), CONTRADICTIONS)
def test_contradictions_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        grower(lambda _: 0.3, **options)


@pytest.mark.parametrize("returned", [0.3, (0.3, 0.5), {"loss": 0.3, "F1": 0.5}])
def test_a_metric_that_is_not_there_is_missed(returned: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape("growth is about 'f1', but evaluate gave loss")):
        grower(lambda _: returned, metric="f1", higher_is_better=True)[1].step(train_loss=1.0)


def test_an_accuracy_of_unknown_classes_is_refused_and_a_loss_is_not() -> None:
    def single(returned: Any, classes: int | None = None) -> Grower:
        model = esper.attach(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1)), {"0": ["mlp"]}, torch.zeros(2, 6))
        optimizer = torch.optim.AdamW(model.parameter_groups(lr=0.01))
        return Grower(model, optimizer, evaluate=lambda _: returned, classes=classes)

    single(0.5).step(train_loss=1.0)
    single((0.5, 0.5), classes=2).step(train_loss=1.0)
    with pytest.raises(ConfigError, match=r"give classes=\.\.\. \(2 for yes/no\)"):
        single((0.5, 0.5)).step(train_loss=1.0)


@torch.no_grad()
def measure(model: nn.Module) -> dict[str, float]:
    """All kinds of figures."""
    model.eval()
    inputs, labels = data(200, 1)
    logits = model(inputs)
    found = logits.argmax(1)
    right = ((found == 0) & (labels == 0)).sum()
    return {
        "loss": F.cross_entropy(logits, labels).item(),
        "accuracy": (found == labels).float().mean().item(),
        "f1": (2 * right / ((found == 0).sum() + (labels == 0).sum()).clamp(min=1)).item(),
        "mae": (logits.softmax(1) - F.one_hot(labels, CLASSES)).abs().mean().item(),
    }


ABOUT: dict[str, tuple[dict[str, Any], Any]] = {
    "accuracy": ({}, lambda model: tuple(list(measure(model).values())[:2])),
    "loss alone": ({}, lambda model: measure(model)["loss"]),
    "loss": ({"metric": "loss"}, measure),
    "loss of classes": ({"metric": "loss", "classes": CLASSES}, lambda model: measure(model)["loss"]),
    "f1": ({"metric": "f1", "higher_is_better": True}, measure),
    "mae": ({"metric": "mae", "higher_is_better": False}, measure),
    "density": ({}, lambda model: measure(model)["loss"] - 5.0),
    "gain": ({"metric": "gain", "higher_is_better": True}, lambda model: {"loss": 1.0, "gain": -measure(model)["mae"]}),
}


def trained(about: str) -> tuple[Training, Grower]:
    """A trained host with two seeds, and its grower."""
    options, evaluate = ABOUT[about]
    training, found = grower(evaluate, horizon=30, growth=esper.GrowthConfig(governor=None), **options)
    for _ in range(8):
        found.step(train_loss=training.epoch())
    assert len(training.model.seeds) == 2
    return training, found


@pytest.mark.parametrize("about", ABOUT)
@pytest.mark.few(3)
def test_a_seed_that_harms_is_harmful_and_one_that_helps_helps(about: str) -> None:
    training, found = trained(about)
    name, seed = next(iter(training.model.seeds.items()))
    with torch.no_grad():
        for parameter in seed.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 2)
    decision = [found.step(train_loss=0.5) for _ in range(FOSSIL_INTERVAL)][-1]
    assert decision.contributions[name] < 0
    assert seed.contribution == decision.contributions[name]
    for _ in range(12):  # until the host cannot do without it
        training.epoch()
    decision = [found.step(train_loss=0.5) for _ in range(FOSSIL_INTERVAL)][-1]
    assert decision.contributions[name] > 0
    assert seed.contribution == decision.contributions[name]


@pytest.mark.parametrize("about", ABOUT)
@pytest.mark.few(3)
def test_what_was_measured_first_is_remembered(about: str) -> None:
    training, found = trained(about)
    given, evaluate = ABOUT[about]
    options = growth_about(evaluate, **given, growth=found.config.growth)
    again = Grower(training.model, training.optimizer, controller="all_at_start", horizon=30, **options)
    again.load_state_dict(found.state_dict())
    own, other = found.step(train_loss=0.5), again.step(train_loss=0.5)
    assert (own.loss, own.score, own.contributions) == (other.loss, other.score, other.contributions)


def test_the_score_of_a_loss_is_the_share_that_is_gone() -> None:
    losses = iter([4.0, 3.0, 5.0])
    found = grower(lambda _: next(losses), growth=esper.GrowthConfig(counterfactual_every=50))[1]
    assert [found.step(train_loss=1.0, val_loss=one).score for one in (4.0, 3.0, 5.0)] == [0.0, 0.25, -0.25]
    guessing = grower(lambda _: 0.0, classes=4)[1]
    assert guessing.step(train_loss=1.0, val_loss=math.log(2)).score == pytest.approx(0.5)
    negative = grower(lambda _: 0.0)[1]
    assert [negative.step(train_loss=1.0, val_loss=one).score for one in (-2.0, -3.0, -1.0)] == [0.0, 0.5, -0.5]


LOWER: dict[str, tuple[dict[str, Any], str]] = {
    "loss alone": ({}, "loss"),
    "loss by name": ({"metric": "loss"}, "loss"),
    "loss of classes": ({"classes": 10}, "loss"),
    "another metric": ({"metric": "mae", "higher_is_better": False}, "mae"),
}
"""Metrics for which lower is better: options of a grower, and the name among what is measured."""


class Falling:
    """Measures a metric, at first ``first`` and later .0245, and a tenth more without seeds."""

    def __init__(self, name: str, first: float) -> None:
        self.name, self.now = name, first

    def __call__(self, model: nn.Module) -> dict[str, float]:
        assert isinstance(model, esper.GrowingModel)
        counts = any(float(seed.alpha) > 0 for seed in model.seeds.values())
        return {"loss": 0.9, self.name: self.now * (1.0 if counts else 1.1)}


@pytest.mark.parametrize("first", [0.0245, 0.146, 14.6])
@pytest.mark.parametrize("about", LOWER)
def test_a_seed_worth_a_tenth_of_the_loss_now_is_kept_whatever_the_loss_was_at_first(about: str, first: float) -> None:
    """As in a U-Net, whose loss was .146 at first."""
    options, name = LOWER[about]
    falling = Falling(name, first)
    rule = Heuristic(HeuristicSettings(most=1, probation=2, margin=0.02), EPOCHS)
    training = Training()
    given = growth_about(falling, **options)
    growth = esper.GrowthConfig(governor=None)
    found = Grower(training.model, training.optimizer, controller=rule, horizon=EPOCHS, growth=growth, **given)
    decisions = [found.step(train_loss=training.epoch())]
    falling.now = 0.0245
    decisions += [found.step(train_loss=training.epoch()) for _ in range(8)]
    worth = [value for decision in decisions for value in decision.contributions.values()]
    assert worth[1:] == [pytest.approx(0.1 / 1.1)] * len(worth[1:])
    assert [decision.op for decision in decisions if decision.op is not Op.WAIT] == [Op.GERMINATE, Op.FOSSILIZE]


SHARES: dict[str, tuple[float, list[float], float, float, float]] = {
    "a tenth of it now": (3.0, [], 0.9, 1.0, 0.1),
    "of any size": (3e-9, [], 0.9e-12, 1e-12, 0.1),
    "harm": (3.0, [], 1.0, 0.8, -0.25),
    "all of it": (3.0, [], 0.0, 2.0, 2 / 3),
    "none at all": (3.0, [], 0.0, 0.0, 0.0),
    "nothing at first": (0.0, [], 0.0, 0.0, 0.0),
    "negative": (3.0, [], -1.3, -1.0, 0.1),
    "far below": (3.0, [], -66.0, -60.0, 0.1),
    "through zero": (3.0, [], -0.1, 0.2, 0.1),
    "negative before": (3.0, [-0.01], 0.01, 0.31, 0.1),
    "without it blown up": (3.0, [], 1.0, math.inf, 1.0),
    "with it blown up": (3.0, [], math.inf, 1.0, -math.inf),
}
"""Value at first, other values before, the value with a module and without, and what the module is worth."""


@pytest.mark.parametrize("name", SHARES)
def test_a_share_of_what_has_no_zero_is_one_of_its_size(name: str) -> None:
    first, before, present, absent, worth = SHARES[name]
    for metric in ("loss", "regret"):
        scores = Scores(metric, higher_is_better=False, classes=None, outputs=None)
        unknown = {"loss": 1.0, metric: 1.0}
        assert math.isnan(scores.compute_contribution(unknown, unknown, counts=True)[0])
        scores.set_reference({"loss": 1.0, metric: first}, 1.0)
        scores.record_values([{"loss": 1.0, metric: value} for value in (first, *before)])
        again = Scores(metric, higher_is_better=False, classes=None, outputs=None)
        again.load_state_dict(scores.state_dict())
        for each in (scores, again):
            pair = {"loss": math.inf, metric: present}, {"loss": math.inf, metric: absent}
            each.record_values(pair)
            assert each.compute_contribution(*pair, counts=True)[0] == pytest.approx(worth)
            assert each.compute_contribution(*reversed(pair), counts=False)[0] == pytest.approx(worth)


def test_a_module_is_worth_more_the_lower_the_loss_with_it() -> None:
    """Also where values pass through zero, and beside a broken constraint less than nothing whatever it brings."""
    values = [-200.0, -3.0, -0.5, 0.0, 1e-9, 0.5, 3.0, 200.0]
    for first in values:
        for absent in values:
            scores = Scores("loss", None, classes=None, outputs=None)
            scores.set_reference({"loss": first}, 1.0)
            scores.record_values([{"loss": value} for value in values])
            pairs = [({"loss": value}, {"loss": absent}) for value in values]
            worth = [scores.compute_contribution(*pair, counts=True)[0] for pair in pairs]
            assert worth == sorted(worth, reverse=True)
            assert worth[values.index(absent)] == 0
    for brought in (0.1, 0.9, 0.999):
        broken = Scores(
            "loss", None, classes=None, outputs=None, penalty=lambda metrics: metrics["source loss"] * PENALTY
        )
        broken.set_reference({"loss": 1.0, "source loss": 0.0}, 1.0)
        pair = {"loss": 1 - brought, "source loss": 1.0}, {"loss": 1.0, "source loss": 0.0}
        broken.record_values(pair)
        assert broken.compute_contribution(*pair, counts=True)[0] < 0


def test_a_negative_loss_reaches_its_plateau() -> None:
    found = Training(growth=esper.GrowthConfig(plateau=2), measure="loss").grower
    found.controller = Loop("none").grower.controller
    ended = [found.step(train_loss=1.0, val_loss=loss).finished for loss in (-1.0, -2.0, -3.0, -2.99, -3.01)]
    assert ended == [False, False, False, False, True]


def test_figures_may_be_handed_in() -> None:
    named = {"loss": 0.6, "f1": 0.7}
    found = grower(lambda _: named, metric="f1", higher_is_better=True)[1]
    decision = found.step(train_loss=1.0, val_loss=0.5, metrics={"f1": 0.8})
    assert (decision.loss, decision.score) == (0.5, 0.8)
    with pytest.raises(ConfigError, match="train_accuracy has no use when the metric is 'f1'"):
        found.step(train_loss=1.0, val_loss=0.5, metrics={"f1": 0.8}, train_accuracy=0.5)


def test_a_train_accuracy_is_no_mistake_before_it_is_known_what_growth_is_about() -> None:
    found = grower(lambda _: (math.inf, 0.5), growth=esper.GrowthConfig(governor=None))[1]
    found.step(train_loss=1.0, train_accuracy=0.5)


@pytest.mark.parametrize("later", [(0.9, 0.5), {"loss": 0.9, "accuracy": 0.5}])
@pytest.mark.parametrize("first", [0.9, {"loss": 0.9, "f1": 0.5}])
def test_an_accuracy_that_comes_late_is_refused(first: Any, later: Any) -> None:
    told = iter([first, first, later])
    found = Loop("none", evaluate=lambda _: next(told)).grower
    found.step(train_loss=1.0)
    with pytest.raises(ConfigError, match="the metric is the loss, because the first measurement had no accuracy"):
        found.step(train_loss=1.0)


def test_a_loss_that_is_handed_in_first_must_come_with_the_accuracy_that_evaluate_gives() -> None:
    found = grower(lambda _: (0.9, 0.5))[1]
    decisions = (found.step(train_loss=1.0, val_loss=0.9) for _ in range(5))
    with pytest.raises(ConfigError, match="always pass the accuracy to step with val_loss"):
        list(decisions)  # until a seed is measured
    named = grower(lambda _: (0.9, 0.5), metric="loss")[1]
    for _ in range(4):
        named.step(train_loss=1.0, val_loss=0.9)


@pytest.mark.parametrize(
    ("metric", "higher", "value"), [("psnr", True, math.inf), ("regret", False, -math.inf), ("f1", True, math.nan)]
)
@pytest.mark.parametrize("decision", [1, 2])
def test_a_metric_that_is_better_than_any_can_be_or_not_a_number_is_refused(
    metric: str, higher: bool, value: float, decision: int
) -> None:
    told = iter([{"loss": 0.3, metric: 1.0}] * 2 * (decision - 1) + [{"loss": 0.3, metric: value}] * 9)
    found = Loop("none", **growth_about(lambda _: next(told), metric, higher)).grower
    for _ in range(decision - 1):
        found.step(train_loss=1.0)
    with pytest.raises(ConfigError, match=f"a {metric} that is .*(better than any can be|not a number)"):
        found.step(train_loss=1.0)


@pytest.mark.parametrize(("metric", "higher", "value"), [("psnr", True, -math.inf), ("perplexity", False, math.inf)])
def test_a_metric_that_is_infinitely_bad_decides_nothing_and_ends_training_if_it_lasts(
    metric: str, higher: bool, value: float
) -> None:
    told = chain([{"loss": 0.3, metric: 1.0}] * 2, repeat({"loss": 700.0, metric: value}))
    found = Loop("all_at_start", **growth_about(lambda _: next(told), metric, higher)).grower
    found.step(train_loss=1.0)
    with pytest.warns(UserWarning, match=f"{metric} not finite, although .* finite: nothing is decided"):
        assert found.step(train_loss=1.0).rollback is None
    assert found.step(train_loss=1.0).op is Op.WAIT
    with pytest.raises(DivergedError, match=f"{metric} not finite, .* at 3 decisions in a row: check for batches"):
        found.step(train_loss=1.0)


PROGRESS: list[tuple[dict[str, Any], str, list[float], list[float]]] = [
    ({"metric": "f1", "higher_is_better": True}, "f1", [0.5, 0.6, 0.603, 0.61], [0, 0, 1, 0]),
    ({"metric": "gain", "higher_is_better": True}, "gain", [-2.0, -1.0, -0.995, -0.9], [0, 0, 1, 0]),
    ({"metric": "mae", "higher_is_better": False}, "mae", [5.0, 4.0, 3.99, 3.9], [0, 0, 1, 0]),
    ({"metric": "accuracy"}, "accuracy", [0.5, 0.6, 0.603, 0.61], [0, 0, 1, 0]),
    ({"metric": "loss"}, "accuracy", [0.5, 0.6, 0.7, 0.8], [0, 1, 2, 3]),
    ({}, "accuracy", [0.5, 0.6, 0.7, 0.8], [0, 1, 2, 3]),
]


@pytest.mark.parametrize(("options", "name", "values", "ages"), PROGRESS)
def test_a_plateau_is_one_of_the_metric_that_was_named(
    options: dict[str, Any], name: str, values: list[float], ages: list[int]
) -> None:
    """The loss stands still meanwhile."""
    told = iter([{"loss": 0.9, name: value} for value in [values[0], *values]])
    found = Loop("none", **growth_about(lambda _: next(told), **options)).grower
    seen = []
    for _ in values:
        found.step(train_loss=1.0)
        seen.append(int(found.engine.history.plateau_age[0]))
    assert seen == ages
