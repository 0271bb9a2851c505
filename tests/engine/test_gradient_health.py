"""Gate G2: seeds whose gradients vanish or explode beside the host's do not pass it."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from esper.control.rules import Replay
from esper.engine.engine import GrowthConfig, GrowthEngine
from esper.engine.gradients import GradientHealthSettings
from esper.engine.observation import SLOT_FEATURES
from esper.growth.blueprints.registry import get
from esper.lifecycle.actions import Op, make_action
from esper.lifecycle.rules import Isolation, Reason, evaluate_gates
from esper.lifecycle.table import Stage
from esper.numerics.arrays import Ints
from esper.population.learning import Batch
from esper.rl.episodes import Episodes
from esper.tasks.registry import get_suite, suite_names
from open_rules import open_rules

RULES = open_rules(isolation=Isolation.SHADOW, min_training_steps=1)
GROWTH = GrowthConfig(governor=None)
DECISIONS = 3
"""A seed germinates at the first, and has learned after all the others."""
MINIBATCHES = 4
HEALTHY_FEATURE = [feature.name for feature in SLOT_FEATURES].index("gradient_healthy")


class Scale:
    """What the gradients of all seeds are multiplied by, in the minibatches of each decision."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, blueprints: Sequence[str], factors: Sequence[float]) -> None:
        self.factors, self._factor = factors, 1.0
        for name in blueprints:
            kind = get(name)
            monkeypatch.setattr(kind, "forward", self._scale(kind.forward))

    def _scale(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def scaled_forward(module: Any, *inputs: Any) -> Tensor:
            output = forward(module, *inputs)
            scaled = output * self._factor
            return output.detach() + (scaled - scaled.detach())  # the same values

        return scaled_forward

    def apply(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches, each with its factor in force while it is learned from."""
        for factor, batch in zip(self.factors, batches, strict=True):
            self._factor = factor
            yield batch
        self._factor = 1.0


def plan_germination(episodes: Episodes, blueprint: int) -> Ints:
    """Germinate the blueprint, in the first slot that takes it, in the network of its number."""
    masks = episodes.legal_actions()
    slot = int(masks.blueprint[blueprint, :, blueprint].argmax())
    assert masks.blueprint[blueprint, slot, blueprint], "the test means to plant it"
    return make_action(Op.GERMINATE, slot, blueprint)[None]


def grow_population(episodes: Episodes, controller: Replay, scale: Scale) -> list[GrowthEngine]:
    """A population, which has a network per blueprint."""
    draw = episodes._stream.draw_batches
    episodes._stream.draw_batches = lambda first, count: scale.apply(draw(first, MINIBATCHES))  # type: ignore[method-assign]
    state = controller.start([instance.seed for instance in episodes.instances])
    for _ in range(DECISIONS):
        actions, state = controller.act(episodes.observe(), episodes.legal_actions(), state)
        episodes.step(actions)
    return [episodes.engine]


SUITES = [pytest.param(suite, marks=[] if suite == "tokens" else pytest.mark.landing) for suite in suite_names()]
"""Every suite, and so every blueprint that a suite offers."""


def judge(
    monkeypatch: pytest.MonkeyPatch,
    suite_name: str,
    factors: Sequence[float],
    growth: GrowthConfig = GROWTH,
    blueprints: int | None = None,
) -> set[tuple[Reason, bool, bool]]:
    """The verdicts of G2 on a seed of every blueprint of a suite, or of so many of them.

    Each with whether the seed may be advanced, and whether observations call its gradient healthy.
    """
    suite = get_suite(suite_name)
    instances = suite.sample(blueprints or len(suite.blueprints), "train", np.random.default_rng(5))
    episodes = Episodes(suite, instances, RULES, growth)
    plantings = [plan_germination(episodes, row) for row in range(episodes.size)]
    controller = Replay({one.seed: planting for one, planting in zip(instances, plantings, strict=True)})
    scale = Scale(monkeypatch, suite.blueprints, factors)
    judged: list[tuple[Reason, bool, bool]] = []
    for engine in grow_population(episodes, controller, scale):
        networks, masks = engine.networks, engine.legal_actions()
        seeds = networks.table.stage == Stage.TRAINING
        reasons = evaluate_gates(networks.table, networks.measurements, RULES)[seeds]
        advance = masks.op[:, Op.ADVANCE]
        numbers = np.zeros(len(advance))
        seen = engine.observe(numbers, suite.steps, numbers, numbers + 100).slots
        healthy = seen[..., HEALTHY_FEATURE].numpy()[seeds]
        assert len(reasons) == len(advance), "one seed per network"
        judged += zip(map(Reason, reasons), advance.tolist(), healthy.astype(bool).tolist(), strict=True)
    assert len(judged) == len(instances)
    return set(judged)


PASSES = {(Reason.PASSED, True, True)}
FAILS = {(Reason.GRADIENT_UNHEALTHY, False, False)}
SICK = [1e-12, 1e12]


@pytest.mark.parametrize("suite", SUITES)
def test_seeds_with_gradients_of_the_host_s_size_pass(monkeypatch: pytest.MonkeyPatch, suite: str) -> None:
    assert judge(monkeypatch, suite, [1.0] * MINIBATCHES) == PASSES


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("factor", SICK)
def test_a_seed_whose_gradient_vanishes_or_explodes_does_not_pass_whatever_the_last_minibatch_is_like(
    monkeypatch: pytest.MonkeyPatch, suite: str, factor: float
) -> None:
    assert judge(monkeypatch, suite, [factor] * (MINIBATCHES - 1) + [1.0]) == FAILS


@pytest.mark.parametrize("factor", SICK)
def test_one_such_minibatch_among_many_fails_no_seed_even_if_it_is_the_last(
    monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    assert judge(monkeypatch, "tokens", [1.0] * (MINIBATCHES - 1) + [factor], blueprints=2) == PASSES


@pytest.mark.parametrize(
    ("factor", "change"),
    [
        (1e-5, {"vanished_ratio": 1e-12}),
        (1e5, {"exploded_ratio": 1e12}),
        (1e-12, {"max_share": 0.9}),
        (1e-12, {"max_share": 0.8, "decay": 0.0}),
    ],
)
def test_the_settings_act(monkeypatch: pytest.MonkeyPatch, factor: float, change: dict[str, float]) -> None:
    factors = [factor] * (MINIBATCHES - 1) + [1.0]
    with monkeypatch.context() as patch:
        assert judge(patch, "tokens", factors, blueprints=1) == FAILS
    growth = GrowthConfig(governor=None, gradient_health=GradientHealthSettings(**change))
    assert judge(monkeypatch, "tokens", factors, growth, blueprints=1) == PASSES
