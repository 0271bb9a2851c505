"""One model with a grower fares as the same network in a population does: same sights, same decisions, same weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from esper.control.controller import Actions, Controller
from esper.control.learned import Learned
from esper.control.observation import SPEC
from esper.control.policy import Policy, PolicySettings
from esper.control.rules.heuristic import Heuristic, HeuristicSettings
from esper.control.rules.simple import Uniform
from esper.control.spaces import Observation
from esper.experiments.settings import DEFAULT_RULES
from esper.grower import Grower
from esper.growth.attach import attach
from esper.growth.model import GrowingModel
from esper.lifecycle.actions import Blend, Head, Op, wait
from esper.lifecycle.masks import ActionMasks
from esper.lifecycle.rules import Isolation, Rules
from esper.rl.episodes import Episodes
from esper.tasks.registry import get_suite

SUITE = get_suite("tokens")
STEPS = 14
OPERATIONS = (*DEFAULT_RULES.operations, Op.ADVANCE, Op.SET_ALPHA)
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


def in_a_population(recorded: Recorded, rules: Rules) -> Episodes:
    running = Episodes(SUITE, [instance()], rules)
    state = recorded.start([instance().seed])
    for _ in range(STEPS):
        actions, state = recorded.act(running.observe(), running.legal_actions(), state)
        running.step(actions)
    return running


def instance() -> Any:
    return SUITE.sample(1, "train", np.random.default_rng(5))[0]


def by_itself(recorded: Recorded, rules: Rules) -> GrowingModel:
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
            grower.step(train_loss=float(np.mean(losses)), train_accuracy=float(np.mean(right)))
    return model


@pytest.mark.parametrize(
    ("make", "blends"),
    [*((heuristic, (blend,)) for blend in Blend), *((make, tuple(Blend)) for make in (Uniform, policy))],
)
@pytest.mark.parametrize("isolation", [Isolation.NONE, Isolation.SHADOW])
def test_a_grower_is_a_population_of_one(make: Any, blends: tuple[Blend, ...], isolation: Isolation) -> None:
    changes = {"isolation": isolation, "min_training_steps": 1, "harm_tolerance": 1.0, "operations": OPERATIONS}
    rules = DEFAULT_RULES.model_copy(update={**changes, "blends": blends, "alpha_targets": (0.5, 1.0)})
    crowd, single = Recorded(make(), late=True), Recorded(make(), late=False)
    running = in_a_population(crowd, rules)
    model = by_itself(single, rules)
    np.testing.assert_array_equal(np.array(single.actions), np.array(crowd.actions))
    assert len({row[0, 0] for row in single.actions}) >= 3, "the test means to see several operations"
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
    table = running.population.table
    held = {SUITE.sites[slot]: Blend(table.blend[0, slot]) for slot in table.owning[0].nonzero()[0].tolist()}
    assert {name: seed.blend for name, seed in model.seeds.items()} == held
    chosen = {Blend(row[0, Head.BLEND]) for row in single.actions if row[0, Head.OP] == Op.GERMINATE}
    assert chosen == set(blends) or (len(blends) > 1 and len(chosen) > 1), "the test means to see several blends"
