"""What a grower was given before version 0.3 still works: it warns with the present way, and decides the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import esper
from esper import Grower, GrowingModel
from esper.engine import governor
from esper.errors import ConfigError
from esper.population import governor as former_address
from grower.training_loop import APART, HELD, data, growing, validate

DECISIONS = 8


@torch.no_grad()
def measure(model: nn.Module) -> dict[str, float]:
    """A metric of its own beside loss and accuracy."""
    loss, accuracy = validate(model)
    return {"loss": loss, "accuracy": accuracy, "mistakes": 1 - accuracy}


def measure_sets(model: nn.Module) -> dict[str, esper.Score]:
    """Two sets of validation data."""
    model.eval()
    inputs, labels = data(64, seed=2)
    with torch.no_grad():
        loss = float(F.cross_entropy(model(inputs), labels))
    return {"target": esper.Score(*validate(model)), "source": esper.Score(loss)}


Make = Callable[[GrowingModel, torch.optim.Optimizer], Grower]
COMMON: dict[str, Any] = {"horizon": 20, "seed": 3}


def loss_of(model: GrowingModel) -> Callable[..., torch.Tensor]:
    return lambda inputs, labels: F.cross_entropy(model(inputs), labels)


WAYS: dict[str, tuple[Make, Make, list[str]]] = {
    "positional controller": (
        lambda model, optimizer: Grower(model, optimizer, "random", evaluate=validate, **COMMON),
        lambda model, optimizer: Grower(model, optimizer, validate, controller="random", **COMMON),
        [r"the third argument of Grower is now evaluate: give the controller as controller=\.\.\."],
    ),
    "metric": (
        lambda model, optimizer: Grower(
            model,
            optimizer,
            controller="random",
            evaluate=measure,
            metric="mistakes",
            higher_is_better=False,
            **COMMON,
        ),
        lambda model, optimizer: Grower(
            model, optimizer, esper.Metric(measure, "mistakes", False), controller="random", **COMMON
        ),
        [
            r"metric= of Grower is now part of evaluate: give esper.Metric\(evaluate, name, higher_is_better\)",
            r"higher_is_better= of Grower .*: give esper.Metric\(evaluate, name, higher_is_better\)",
        ],
    ),
    "metric beside evaluate by its place": (
        lambda model, optimizer: Grower(
            model, optimizer, measure, controller="random", metric="mistakes", higher_is_better=False, **COMMON
        ),
        lambda model, optimizer: Grower(
            model, optimizer, esper.Metric(measure, "mistakes", False), controller="random", **COMMON
        ),
        [r"metric= of Grower is now part of evaluate", r"higher_is_better= of Grower is part of evaluate now"],
    ),
    "constraints": (
        lambda model, optimizer: Grower(
            model,
            optimizer,
            controller="random",
            evaluate=measure_sets,
            objective="target",
            constraints={"source": 0.02},
            **COMMON,
        ),
        lambda model, optimizer: Grower(
            model,
            optimizer,
            esper.Constrained(measure_sets, "target", {"source": 0.02}),
            controller="random",
            **COMMON,
        ),
        [
            r"objective= of Grower .*: give esper.Constrained\(evaluate, objective, limits\)",
            r"constraints= of Grower .*: give esper.Constrained\(evaluate, objective, limits\)",
        ],
    ),
    "evidence": (
        lambda model, optimizer: Grower(
            model,
            optimizer,
            controller="all_at_start",
            evaluate=validate,
            evidence="refit",
            rules=HELD,
            loss=loss_of(model),
            **COMMON,
        ),
        lambda model, optimizer: Grower(
            model,
            optimizer,
            esper.Refit(validate),
            controller="all_at_start",
            rules=HELD,
            loss=loss_of(model),
            **COMMON,
        ),
        [r"evidence= of Grower is now part of evaluate: give esper.Refit\(evaluate\)"],
    ),
    "evidence as it is by default": (
        lambda model, optimizer: Grower(
            model, optimizer, controller="random", evaluate=validate, evidence="dependence", **COMMON
        ),
        lambda model, optimizer: Grower(model, optimizer, validate, controller="random", **COMMON),
        [r"evidence= of Grower is now part of evaluate: give esper.Refit\(evaluate\)"],
    ),
}
"""By name: the former way, the present one, and what the former warns with."""


def prepare() -> tuple[GrowingModel, torch.optim.Optimizer]:
    model = growing()
    return model, torch.optim.AdamW(model.parameter_groups(lr=1e-2))


def decide(grower: Grower) -> list[str]:
    """The decisions of a short training, and what became of unfinished modules."""
    inputs, labels = data()
    decisions: list[str] = []
    for _ in range(DECISIONS):
        grower.model.train()
        loss = F.cross_entropy(grower.model(inputs), labels)
        grower.isolated_backward(loss, inputs, labels)
        grower.optimizer.zero_grad()
        loss.backward()
        grower.optimizer.step()
        decision = grower.step(train_loss=loss)
        decisions.append(f"{decision} {decision.score!r} {decision.contributions!r}")
    return [*decisions, str(grower.finish())]


@pytest.mark.parametrize("way", WAYS)
def test_the_former_way_warns_with_the_present_one_and_decides_the_same(way: str) -> None:
    former, present, sentences = WAYS[way]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = former(*prepare())
    assert [warning.category for warning in caught] == [DeprecationWarning] * len(sentences)
    lines = {number for *_, number in former.__code__.co_lines()}
    assert {warning.filename for warning in caught} == {__file__}
    assert {warning.lineno for warning in caught} <= lines, "warnings point to the line that makes the grower"
    for warning, sentence in zip(caught, sentences, strict=True):
        with pytest.warns(DeprecationWarning, match=f"{sentence}.*goes in version"):
            warnings.warn_explicit(warning.message, DeprecationWarning, __file__, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        after = present(*prepare())
    assert before.criterion == after.criterion
    assert before.describe_config() == after.describe_config()
    assert decide(before) == decide(after)


def test_the_former_name_of_isolated_backward_does_the_same_and_warns() -> None:
    inputs, labels = data()
    gradients: list[list[torch.Tensor]] = []
    for former in (True, False):
        model, optimizer = prepare()
        grower = Grower(
            model, optimizer, validate, controller="all_at_start", rules=APART, loss=loss_of(model), **COMMON
        )
        for _ in range(3):
            loss = F.cross_entropy(model(inputs), labels)
            if former:
                with pytest.warns(DeprecationWarning, match="learn_apart was renamed to isolated_backward") as caught:
                    getattr(grower, "learn_apart")(loss, inputs, labels)  # noqa: B009
                assert {warning.filename for warning in caught} == {__file__}
            else:
                grower.isolated_backward(loss, inputs, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            grower.step(train_loss=loss)
        with pytest.warns(DeprecationWarning, match="learns_apart was renamed to needs_isolated_backward"):
            assert getattr(grower, "learns_apart") is grower.needs_isolated_backward is True  # noqa: B009
        gradients.append([parameter.detach() for seed in model.seeds.values() for parameter in seed.parameters()])
    assert len(gradients[0]) > 0
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"higher_is_better": True}, r"^higher_is_better=True needs metric"),
    ({"evidence": "worth"}, "^evidence is 'worth': give one of dependence, refit$"),
    ({"constraints": {"source": 0.1}}, "no objective"),
    ({"metric": "accuracy", "higher_is_better": False}, "better the higher it is"),
]


@pytest.mark.parametrize(("options", "sentence"), REFUSED)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_contradictions_are_refused_as_ever(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Grower(*prepare(), controller="random", evaluate=validate, **options)
    with pytest.raises(ConfigError, match=sentence):
        Grower(*prepare(), validate, controller="random", **options)


@pytest.mark.parametrize("name", ["GovernorSettings", "Trouble"])
def test_the_former_address_of_the_governor_s_settings_warns(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"{name} is in esper.engine.governor now"):
        assert getattr(former_address, name) is getattr(governor, name)
    with pytest.raises(AttributeError, match="has no 'Governor' any more: see esper.engine.governor, and esper.grower"):
        _ = former_address.Governor
