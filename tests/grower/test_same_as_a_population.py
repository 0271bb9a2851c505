"""One model with a grower fares as the same network in a population does: same sights, same decisions, same weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from esper.control.controller import Actions, Controller
from esper.control.features import SLOT_FEATURES
from esper.control.learned import Learned
from esper.control.observation import SPEC
from esper.control.policy import Policy, PolicySettings
from esper.control.rules.heuristic import Heuristic, HeuristicSettings
from esper.control.rules.simple import Never, Uniform
from esper.control.spaces import Observation
from esper.experiments.settings import DEFAULT_RULES
from esper.grower import Grower
from esper.growth.attach import attach
from esper.growth.model import GrowingModel
from esper.lifecycle.actions import Op, wait
from esper.lifecycle.masks import ActionMasks
from esper.lifecycle.rules import Isolation, Rules
from esper.rl.conduct import Conduct
from esper.rl.episodes import Episodes
from esper.tasks.registry import get_suite

SUITE = get_suite("tokens")
STEPS = 14
OPERATIONS = (*DEFAULT_RULES.operations, Op.ADVANCE)
EVERYTHING = tuple((slot, kind) for kind in range(len(SUITE.blueprints)) for slot in range(len(SUITE.sites)))


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
            return wait(1), state
        actions, state = self.controller.act(observation, masks, state)
        self.seen.append(observation)
        self.actions.append(actions)
        return actions, state


def heuristic() -> Controller:
    return Heuristic(HeuristicSettings(preferences=EVERYTHING, trial=2, at_a_time=3), SUITE.steps)


def policy() -> Controller:
    return Learned(Policy(SPEC, PolicySettings(head_gain=1.0), torch.Generator().manual_seed(3)), greedy=False)


def in_a_population(recorded: Recorded, rules: Rules, conduct: Conduct) -> Episodes:
    running = Episodes(SUITE, [instance()], rules, conduct)
    state = recorded.start([instance().seed])
    for _ in range(STEPS):
        actions, state = recorded.act(running.observe(), running.legal_actions(), state)
        running.step(actions)
        if running.finished.all():
            break
    return running


def instance() -> Any:
    return SUITE.sample(1, "train", np.random.default_rng(5))[0]


def by_itself(recorded: Recorded, rules: Rules, conduct: Conduct) -> GrowingModel:
    one, data = instance(), Episodes(SUITE, [instance()], rules)
    inputs, labels = data.validation.inputs[0], data.validation.labels[0]
    model = attach(SUITE.host(one), dict.fromkeys(SUITE.sites, SUITE.blueprints), torch.zeros(2, *SUITE.input_shape))
    groups = model.parameter_groups(lr=one.learning_rate)
    optimizer = torch.optim.AdamW(groups, betas=SUITE.optimizer.betas, weight_decay=SUITE.optimizer.weight_decay)

    @torch.no_grad()
    def evaluate(model: GrowingModel) -> tuple[float, float]:
        logits = model(inputs)
        return F.cross_entropy(logits, labels).item(), (logits.argmax(1) == labels).double().mean().item()

    grower = Grower(
        model,
        optimizer,
        recorded,
        evaluate=evaluate,
        horizon=SUITE.steps,
        rules=rules,
        conduct=conduct,
        rent=one.rent,
        train_size=one.train_size,
        seed=one.seed,
    )
    for step in range(STEPS):
        losses, right = list[float](), list[float]()
        first = np.array([step * SUITE.batches_per_step])
        for batch in data._stream.take(first, SUITE.batches_per_step):
            own, answers = batch.inputs[0], batch.labels[0]
            optimizer.zero_grad()
            logits = model(own)
            loss = F.cross_entropy(logits, answers)
            loss.backward()
            grower.learn_apart(lambda own=own, answers=answers: F.cross_entropy(model(own), answers))
            optimizer.step()
            losses.append(loss.item())
            right.append((logits.argmax(1) == answers).double().mean().item())
        if step < STEPS - 1:  # the population takes its last decision before its last training
            decision = grower.step(train_loss=float(np.mean(losses)), train_accuracy=float(np.mean(right)))
            if decision.finished:
                break
    return model


@pytest.mark.parametrize("make", [heuristic, Uniform, policy])
@pytest.mark.parametrize("isolation", [Isolation.NONE, Isolation.SHADOW])
def test_a_grower_is_a_population_of_one(make: Any, isolation: Isolation) -> None:
    rules = DEFAULT_RULES.model_copy(
        update={"isolation": isolation, "min_training_steps": 1, "harm_tolerance": 1.0, "operations": OPERATIONS}
    )
    crowd, single = Recorded(make(), late=True), Recorded(make(), late=False)
    compare(crowd, single, rules, Conduct())
    assert len({row[0, 0] for row in single.actions}) >= 3, "the test means to see several operations"


@pytest.mark.parametrize("make", [heuristic, policy])
def test_so_it_is_where_counterfactuals_take_turns(make: Any) -> None:
    rules = DEFAULT_RULES.model_copy(update={"min_training_steps": 1, "harm_tolerance": 1.0, "operations": OPERATIONS})
    crowd, single = Recorded(make(), late=True), Recorded(make(), late=False)
    compare(crowd, single, rules, Conduct(counterfactual_every=3))
    age = [feature.name for feature in SLOT_FEATURES].index("evidence_age")
    assert max(float(seen.slots[..., age].max()) for seen in single.seen) > 0, "the test means to see old evidence"


def test_so_it_is_where_a_plateau_ends_it() -> None:
    crowd, single = Recorded(Never(), late=True), Recorded(Never(), late=False)
    compare(crowd, single, DEFAULT_RULES, Conduct(plateau=2))
    assert 0 < len(single.actions) < STEPS - 1, "the test means to see an early end"


def compare(crowd: Recorded, single: Recorded, rules: Rules, conduct: Conduct) -> None:
    """See the same, decide the same and become the same in a population and in a loop."""
    running = in_a_population(crowd, rules, conduct)
    model = by_itself(single, rules, conduct)
    np.testing.assert_array_equal(np.array(single.actions), np.array(crowd.actions))
    for step, (ours, theirs) in enumerate(zip(single.seen, crowd.seen, strict=True)):
        for part in Observation._fields:
            difference = (getattr(ours, part) - getattr(theirs, part)).abs().max()
            assert difference < 5e-4, (step, part)
    expected = running.population.host.shape.unflatten(running.population.host.values.detach())
    narrow = dict(model.host.named_parameters())
    for name, values in expected.items():
        own = narrow[name].detach()
        # Where gradients are next to nothing, Adam makes much of their rounding.
        torch.testing.assert_close(own, values[0][tuple(slice(size) for size in own.shape)], atol=5e-3, rtol=0)
    held = {SUITE.sites[slot] for slot in running.population.table.owning[0].nonzero()[0].tolist()}
    assert set(model.seeds) == held
