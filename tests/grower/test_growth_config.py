"""Every setting of growth acts where one model grows as it does in a population, or is refused."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import BaseModel
from torch import nn

import esper
from esper.engine.budget import Budget
from esper.engine.engine import GrowthConfig
from esper.engine.governor import Governor, GovernorSettings
from esper.engine.gradients import HealthTable
from esper.engine.measurements import Evaluation, TrainingReport
from esper.errors import ConfigError, DivergedError
from esper.grower import Grower
from esper.lifecycle.actions import Op
from esper.lifecycle.rules import Rules
from esper.population.backend import PopulationBackend
from esper.population.learning import Batch
from esper.population.population import NetworkSpec, Population, PopulationConfig
from esper.tasks.registry import get_suite
from factories import SLOTS, Loop, make_growing, validate

SUITE = get_suite("tokens")
CLASSES = SUITE.classes
USUAL = [(0.3, 0.8), (0.33, 0.8), (0.27, 0.8), (0.3, 0.8), (0.33, 0.8), (0.306, 0.8)]
GUESSED = 1 / CLASSES + 0.03  # skill between 0 and the default of what counts as guessing
COLLAPSE = [(1.0, 0.7), (1.0, 0.7), (1.0, 0.7), *[(1.0, GUESSED)] * 4]

Course = list[tuple[float, float]]
"""Training loss and validation accuracy, check by check."""

GOVERNOR: dict[str, tuple[Any, Course]] = {
    "window": (3, [(1.4, 0.8), (1.4, 0.8), *[(0.3, 0.8)] * 4, *[(1.0, 0.5)] * 3]),
    "fewest": (5, [(0.3, 0.8)] * 3 + [(1.0, 0.5)] * 3),
    "sigmas": (60.0, [*USUAL, *[(1.0, 0.5)] * 3]),
    "multiple": (8.0, [*USUAL, *[(1.0, 0.5)] * 3]),
    "patience": (2, [*USUAL, *[(1.0, 0.5)] * 2]),
    "good_sigmas": (4.0, [*USUAL, (0.36, 0.8), (math.nan, 0.8)]),
    "lead": (0.9, COLLAPSE),
    "collapsed": (0.0, COLLAPSE),
    "max_rollbacks": (0, [(1.0, 0.5), (math.nan, 0.5)]),
}
"""Each field of `GovernorSettings` with another value, and a course of training on which that matters."""


def leaves(settings: type[BaseModel]) -> Iterator[str]:
    """Dotted names of all settings below."""
    for name, field in settings.model_fields.items():
        inner = [one for one in (Budget, GovernorSettings) if isinstance(field.default, one)]
        yield from (f"{name}.{leaf}" for leaf in leaves(inner[0])) if inner else [name]


def test_every_setting_is_looked_at_here() -> None:
    governor = {f"governor.{name}" for name in (*GOVERNOR, "penalty")}
    budget = {f"budget.{name}" for name in CAPS}
    # The last two in test_promise_recorder.py and engine/test_gradient_health.py.
    others = {"plateau", "counterfactual_every", "promise", "gradient_health"}
    assert set(leaves(GrowthConfig)) == governor | budget | others


def in_a_population(settings: GovernorSettings, course: Course) -> list[Any]:
    """After each check, at which step the network that is there now was made; "over" once its rollbacks are used up."""
    instance = SUITE.sample(1, "train", np.random.default_rng(5))[0]
    plan = PopulationConfig(
        SUITE.template(),
        SUITE.sites,
        SUITE.blueprints,
        torch.zeros(2, *SUITE.input_shape),
        SUITE.optimizer,
        Rules(),
        "stacked",
    )
    population = Population(
        plan, [NetworkSpec(SUITE.host(instance), instance.widths, instance.learning_rate, instance.seed, ())]
    )
    nothing = Batch(torch.empty(0), torch.empty(0))
    backend = PopulationBackend(population, SUITE, nothing, lambda: nothing)
    governor, found = Governor(backend, settings), list[Any]()
    one, slots = np.ones(1, np.bool_), len(SUITE.sites)
    for step, (loss, accuracy) in enumerate(course, start=1):
        with torch.no_grad():
            population.host.values.fill_(step)
        seeds = np.full((1, slots), np.nan)
        training = TrainingReport(
            np.array([loss]), np.array([accuracy]), np.ones(1), np.zeros((1, slots)), HealthTable.none(1, slots)
        )
        evaluation = Evaluation(np.array([1.0]), np.array([accuracy]), *[seeds] * 4, np.isnan(seeds))
        _, measured = backend._make_measurement((training, evaluation), one)
        assert measured.skill is not None
        assert measured.finite is not None
        intervention = governor.check(training.loss, measured.skill, measured.finite, None, one)
        found.append((float(population.host.values[0, 0]), float(governor.rollbacks_used[0])))
        if intervention.exhausted.any():
            return [*found, "over"]
    return found


def in_a_grower(settings: GovernorSettings, course: Course) -> list[Any]:
    """As `in_a_population`."""
    model = make_growing()
    weight = next(model.host.parameters())
    grower = Grower(
        model,
        torch.optim.AdamW(model.parameter_groups(lr=1e-2)),
        controller="none",
        evaluate=lambda _: (1.0, 0.5),
        classes=CLASSES,
        growth=GrowthConfig(governor=settings),
    )
    found = list[Any]()
    for step, (loss, accuracy) in enumerate(course, start=1):
        with torch.no_grad():
            weight.fill_(math.nan if math.isnan(loss) else step)
        try:
            grower.step(train_loss=loss, val_loss=loss, accuracy=accuracy)
        except DivergedError:
            return [*found, (float(weight.detach()[0, 0]), 1.0), "over"]
        found.append((float(weight.detach()[0, 0]), float(grower.engine.governor.rollbacks_used[0])))
    return found


@pytest.mark.parametrize("name", GOVERNOR)
def test_the_governor_s_settings_act_alike_in_a_grower_and_in_a_population(name: str) -> None:
    value, course = GOVERNOR[name]
    usual, other = GovernorSettings(), GovernorSettings(**{name: value})
    known = in_a_population(usual, course), in_a_population(other, course)
    assert known[0] != known[1], "the course means to show a difference"
    assert (in_a_grower(usual, course), in_a_grower(other, course)) == known


def test_a_price_in_reward_is_refused_where_nobody_is_paid() -> None:
    with pytest.raises(ConfigError, match=r"growth\.governor\.penalty is 0\.2"):
        Loop("none", growth=GrowthConfig(governor=GovernorSettings(penalty=0.2)))


def test_measurements_that_never_come_are_refused() -> None:
    with pytest.raises(ConfigError, match="counterfactual_every is 21, but there are only 20 decisions"):
        Loop("none", growth=GrowthConfig(counterfactual_every=21))
    Loop("none", growth=GrowthConfig(counterfactual_every=20))


CAPS = {"parameters": 120, "flops": 240, "memory": 2000}


@pytest.mark.parametrize("cap", CAPS)
def test_caps_hold(cap: str) -> None:
    free, capped = Loop("all_at_start"), Loop("all_at_start", growth=GrowthConfig(budget=Budget(**{cap: CAPS[cap]})))
    for loop in (free, capped):
        for _ in range(6):
            loop.epoch()
    assert len(capped.model.seeds) < len(free.model.seeds)


def told(grower: Grower, *losses: float) -> list[esper.Decision]:
    return [grower.step(train_loss=1.0, val_loss=loss, accuracy=0.5) for loss in losses]


def test_nothing_is_decided_after_the_end_until_validation_improves() -> None:
    grower = Loop("all_at_start", growth=GrowthConfig(plateau=2)).grower
    grower.controller = Late(grower.controller)
    decisions = told(grower, 0.5, 0.5, 0.5, 0.5)
    assert [decision.finished for decision in decisions] == [False, False, True, True]
    assert {decision.op for decision in decisions} == {Op.WAIT}
    assert grower.controller.asked == 2
    assert "finished" in str(decisions[-1])
    assert not told(grower, 0.3)[0].finished
    assert grower.controller.asked == 3


class Late:
    """Waits, and counts how often it is asked."""

    name = "all_at_start"

    def __init__(self, controller: Any) -> None:
        self.start, self.asked = controller.start, 0

    def act(self, observation: Any, masks: Any, state: Any) -> Any:
        self.asked += 1
        return np.zeros((1, 8), np.int64), state


def test_what_is_kept_for_good_is_measured_at_every_fourth_decision_and_at_the_end() -> None:
    model, calls = make_growing(), []
    for name in SLOTS:
        model.slots[name].germinate("mlp", torch.Generator().manual_seed(1), alpha=1.0)
        model.slots[name].fossilize()

    def count(measured: nn.Module) -> float:
        calls.append(measured)
        return validate(measured)[0]

    loop = Loop("none", model, evaluate=count)
    passes, contributions, ages = list[int](), list[dict[str, float]](), list[list[int]]()
    for _ in range(9):
        calls.clear()
        contributions.append(loop.epoch().contributions)
        passes.append(len(calls))
        ages.append(loop.grower.network.measurements.contribution_age[0].tolist())
    assert passes == [3 + 1, 1, 1, 1, 3, 1, 1, 1, 3], "once more at first, to see whether it gives the same"
    assert ages[:5] == [[0, 0], [1, 1], [2, 2], [3, 3], [0, 0]], "the age of what is carried is known"
    assert contributions[0] == contributions[3] != contributions[4]
    loop.epoch()
    shown = {slot: model.seeds[slot].contribution for slot in SLOTS}
    calls.clear()
    loop.grower.finish()
    assert len(calls) == 3
    assert {slot: model.seeds[slot].contribution for slot in SLOTS} != shown == contributions[8]
