"""Parameters, optimizer state and the lifecycle's table are one thing: after every call, successful or failed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from torch.overrides import TorchFunctionMode

from esper.errors import ConfigError, IllegalActionError, SlotError, UnknownBlueprintError
from esper.growth.blueprints.registry import get
from esper.lifecycle.actions import Blend, Op, make_action, make_wait_actions
from esper.lifecycle.rules import Isolation, Rules
from esper.lifecycle.table import Stage
from esper.lifecycle.transitions import Transitions
from esper.population import learning
from esper.population.backend import Snapshots, roll_back
from esper.population.parameters import SeedKind
from esper.population.population import Population, PopulationConfig
from open_rules import open_rules
from population.scenes import (
    SUITE,
    Draws,
    advance,
    assert_aligned,
    assert_same_state,
    good_measurements,
    instances,
    networks,
    plan,
    state_of,
    uncertain_measurements,
)

MLP = SUITE.blueprints.index("mlp")
TOKEN_CONV = SUITE.blueprints.index("token_conv")
QUICK = open_rules(cooldown=(1, 1, 1), min_training_steps=1)


def population(count: int, rules: Rules = QUICK) -> Population:
    return Population(plan(rules), networks(instances(count)))


def test_a_seed_keeps_its_moments_when_others_come_and_go_and_when_it_fossilizes() -> None:
    chosen = instances(3)
    fast, draws = Population(plan(QUICK), networks(chosen)), Draws(chosen)
    advance(fast, draws, np.stack([make_action(Op.GERMINATE, 1, MLP)] * 3))
    for _ in range(4):
        advance(fast, draws, make_wait_actions(3))
    before = state_of(fast, 1)
    fast.measurements = good_measurements(fast)
    fast.decide(np.stack([make_action(Op.PRUNE, 1), make_action(Op.FOSSILIZE, 1), make_action(Op.GERMINATE, 0, MLP)]))
    after = state_of(fast, 1)
    names = [name for name in before if name.startswith("seed.")]
    assert names
    assert all(torch.equal(after[name], before[name]) for name in names)
    assert after[f"seed.1.{MLP}.mean"].any()
    assert after[f"seed.1.{MLP}.steps"] == 8  # two batches in each of the four steps after GERMINATED
    assert fast.table.stage[:, 1].tolist() == [Stage.PRUNED, Stage.FOSSILIZED, Stage.HOLDING]


def test_a_second_seed_in_a_slot_starts_from_other_weights() -> None:
    fast = population(1)
    first: list[torch.Tensor] = []
    for _ in range(2):
        fast.measurements = good_measurements(fast)
        fast.decide(make_action(Op.GERMINATE, 0, MLP)[None])
        first.append(fast.banks[SeedKind(0, MLP)].block.values.detach()[0].clone())
        fast.decide(make_action(Op.PRUNE, 0)[None])
        for _ in range(3):
            fast.decide(make_wait_actions(1))
    assert fast.germinations[0].tolist() == [2, 0, 0]
    assert not torch.equal(first[0], first[1])


def test_replace_puts_new_networks_in_and_leaves_the_others_untouched() -> None:
    chosen, newcomers = instances(5), instances(9)[5:7]
    fast, draws = Population(plan(QUICK), networks(chosen)), Draws(chosen)
    for _ in range(6):
        advance(fast, draws, draws.actions(fast.legal_actions()))
    before = [state_of(fast, network) for network in range(5)]
    fast.replace(np.array([3, 1]), networks(newcomers))
    for network in (0, 2, 4):
        assert_same_state(state_of(fast, network), before[network])
    fresh = Population(plan(QUICK), networks(newcomers))
    for place, network in enumerate((3, 1)):
        assert_same_state(state_of(fast, network), state_of(fresh, place))
        assert fast.specs.widths[network].tolist() == list(newcomers[place].widths)
        assert fast.specs.learning_rates[network] == newcomers[place].learning_rate
        assert fast.host_parameters[network] == SUITE.parameters(newcomers[place])
        costs, expected = fast.specs.costs.parameters, fresh.specs.costs.parameters
        assert (costs.blueprints[network] == expected.blueprints[place]).all()
        assert (costs.blends[network] == expected.blends[place]).all()
    assert_aligned(fast)


def test_parameters_are_counted_at_the_live_width() -> None:
    chosen = [one for one in instances(14) if one.widths == (2, 10, 10)][:1]
    fast = Population(plan(QUICK), networks(chosen))
    fast.decide(make_action(Op.GERMINATE, 0, MLP)[None])
    fast.measurements = good_measurements(fast)
    fast.decide(make_action(Op.GERMINATE, 1, TOKEN_CONV)[None])
    narrow, wide = (get(name).cost_at(site).parameters for name, site in [
        ("mlp", replace(fast.execution.sites[0], width=2)), ("token_conv", fast.execution.sites[1])
    ])  # fmt: skip
    everywhere = np.ones((1, 3), np.bool_)
    assert fast.count_seed_parameters(everywhere).tolist() == [narrow + wide]
    assert fast.count_seed_parameters(fast.table.blended).tolist() == [narrow]
    assert fast.count_seed_parameters(~everywhere).tolist() == [0]


def test_names_that_do_not_exist_are_refused() -> None:
    chosen = networks(instances(1))
    with pytest.raises(SlotError, match="no submodule 'layer9'"):
        Population(replace(plan(QUICK), slots=("layer9",)), chosen)
    with pytest.raises(UnknownBlueprintError, match="unknown blueprint 'mpl'"):
        Population(replace(plan(QUICK), blueprints=("mpl",)), chosen)


@pytest.mark.parametrize("minibatches", [1, 7])
def test_a_decision_prepares_its_program_once_however_many_minibatches(
    minibatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[Population] = []

    def counted(fast: Population, *more: Any) -> Any:
        prepared.append(fast)
        return original(fast, *more)

    original = learning.prepare_forward
    monkeypatch.setattr(learning, "prepare_forward", counted)
    chosen = instances(3)
    fast, draws = Population(plan(QUICK), networks(chosen)), Draws(chosen)
    learning.train(fast, [draws.batch() for _ in range(minibatches)])
    assert prepared == [fast]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64])
def test_types_in_which_steps_cannot_be_counted_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=r"dtype is torch\.\w+: choose torch\.float32 or torch\.float64"):
        PopulationConfig(nn.Linear(2, 2), (), (), torch.zeros(1, 2), dtype=dtype)


# A call that fails halfway, wherever that is, leaves every tensor and table as it was.


BLENDED = open_rules(cooldown=(1, 1, 1), min_training_steps=1, blends=tuple(Blend))
TRANSITIONS = 10_000
FAULT_SHARE = 0.4


class OutOfMemory(TorchFunctionMode):
    """The n-th call of torch finds no memory."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self._left = call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Switching gradients on and off needs no memory, and the mode would stay switched for ever.
        self._left -= result is not None
        if self._left == 0 and result is not None:
            raise torch.OutOfMemoryError("injected")
        return result


Everything = dict[str, Any]


def everything(population: Population) -> Everything:
    """Copies of all that a population has."""
    state = population.state
    held = {"pool": state.parameters.flat.values, "steps": state.parameters.flat.steps, **state.parameters.flat.moments}
    held |= {f"buffer.{name}": buffer for name, buffer in state.parameters.host.buffers.items()}
    for key, bank in state.parameters.banks.items():
        held |= {f"{key}.owners": bank.block.owners, f"{key}.values": bank.block.values.detach()}
        held |= {f"{key}.buffer.{name}": buffer for name, buffer in bank.block.buffers.items()}
    tensors = {name: tensor.clone() for name, tensor in held.items()}
    for record in (state.table, state.measurements):
        tensors |= {one.name: torch.from_numpy(getattr(record, one.name).copy()) for one in fields(record)}
    return {
        **tensors,
        "germinations": torch.from_numpy(state.germinations.copy()),
        "networks": list(state.specs.networks),
    }


def assert_unchanged(population: Population, before: Everything) -> None:
    after = everything(population)
    assert after.keys() == before.keys()
    for name, value in before.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(after[name], value, rtol=0, atol=0, equal_nan=True, msg=name)
        else:
            assert all(one is other for one, other in zip(after[name], value, strict=True)), name


@contextmanager
def broken_blueprint(name: str) -> Iterator[None]:
    def broken(*arguments: object) -> None:
        raise SlotError("injected")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(get(name), "__init__", broken)
        yield


def grown(isolation: Isolation = Isolation.NONE) -> tuple[Population, Draws]:
    """Three networks that hold a seed in slot 2, each of another blend."""
    chosen = instances(3)
    population = Population(plan(BLENDED.model_copy(update={"isolation": isolation})), networks(chosen))
    draws = Draws(chosen)
    advance(population, draws, np.stack([make_action(Op.GERMINATE, 2, MLP, blend=blend) for blend in Blend]))
    for _ in range(4):
        advance(population, draws, make_wait_actions(3))
    population.measurements = good_measurements(population)
    return population, draws


Call = Callable[[Population], object]


CALLS: dict[str, Call] = {
    "all of them": lambda held: held.decide(
        np.stack(
            [
                make_action(Op.PRUNE, 2),
                make_action(Op.FOSSILIZE, 2),
                make_action(Op.GERMINATE, 0, MLP, blend=Blend.GATE),
            ]
        )
    ),
    "germinate": lambda held: held.decide(
        np.stack([make_action(Op.GERMINATE, 0, MLP, blend=blend) for blend in Blend])
    ),
    "prune": lambda held: held.decide(np.stack([make_action(Op.PRUNE, 2)] * 3)),
    "replace": lambda held: held.replace(np.array([1]), networks(instances(4)[3:])),
    "roll back": lambda held: roll_back(held, np.array([True, False, True]), Snapshots.from_state(held.state)),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.few(2)
def test_memory_that_runs_out_at_any_point_changes_nothing(name: str, count_figure: Callable[[str, int], None]) -> None:
    population, _ = grown()
    before, faults = everything(population), 0
    while True:
        try:
            with OutOfMemory(faults + 1):
                CALLS[name](population)
        except torch.OutOfMemoryError:
            faults += 1
            assert_unchanged(population, before)
            assert_aligned(population)
        else:
            break
    assert faults >= 10, "every call of torch on the way is to fail once"
    with pytest.raises(AssertionError):
        assert_unchanged(population, before)  # at last it went through
    assert_aligned(population)
    count_figure("single faults injected into germinate, prune, replace and roll back", faults)


def test_a_decision_without_births_and_deaths_needs_no_memory() -> None:
    population, _ = grown()
    held = population.state.parameters
    with OutOfMemory(1):
        population.decide(np.stack([make_action(Op.FOSSILIZE, 2)] * 3))
    assert population.state.parameters is held
    assert_aligned(population)


def test_a_blueprint_that_raises_changes_nothing() -> None:
    population, _ = grown()
    before = everything(population)
    conv = SUITE.blueprints.index("token_conv")
    actions = np.stack(
        [make_action(Op.PRUNE, 2), make_action(Op.GERMINATE, 0, MLP), make_action(Op.GERMINATE, 0, conv)]
    )
    with broken_blueprint("token_conv"), pytest.raises(SlotError, match="injected"):
        population.decide(actions)
    assert_unchanged(population, before)


def test_a_gate_that_refuses_changes_nothing() -> None:
    population, _ = grown()
    measurements = good_measurements(population)
    measurements.contribution[1] = -0.1
    population.measurements = measurements
    before = everything(population)
    with pytest.raises(IllegalActionError, match="environment 1, slot 2 .* gate G5 is closed, HARMFUL"):
        population.decide(np.stack([make_action(Op.FOSSILIZE, 2)] * 3))
    assert_unchanged(population, before)


class RandomCalls:
    """A population that is decided for, rolled back and given new networks, at random."""

    def __init__(self, isolation: Isolation, size: int = 16) -> None:
        chosen = instances(2 * size)
        self.population = Population(plan(BLENDED.model_copy(update={"isolation": isolation})), networks(chosen[:size]))
        self._draws, self._newcomers = Draws(chosen[:size]), networks(chosen[size:])
        self._rng, self._size = np.random.default_rng(1), size
        self._keep(np.ones(size, np.bool_), None)

    def prepare(self) -> None:
        self.population.measurements = uncertain_measurements(self.population, self._rng)

    def call(self) -> Transitions | None:
        """One call, which may fail; None for one that reports no transitions."""
        kind, rows = self._rng.random(), self._rng.random(self._size) < 0.2
        actions = self._draws.actions(self.population.legal_actions())
        fault = int(self._rng.integers(1, 120)) if self._rng.random() < FAULT_SHARE else 0
        with OutOfMemory(fault):
            if kind < 0.1:
                return roll_back(self.population, rows, self._snapshots)
            if kind < 0.15 and rows.any():
                self.population.replace(rows.nonzero()[0], [self._newcomers[row] for row in rows.nonzero()[0]])
                self._replaced = rows
                return None
            return self.population.decide(actions).transitions

    def conclude(self) -> None:
        """After a call that succeeded."""
        self._keep((self._rng.random(self._size) < 0.05) | self._replaced, self._snapshots)

    def _keep(self, rows: NDArray[np.bool_], before: Snapshots | None) -> None:
        state = self.population.state
        self._snapshots = Snapshots.from_state(state) if before is None else before.retake(rows, state)
        self._replaced = np.zeros(self._size, np.bool_)


@pytest.mark.parametrize("isolation", [Isolation.SHADOW, Isolation.NONE])
@pytest.mark.few(1)
def test_the_invariant_holds_after_each_of_10000_transitions_with_random_faults(
    isolation: Isolation, count_figure: Callable[[str, int], None]
) -> None:
    calls = RandomCalls(isolation)
    transitions, faults, seen = 0, 0, set[tuple[int, int]]()
    while transitions < TRANSITIONS // len(Isolation):
        calls.prepare()
        before = everything(calls.population)
        try:
            changes = calls.call()
        except torch.OutOfMemoryError:
            faults += 1
            assert_unchanged(calls.population, before)
        else:
            calls.conclude()
            if changes is not None:
                transitions += len(changes)
                seen |= set(zip(changes.before.tolist(), changes.after.tolist(), strict=True))
        assert_aligned(calls.population)
    assert seen >= {
        (Stage.DORMANT, Stage.GERMINATED),
        (Stage.GERMINATED, Stage.PRUNED),
        (Stage.HOLDING, Stage.FOSSILIZED),
        (Stage.FOSSILIZED, Stage.PRUNED),
        (Stage.RESETTING, Stage.DORMANT),
    }
    assert faults > 100
    count_figure("random transitions after which parameters, optimizer state and table agree", transitions)
    count_figure("random faults among them", faults)
