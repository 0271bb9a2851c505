"""One model with a grower fares as the same network in a population does: same sights, same decisions, same weights."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.control.controller import Actions, Controller
from esper.control.learned import LearnedController
from esper.control.policy import OpPrior, Policy, PolicySettings
from esper.control.rules import Heuristic, HeuristicSettings, Never, Uniform
from esper.engine.engine import GrowthConfig
from esper.engine.measurements import TrainingReport
from esper.engine.observation import GLOBAL_FEATURES, SLOT_FEATURES, Observation, list_features
from esper.grower import Grower, backend
from esper.growth.attach import attach
from esper.growth.model import GrowingModel
from esper.lifecycle.actions import Blend, Head, Op, make_wait_actions
from esper.lifecycle.rules import ActionMasks, Rules
from esper.lifecycle.table import SeedMeasurements
from esper.rl.episodes import Episodes
from esper.tasks.registry import get_suite
from esper.tasks.suite import OptimizerSettings
from reference_population import make_optimizer

SUITE = get_suite("tokens")
STEPS = 14
CLIPPED = OptimizerSettings(name="sgd", momentum=0.9, clip_norm=0.05)
"""To less than any gradient's norm in these runs; AdamW would hardly notice."""
OPERATIONS = (*Rules().operations, Op.ADVANCE, Op.SET_ALPHA)
EVERYTHING = tuple((slot, kind) for kind in range(len(SUITE.blueprints)) for slot in range(len(SUITE.sites)))


@pytest.fixture(autouse=True)
def measure_like_a_population(monkeypatch: pytest.MonkeyPatch) -> None:
    """A population measures what is kept for good at every decision."""
    monkeypatch.setattr(backend, "FOSSIL_INTERVAL", 1)


class Recorded:
    """A controller whose sights and decisions are kept; told to, it waits once before it begins."""

    name = "recorded"

    def __init__(self, controller: Controller, *, late: bool) -> None:
        self.controller = controller
        self.seen: list[Observation] = []
        self.actions: list[Actions] = []
        self._late = late

    def start(self, seeds: Sequence[int]) -> Any:
        return self.controller.start(seeds)

    def act(self, observation: Observation, masks: ActionMasks, state: Any) -> tuple[Actions, Any]:
        if self._late:
            self._late = False
            return make_wait_actions(1), state
        actions, state = self.controller.act(observation, masks, state)
        self.seen.append(observation)
        self.actions.append(actions)
        return actions, state


def heuristic() -> Controller:
    return Heuristic(HeuristicSettings(preferences=EVERYTHING, probation=2, at_a_time=3), SUITE.steps)


FEWEST_ALIKE = 5
"""Decisions before which nothing may differ."""
PATIENT = OpPrior(wait=1.5, fossilize=1.0, prune=-2.0)
"""So that seeds stay long enough for every stage."""


def policy() -> Controller:
    settings = PolicySettings(advice=None, head_gain=1.0, op_prior=PATIENT)
    drawn = Policy(list_features(False).spec, settings, torch.Generator().manual_seed(3))
    return LearnedController(drawn, greedy=False)


Known = tuple[TrainingReport, SeedMeasurements]


def in_a_population(
    recorded: Recorded, rules: Rules, growth: GrowthConfig, settings: OptimizerSettings
) -> tuple[Episodes, list[Known]]:
    """The population, and what was known of its training and its modules after each decision."""
    suite = copy.copy(SUITE)
    suite.optimizer = settings
    running = Episodes(suite, [instance()], rules, growth)
    state = recorded.start([instance().seed])
    reports: list[Known] = []
    for _ in range(STEPS):
        actions, state = recorded.act(running.observe(), running.legal_actions(), state)
        running.step(actions)
        reports.append((running.engine.history.training, running.population.measurements))
        if running.finished.all():
            break
    return running, reports


def instance() -> Any:
    return SUITE.sample(1, "train", np.random.default_rng(5))[0]


def by_itself(
    recorded: Recorded, rules: Rules, growth: GrowthConfig, settings: OptimizerSettings
) -> tuple[GrowingModel, list[Known]]:
    """The model, and what its grower knew of both before each decision."""
    one, data = instance(), Episodes(SUITE, [instance()], rules)
    inputs, labels = data.validation.inputs[0], data.validation.labels[0]
    model = attach(SUITE.host(one), dict.fromkeys(SUITE.sites, SUITE.blueprints), torch.zeros(2, *SUITE.input_shape))
    optimizer = make_optimizer(model.parameter_groups(lr=one.learning_rate), one.learning_rate, settings)
    clip_norm = settings.clip_norm

    @torch.no_grad()
    def evaluate(model: GrowingModel) -> tuple[Tensor, Tensor]:
        # The loss and the hit of every example, so that contributions have standard errors as in the population.
        logits = model(inputs)
        return F.cross_entropy(logits, labels, reduction="none"), logits.argmax(1) == labels

    grower = Grower(
        model,
        optimizer,
        controller=recorded,
        evaluate=evaluate,
        horizon=SUITE.steps,
        rules=rules,
        growth=growth,
        rent=one.rent,
        train_size=one.train_size,
        seed=one.seed,
    )
    reports: list[Known] = []
    for step in range(STEPS):
        losses, right = list[float](), list[float]()
        first = np.array([step * SUITE.batches_per_step])
        for batch in data._stream.draw_batches(first, SUITE.batches_per_step):
            own, answers = batch.inputs[0], batch.labels[0]
            optimizer.zero_grad()
            logits = model(own)
            loss = F.cross_entropy(logits, answers)
            loss.backward()
            if clip_norm is not None:
                assert nn.utils.clip_grad_norm_(model.parameters(), clip_norm) > clip_norm, "the test means to clip"
            optimizer.step()
            losses.append(loss.item())
            right.append((logits.argmax(1) == answers).double().mean().item())
        if step < STEPS - 1:  # the population takes its last decision before its last training
            decision = grower.step(train_loss=float(np.mean(losses)), train_accuracy=float(np.mean(right)))
            reports.append((grower.engine.history.training, grower.engine.assessed.measurements))
            if decision.finished:
                break
    return model, reports


@pytest.mark.landing
@pytest.mark.parametrize(
    ("make", "blends"),
    [*((heuristic, (blend,)) for blend in Blend), *((make, tuple(Blend)) for make in (Uniform, policy))],
)
@pytest.mark.parametrize("settings", [SUITE.optimizer, CLIPPED], ids=["free", "clipped"])
def test_a_grower_is_a_population_of_one(make: Any, blends: tuple[Blend, ...], settings: OptimizerSettings) -> None:
    changes = {"harm_tolerance": 1.0, "operations": OPERATIONS}
    rules = Rules().model_copy(update={**changes, "blends": blends, "alpha_targets": (0.5, 1.0)})
    crowd, single = Recorded(make(), late=True), Recorded(make(), late=False)
    # Clipped so hard it learns next to nothing, and a grower's governor lets no seed be kept on such a network.
    growth = GrowthConfig(governor=None) if settings is CLIPPED else GrowthConfig()
    compare(crowd, single, rules, growth, settings)
    assert len({row[0, 0] for row in single.actions}) >= 3, "the test means to see several operations"
    chosen = {Blend(row[0, Head.BLEND]) for row in single.actions if row[0, Head.OP] == Op.GERMINATE}
    assert chosen == set(blends) or (len(blends) > 1 and len(chosen) > 1), "the test means to see several blends"


@pytest.mark.landing
@pytest.mark.parametrize("make", [heuristic, policy])
def test_so_it_is_where_counterfactuals_take_turns(make: Any) -> None:
    rules = Rules().model_copy(update={"harm_tolerance": 1.0, "operations": OPERATIONS})
    crowd, single = Recorded(make(), late=True), Recorded(make(), late=False)
    compare(crowd, single, rules, GrowthConfig(counterfactual_every=3), SUITE.optimizer)
    age = [feature.name for feature in SLOT_FEATURES].index("measurement_age")
    assert max(float(seen.slots[..., age].max()) for seen in single.seen) > 0, "the test means to see old measurements"


def test_so_it_is_where_a_plateau_ends_it() -> None:
    crowd, single = Recorded(Never(), late=True), Recorded(Never(), late=False)
    compare(crowd, single, Rules(), GrowthConfig(plateau=2), SUITE.optimizer)
    assert 0 < len(single.actions) < STEPS - 1, "the test means to see an early end"


def count_alike(single: Recorded, crowd: Recorded) -> int:
    """Decisions until an example between two classes is counted otherwise; mostly all of them.

    Their rounding differs, and AdamW makes much of that where gradients are next to nothing: from there on the two
    only decide alike.
    """
    names = [feature.name for feature in GLOBAL_FEATURES]
    one_example = {
        "train_accuracy": 1.01 / (SUITE.batches_per_step * SUITE.batch_size),
        "validation_accuracy": 1.01 / SUITE.validation_size,
    }
    for step, (ours, theirs) in enumerate(zip(single.seen, crowd.seen, strict=True)):
        for name, most in one_example.items():
            difference = float((ours.globals - theirs.globals)[..., names.index(name)].abs().max())
            if difference > 1e-4:
                assert difference < most, name
                return step
    return len(single.seen)


def compare(crowd: Recorded, single: Recorded, rules: Rules, growth: GrowthConfig, settings: OptimizerSettings) -> None:
    """See the same, decide the same and become the same in a population and in a loop."""
    running, expected_reports = in_a_population(crowd, rules, growth, settings)
    model, reports = by_itself(single, rules, growth, settings)
    np.testing.assert_array_equal(np.array(single.actions), np.array(crowd.actions))
    alike = count_alike(single, crowd)
    assert alike == len(single.seen) or (settings.name == "adamw" and alike >= FEWEST_ALIKE)
    for step, (ours, theirs) in enumerate(zip(single.seen[:alike], crowd.seen[:alike], strict=True)):
        for part in Observation._fields:
            difference = (getattr(ours, part) - getattr(theirs, part)).abs().max()
            assert difference < 5e-4, (step, part)
    expected = running.population.host.layout.unflatten(running.population.host.values.detach())
    narrow = dict(model.host.named_parameters())
    for name, values in expected.items() if alike == len(single.seen) else ():
        own = narrow[name].detach()
        # Where gradients are next to nothing, Adam makes much of their rounding.
        torch.testing.assert_close(own, values[0][tuple(slice(size) for size in own.shape)], atol=5e-3, rtol=0)
    table = running.population.table
    held = {SUITE.sites[slot]: Blend(table.blend[0, slot]) for slot in table.owning[0].nonzero()[0].tolist()}
    assert {name: seed.blend for name, seed in model.seeds.items()} == held
    for step, (ours, theirs) in enumerate(zip(reports[:alike], expected_reports[: len(reports[:alike])], strict=True)):
        for name, figure in figures(theirs).items():
            np.testing.assert_allclose(figures(ours)[name], figure, rtol=5e-3, atol=1e-6, err_msg=f"{name} at {step}")


def figures(known: Known) -> dict[str, Any]:
    """All figures of a report, its health's too, and the health of gradients."""
    report, measurements = known
    every = {**vars(report), **vars(report.health)}
    del every["health"]
    means = ("gradient_healthy", "vanished_share", "exploded_share", "gradient_weight")
    return {**every, **{name: getattr(measurements, name).astype(float) for name in means}}
