"""What happens to a network follows from its own seed and actions: not from E, and not from its neighbours."""

from collections.abc import Callable, Sequence

import pytest
import torch

from esper.lifecycle.actions import Blend, make_wait_actions
from esper.lifecycle.rules import ActionMasks, Isolation, Rules
from esper.lifecycle.table import Stage
from esper.population import forward
from esper.population.parameters import SeedKind
from esper.population.population import STRATEGIES, Actions, Fossils, Population, Strategy
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite
from esper.tasks.suite import OptimizerSettings
from open_rules import open_rules
from population.scenes import SUITE, Draws, State, advance, assert_same_state, both, instances, networks, plan, state_of

DECISIONS = 9
TOLERANCE = 1e-9
CLIPPED = OptimizerSettings(name="adamw", clip_norm=0.5)

Disturbance = Callable[[Population, int], None]


def rules(isolation: Isolation = Isolation.NONE) -> Rules:
    return open_rules(isolation=isolation, cooldown=(1, 1, 1), min_training_steps=1, harm_tolerance=1.0)


def trajectory(
    chosen: Sequence[Instance],
    followed: Instance,
    isolation: Isolation = Isolation.NONE,
    strategy: Strategy = "stacked",
    act: Callable[[Draws, ActionMasks], Actions] = Draws.actions,
    disturb: Disturbance = lambda _population, _step: None,
    fossils: Fossils = (),
) -> list[State]:
    """The states that one network passes through in the company of others; those with an even seed have fossils."""
    starts = [one._replace(fossils=() if one.seed % 2 else fossils) for one in networks(chosen)]
    population = Population(plan(rules(isolation), CLIPPED, strategy, suite=get_suite(followed.suite)), starts)
    draws, place = Draws(chosen), chosen.index(followed)
    states: list[State] = []
    for step in range(DECISIONS):
        advance(population, draws, act(draws, population.legal_actions()))
        disturb(population, step)
        states.append(state_of(population, place))
    return states


def assert_same_trajectory(actual: list[State], expected: list[State]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert_same_state(one, other, TOLERANCE)


def stages(states: list[State]) -> set[int]:
    return {int(stage) for state in states for stage in state["SeedTable.stage"]}


@pytest.mark.parametrize("isolation", list(Isolation))
@pytest.mark.parametrize("index", [0, 5, 9])
@pytest.mark.few(1)
def test_a_trajectory_does_not_depend_on_the_number_of_networks(index: int, isolation: Isolation) -> None:
    everyone = instances(16)
    followed = everyone[index]
    alone = trajectory([followed], followed, isolation)
    assert_same_trajectory(trajectory([everyone[12], followed, everyone[2]], followed, isolation), alone)
    assert_same_trajectory(trajectory(everyone, followed, isolation), alone)
    assert_same_trajectory(trajectory(everyone[:6][::-1] if index < 6 else everyone, followed, isolation), alone)
    assert len(stages(alone)) >= 3, "the test means to follow a network that grows"


@pytest.mark.parametrize("suite", ["tokens", pytest.param("language", marks=pytest.mark.landing)])
def test_a_trajectory_that_begins_with_fossils_does_not_depend_on_neighbours(suite: str) -> None:
    """Neither where labels are per position, as those of language are."""
    everyone, fossils = instances(4, get_suite(suite)), (SeedKind(0, 0), SeedKind(1, 1, Blend.GATE))
    followed = next(one for one in everyone[1:] if one.seed % 2 == 0)
    alone = trajectory([followed], followed, fossils=fossils)
    assert (alone[0]["SeedTable.stage"] == Stage.FOSSILIZED).sum() == 2
    assert_same_trajectory(trajectory(everyone, followed, fossils=fossils), alone)


def test_a_trajectory_does_not_depend_on_the_strategy() -> None:
    everyone = instances(3)
    for followed in everyone:
        assert_same_trajectory(trajectory(everyone, followed, strategy="looped"), trajectory(everyone, followed))


def test_a_trajectory_does_not_depend_on_what_neighbours_do() -> None:
    everyone = instances(4)
    followed = everyone[1]

    def only_the_followed(draws: Draws, masks: ActionMasks) -> Actions:
        actions = make_wait_actions(len(everyone))
        actions[1] = draws.actions(masks)[1]
        return actions

    assert_same_trajectory(trajectory(everyone, followed, act=only_the_followed), trajectory(everyone, followed))


@pytest.mark.parametrize("isolation", list(Isolation))
@pytest.mark.few(1)
def test_a_neighbour_that_is_not_a_number_does_no_harm(isolation: Isolation) -> None:
    everyone = instances(4)
    followed = everyone[1]

    def explode(population: Population, step: int) -> None:
        if step != 3:
            return
        with torch.no_grad():
            for block in population.flat.blocks:
                block.values[block.owners == 2] = torch.nan

    ill = trajectory(everyone, everyone[2], isolation, disturb=explode)
    assert ill[-1]["host.values"].isnan().any()
    assert_same_trajectory(
        trajectory(everyone, followed, isolation, disturb=explode), trajectory(everyone, followed, isolation)
    )


# Choosing between the stacked program and the loop.


@pytest.mark.parametrize("faster", STRATEGIES)
def test_the_faster_one_is_chosen_and_nothing_else_changes(faster: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    population, _ = both(instances(3), plan(open_rules()))
    before = population.host.values.detach().clone()
    tried: list[Strategy] = []

    def timed(running: Population, inputs: torch.Tensor) -> float:
        tried.append(running.strategy)
        return 1.0 if running.strategy == faster else 2.0

    monkeypatch.setattr(forward, "_time_pass", timed)
    assert (
        forward.find_fastest_strategy(population, torch.zeros(3, 4, *SUITE.input_shape, dtype=torch.float64)) == faster
    )
    assert tried == list(STRATEGIES) * (1 + forward.ROUNDS)
    assert population.strategy == "stacked"
    assert torch.equal(population.host.values, before)
