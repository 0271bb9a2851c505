"""A rollback of a row: what it restores, what it prunes, and that nobody else notices."""

import copy
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from esper.engine.governor import Governor, GovernorSettings, Intervention, Trouble
from esper.engine.measurements import TrainingReport
from esper.lifecycle.actions import Blend, Op, make_action, make_wait_actions
from esper.lifecycle.rules import Isolation, Rules
from esper.lifecycle.table import Stage
from esper.numerics.arrays import Bools
from esper.numerics.devices import Deferred
from esper.population.backend import PopulationBackend
from esper.population.learning import Batch, train
from esper.population.population import Actions, NetworkSpec, Population, PopulationConfig, Strategy
from esper.tasks.suite import OptimizerSettings, Suite
from open_rules import open_rules
from population.scenes import (
    SUITE,
    VALIDATION,
    Draws,
    State,
    advance,
    assert_aligned,
    assert_same_state,
    good_measurements,
    instances,
    networks,
    plan,
    record_measurements,
    state_of,
)

MLP, NORM = SUITE.blueprints.index("mlp"), SUITE.blueprints.index("norm")
QUICK = open_rules(cooldown=(1, 1, 1), min_training_steps=1, harm_tolerance=1.0, blends=tuple(Blend))
SIZE = 4
ILL = 2
EVERYONE = np.ones(SIZE, np.bool_)

Hurt = Callable[[Population, int], None]


def poison(population: Population, network: int) -> None:
    """As after a step that exploded: parameters, moments and buffers of one network are not numbers."""
    with torch.no_grad():
        for block in population.flat.blocks:
            for tensor in (block.values, *block.moments.values()):
                tensor[block.owners == network] = torch.nan


class Guard:
    """A population, as the engine sees it, and its governor."""

    def __init__(self, population: Population, settings: GovernorSettings, suite: Suite = SUITE) -> None:
        self.backend = PopulationBackend(population, suite, Batch(torch.empty(0), torch.empty(0)), no_examples)
        self.governor = Governor(self.backend, settings)
        self._due = np.ones(population.table.stage.shape, np.bool_)

    def check(self, report: TrainingReport, validation: Batch, running: Bools = EVERYONE) -> Intervention:
        """Measurement after training, the governor's check, and the measurements of both."""
        self.backend.validation = validation
        training, evaluation = self.backend.start_measurement(
            Deferred((), lambda: report), self._due, check_finite=True
        ).fetch()
        assert evaluation.skill is not None
        assert evaluation.finite is not None
        found = self.governor.check(training.loss, evaluation.skill, evaluation.finite, None, running)
        evaluation = self.backend.evaluate(self._due) if found.rows.any() else evaluation
        record_measurements(self.backend.networks, report, evaluation)
        return found


def no_examples() -> Batch:
    raise AssertionError("no promises are measured here")


def checked(population: Population, guard: Guard, draws: Draws, hurt: Hurt | None = None) -> Intervention:
    """Training, perhaps an accident, measurement, and the governor's check."""
    report = train(population, [draws.batch() for _ in range(2)])
    if hurt is not None:
        hurt(population, ILL)
    return guard.check(report, draws.batch(VALIDATION))


def grown(strategy: Strategy = "stacked", isolation: Isolation = Isolation.NONE) -> tuple[Population, Draws]:
    """Networks with a seed of each kind and blend in slot 1, about to be decided for the second time."""
    chosen = instances(SIZE)
    rules = QUICK.model_copy(update={"isolation": isolation})
    population, draws = Population(plan(rules, strategy=strategy), networks(chosen)), Draws(chosen)
    seeds = ((MLP, Blend.ADD), (MLP, Blend.GATE), (MLP, Blend.GATE), (NORM, Blend.MULTIPLY))
    advance(population, draws, np.stack([make_action(Op.GERMINATE, 1, kind, blend=blend) for kind, blend in seeds]))
    return population, draws


def guard_of(population: Population, max_rollbacks: int = 3) -> Guard:
    """It looks for what is not finite only: these networks learn random labels, and measure with ten of them."""
    return Guard(population, GovernorSettings(lead=1.0, multiple=1e9, max_rollbacks=max_rollbacks))


def seeds(state: State) -> set[str]:
    return {name.split(".", 3)[1] for name in state if name.startswith("seed.")}


STEPS_TO = {Stage.BLENDING: 1, Stage.HOLDING: 4}


@pytest.mark.parametrize("stage", STEPS_TO)
def test_live_seeds_are_pruned_and_the_host_is_as_in_the_snapshot(stage: Stage) -> None:
    population, draws = grown()
    guard = guard_of(population)
    for _ in range(STEPS_TO[stage]):
        population.decide(make_wait_actions(SIZE))
        assert not checked(population, guard, draws).rows.any()
    assert population.table.stage[ILL, 1] == stage
    kept = state_of(population, ILL)
    population.decide(make_wait_actions(SIZE))
    found = checked(population, guard, draws, poison)
    assert found.trouble.tolist() == [0, 0, Trouble.NOT_FINITE, 0]
    assert (found.transitions.env.tolist(), found.transitions.slot.tolist()) == ([ILL], [1])
    restored = state_of(population, ILL)
    assert torch.equal(restored["host.values"], kept["host.values"])
    assert not any(restored[f"host.{name}"].any() for name in ("mean", "square", "steps"))
    assert torch.equal(restored["host.rate"], kept["host.rate"])
    assert population.table.stage[ILL].tolist() == [Stage.DORMANT, Stage.PRUNED, Stage.DORMANT]
    assert not seeds(restored)
    assert_aligned(population)


def test_a_seed_that_was_just_fossilized_stays_with_the_values_of_the_snapshot() -> None:
    population, draws = grown()
    guard = guard_of(population)
    for _ in range(4):
        population.decide(make_wait_actions(SIZE))
        checked(population, guard, draws)
    kept = state_of(population, ILL)
    population.measurements = good_measurements(population)
    population.decide(np.stack([*make_wait_actions(2), make_action(Op.FOSSILIZE, 1), *make_wait_actions(1)]))
    found = checked(population, guard, draws, poison)
    assert len(found.transitions) == 0
    restored = state_of(population, ILL)
    for part in ("host", f"seed.1.{MLP}"):
        assert torch.equal(restored[f"{part}.values"], kept[f"{part}.values"])
        assert not any(restored[f"{part}.{name}"].any() for name in ("mean", "square", "steps"))
    assert population.table.stage[ILL, 1] == Stage.FOSSILIZED
    assert population.table.alpha[ILL, 1] == 1.0
    assert_aligned(population)


def test_a_fossil_of_which_no_good_values_are_known_goes() -> None:
    chosen = instances(SIZE)
    population, draws = Population(plan(QUICK), networks(chosen)), Draws(chosen)
    guard = guard_of(population)
    before = state_of(population, ILL)
    advance(population, draws, np.stack([make_action(Op.GERMINATE, 1, MLP)] * SIZE))
    for _ in range(4):
        advance(population, draws, make_wait_actions(SIZE))
    population.measurements = good_measurements(population)
    population.decide(np.stack([make_action(Op.FOSSILIZE, 1)] * SIZE))
    checked(population, guard, draws, poison)
    assert population.table.stage[:, 1].tolist() == [Stage.FOSSILIZED] * 2 + [Stage.PRUNED, Stage.FOSSILIZED]
    assert torch.equal(state_of(population, ILL)["host.values"], before["host.values"])
    assert_aligned(population)


def test_another_seed_in_the_same_place_is_not_taken_for_the_one_in_the_snapshot() -> None:
    population, draws = grown()
    guard = guard_of(population)
    for actions in (
        make_action(Op.PRUNE, 1),
        *make_wait_actions(3),
        make_action(Op.GERMINATE, 1, MLP),
        *make_wait_actions(4),
    ):
        advance(population, draws, np.stack([*make_wait_actions(2), actions, *make_wait_actions(1)]))
    population.measurements = good_measurements(population)
    population.decide(np.stack([*make_wait_actions(2), make_action(Op.FOSSILIZE, 1), *make_wait_actions(1)]))
    checked(population, guard, draws, poison)
    assert population.table.stage[ILL, 1] == Stage.PRUNED


def trajectories(
    strategy: Strategy, isolation: Isolation, hurt: Hurt | None, dtype: torch.dtype, when: int
) -> tuple[list[list[State]], Population]:
    """The states of everybody but the network that has an accident (or not), before decision ``when``."""
    chosen = instances(SIZE)
    rules = QUICK.model_copy(update={"isolation": isolation})
    shared = plan(rules, OptimizerSettings(clip_norm=0.5), strategy, dtype)
    population, draws = Population(shared, networks(chosen)), Draws(chosen, dtype)
    guard, states = guard_of(population), list[list[State]]()
    for step in range(12):
        masks = population.legal_actions()
        population.decide(_without(ILL, draws.actions(masks), keep=step < when))
        checked(population, guard, draws, hurt if step == when else None)
        states.append([state_of(population, network) for network in range(SIZE) if network != ILL])
    assert (guard.governor.rollbacks > 0).tolist() == [hurt is not None and network == ILL for network in range(SIZE)]
    return states, population


def _without(network: int, actions: Actions, keep: bool) -> Actions:
    """From the accident on the ill network waits, in both runs: what it may do is no longer the same."""
    return actions if keep else np.where((np.arange(SIZE) == network)[:, None], 0, actions)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("strategy", "isolation"), [("stacked", "none"), ("stacked", "shadow"), ("looped", "none")])
@pytest.mark.parametrize("when", [3, 7])
@pytest.mark.few(2)
def test_the_others_are_bit_identical_to_a_run_without_the_accident(
    strategy: Strategy, isolation: str, dtype: torch.dtype, when: int, count_figure: Callable[[str, int], None]
) -> None:
    ill, _ = trajectories(strategy, Isolation(isolation), poison, dtype, when)
    well, _ = trajectories(strategy, Isolation(isolation), None, dtype, when)
    for one, other in zip(ill, well, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            assert_same_state(mine, theirs)
    count_figure("rows compared bit for bit with a run without the accident", sum(map(len, ill)))


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_the_first_step_after_a_rollback_is_that_of_a_new_optimizer(name: str) -> None:
    chosen = instances(SIZE)
    shared = plan(QUICK, OptimizerSettings(name=name, weight_decay=0.01))
    population, draws = Population(shared, networks(chosen)), Draws(chosen)
    guard = guard_of(population)
    for _ in range(3):
        population.decide(make_wait_actions(SIZE))
        checked(population, guard, draws)
    checked(population, guard, draws, poison)
    host = SUITE.host(chosen[ILL]).double()
    values = population.host.layout.unflatten(population.host.values.detach()[ILL : ILL + 1])
    with torch.no_grad():
        for part, parameter in host.named_parameters():
            parameter.copy_(values[part][0][tuple(slice(extent) for extent in parameter.shape)])
    fresh = Population(shared, [networks(chosen)[ILL]._replace(host=host)])
    batch = draws.batch()
    train(population, [batch])
    train(fresh, [Batch(batch.inputs[ILL : ILL + 1], batch.labels[ILL : ILL + 1])])
    assert_same_state(
        {key: tensor for key, tensor in state_of(population, ILL).items() if key.startswith("host.")},
        {key: tensor for key, tensor in state_of(fresh, 0).items() if key.startswith("host.")},
        1e-12,
    )


class NormedHost(nn.Module):
    """A host with running statistics."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first, self.norm, self.last = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        for parameter in (self.first.weight, self.last.weight):
            nn.init.normal_(parameter, generator=generator)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.norm(self.first(inputs)))


def normed(seeds: Sequence[int], strategy: Strategy, rules: Rules = QUICK) -> Population:
    shared = PopulationConfig(
        NormedHost(0), ("first",), ("mlp",), torch.randn(4, 6), OptimizerSettings(), rules, strategy
    )
    return Population(shared, [NetworkSpec(NormedHost(seed), (5,), 0.01, seed) for seed in seeds])


def some(seed: int, size: int = 8) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch(torch.randn(3, size, 6, generator=generator), torch.randint(3, (3, size), generator=generator))


@pytest.mark.parametrize("strategy", ["stacked", "looped"])
def test_running_statistics_are_restored_with_the_row(strategy: Strategy) -> None:
    population = normed((1, 2, 3), strategy)
    suite = copy.copy(SUITE)
    suite.classes = 3
    guard, everyone = Guard(population, GovernorSettings(), suite), np.ones(3, np.bool_)

    def advance(seed: int, batch: Batch) -> Intervention:
        population.decide(make_wait_actions(3))
        return guard.check(train(population, [batch]), some(seed), everyone)

    assert not advance(1, some(10)).rows.any()
    kept = {name: buffer.clone() for name, buffer in population.host.buffers.items()}
    assert kept["norm.running_mean"].any()
    spoilt = some(11)
    spoilt.inputs[1, 0, 0] = torch.nan
    found = advance(2, spoilt)
    assert found.rows.tolist() == [False, True, False]
    for name, buffer in population.host.buffers.items():
        assert torch.equal(buffer[1], kept[name][1])
        assert buffer.isfinite().all()
        assert not torch.equal(buffer[0], kept[name][0]), "the others went on"


def test_resting_networks_keep_their_running_statistics() -> None:
    population = normed((1, 2, 3), "stacked")
    train(population, [some(10)])
    before = {name: buffer.clone() for name, buffer in population.host.buffers.items()}
    assert before
    train(population, [some(11), some(12)], frozen=np.array([True, False, True]))
    for name, buffer in population.host.buffers.items():
        assert [torch.equal(buffer[row], before[name][row]) for row in range(3)] == [True, False, True], name


@pytest.mark.parametrize("strategy", ["stacked", "looped"])
def test_running_statistics_do_not_notice_a_seed_that_trains_apart(strategy: Strategy) -> None:
    rules = open_rules(isolation="shadow", min_training_steps=1)
    pair: list[Population] = []
    for _ in range(2):
        torch.manual_seed(0)
        pair.append(normed((1, 2, 3), strategy, rules))
    for population, first in zip(pair, (make_action(Op.GERMINATE, 0, 0), make_wait_actions(1)[0]), strict=True):
        for chosen in (first, make_wait_actions(1)[0]):
            population.measurements = good_measurements(population)
            population.decide(np.stack([chosen] * 3))
    assert (pair[0].table.stage == Stage.TRAINING).all()
    for population in pair:
        train(population, [some(10), some(11)])
    (bank,) = pair[0].banks.values()
    assert bank.block.steps.tolist() == [2] * 3, "the test means the seeds to learn"
    assert pair[0].host.buffers
    for name, buffer in pair[0].host.buffers.items():
        assert torch.equal(buffer, pair[1].host.buffers[name]), name


def test_rollbacks_are_counted_and_bounded() -> None:
    population, draws = grown()
    guard = guard_of(population, max_rollbacks=2)
    ended = [checked(population, guard, draws, poison) for _ in range(3)]
    assert [bool(found.exhausted[ILL]) for found in ended] == [False, False, True]
    assert guard.governor.rollbacks.tolist() == [0, 0, 3, 0]
    assert guard.governor.rollbacks_used.tolist() == [0, 0, 1, 0]
    guard.governor.restart(np.arange(SIZE) == ILL)
    assert guard.governor.rollbacks.tolist() == [0, 0, 0, 0]


def test_whoever_rests_is_left_alone() -> None:
    population, draws = grown()
    guard = guard_of(population)
    report = train(population, [draws.batch()])
    poison(population, ILL)
    found = guard.check(report, draws.batch(VALIDATION), np.arange(SIZE) != ILL)
    assert not found.rows.any()
    assert population.host.values[ILL].isnan().all()


@pytest.mark.parametrize("moment", ["mean", "square"])
def test_a_moment_that_overflowed_is_trouble(moment: str) -> None:
    population, draws = grown()
    guard = guard_of(population)

    def overflow(population: Population, network: int) -> None:
        population.host.moments[moment][network, 0] = torch.inf

    found = checked(population, guard, draws, overflow)
    assert found.rows.tolist() == [False, False, True, False]


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_resting_networks_keep_all_they_have(name: str) -> None:
    chosen = instances(SIZE)
    population = Population(plan(QUICK, OptimizerSettings(name=name, weight_decay=0.1)), networks(chosen))
    draws = Draws(chosen)
    advance(population, draws, np.stack([make_action(Op.GERMINATE, 1, MLP)] * SIZE))
    for _ in range(3):
        advance(population, draws, make_wait_actions(SIZE))
    before = [state_of(population, network) for network in range(SIZE)]
    batch = draws.batch()
    batch.inputs[1] = torch.nan
    train(population, [batch, batch], frozen=np.array([False, True, True, False]))
    for network in range(SIZE):
        values = [name for name in before[network] if name.endswith(".values")]
        rests = network in (1, 2)
        after = state_of(population, network)
        assert len(values) == 2
        assert all(torch.equal(after[name], before[network][name]) == rests for name in values)
