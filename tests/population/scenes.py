"""Small populations on the token suite, in float64, that tests share."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import nn

from esper.control.rules import Uniform
from esper.engine.gradients import update_gradient_health
from esper.engine.measurements import Evaluation, TrainingReport, update_measurements
from esper.growth.slot import Seed
from esper.lifecycle.actions import Blend, Op, make_action, make_wait_actions
from esper.lifecycle.rules import ActionMasks, Isolation, Rules
from esper.lifecycle.table import SeedMeasurements, SeedTable, Stage
from esper.population.evaluation import evaluate
from esper.population.learning import Batch, train
from esper.population.parameters import SeedKind, StackedParameters
from esper.population.population import Actions, NetworkSpec, Population, PopulationConfig, Strategy
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite
from esper.tasks.suite import OptimizerSettings, Suite
from open_rules import open_rules
from reference_population import ReferencePopulation

SUITE = get_suite("tokens")
BATCH = 6
VALIDATION = 10


def instances(count: int, suite: Suite = SUITE) -> list[Instance]:
    return suite.sample(count, "train", np.random.default_rng(5))


def networks(chosen: Sequence[Instance]) -> list[NetworkSpec]:
    return [NetworkSpec(get_suite(one.suite).host(one), one.widths, one.learning_rate, one.seed) for one in chosen]


def plan(
    rules: Rules,
    optimizer: OptimizerSettings | None = None,
    strategy: str = "stacked",
    dtype: torch.dtype = torch.float64,
    suite: Suite = SUITE,
) -> PopulationConfig:
    return PopulationConfig(
        suite.template(),
        suite.sites,
        suite.blueprints,
        torch.zeros(2, *suite.input_shape),
        optimizer or suite.optimizer,
        rules,
        strategy,
        dtype=dtype,
    )


@dataclass
class Draws:
    """Random batches and actions that follow, for each network, from its instance's seed alone."""

    chosen: Sequence[Instance]
    dtype: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        self._generators = [torch.Generator().manual_seed(one.seed) for one in self.chosen]
        self._controller = Uniform()
        self._state = self._controller.start([one.seed for one in self.chosen])

    def batch(self, size: int = BATCH) -> Batch:
        suite = get_suite(self.chosen[0].suite)
        inputs = [torch.randn(size, *suite.input_shape, generator=g, dtype=self.dtype) for g in self._generators]
        labels = [torch.randint(suite.classes, (size, *suite.label_shape), generator=g) for g in self._generators]
        return Batch(torch.stack(inputs), torch.stack(labels))

    def actions(self, masks: ActionMasks) -> Actions:
        chosen, self._state = self._controller.act(None, masks, self._state)
        return chosen


def parameters_of(seed: Seed) -> nn.Module:
    """The part of a single model's seed of which a population holds a row."""
    return seed.blueprint if seed.blend is Blend.ADD else seed


def kind_of(population: Population, network: int, slot: int) -> SeedKind:
    """What lives there."""
    table = population.table
    return SeedKind(slot, int(table.blueprint[network, slot]), Blend(table.blend[network, slot]))


def seed_values(population: Population, network: int, slot: int) -> torch.Tensor | None:
    """The flat row of the seed in that place, or None."""
    for kind, bank in population.banks.items():
        rows = (bank.block.owners == network).nonzero()
        if kind.slot == slot and len(rows):
            return bank.block.values.detach()[rows[0, 0]]
    return None


def both(chosen: Sequence[Instance], shared: PopulationConfig) -> tuple[Population, ReferencePopulation]:
    return Population(shared, networks(chosen)), ReferencePopulation(shared, networks(chosen))


def record_measurements(population: Population, report: TrainingReport, evaluation: Evaluation) -> None:
    """Make what was measured the measurements for the next decision, as the engine does."""
    measurements = update_gradient_health(population.measurements, report.health, population.config.gradient_health)
    population.measurements = update_measurements(population.table, measurements, evaluation)


def advance(population: Population, draws: Draws, actions: Actions, batches: int = 2) -> None:
    """One decision, its training and its measurement."""
    population.decide(actions)
    report = train(population, [draws.batch() for _ in range(batches)])
    record_measurements(population, report, evaluate(population, draws.batch(VALIDATION)))


def advance_both(
    fast: Population, slow: ReferencePopulation, actions: Actions, batches: Sequence[Batch], held_back: Batch
) -> Evaluation:
    """One decision of both and its training, and the measurement of the fast one, by which both decide next."""
    slow.measurements = fast.measurements
    fast.decide(actions)
    slow.decide(actions)
    report = train(fast, batches)
    slow.train(batches)
    found = evaluate(fast, held_back)
    record_measurements(fast, report, found)
    return found


def assert_equal_parameters(fast: Population, slow: ReferencePopulation, tolerance: float = 1e-9) -> None:
    """Hosts with their buffers, and seeds."""

    def assert_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(actual.detach(), expected, rtol=tolerance, atol=tolerance)

    for network, model in enumerate(slow.models):
        assert_equal(fast.host.values[network], fast.host.layout.flatten_module(model.host))
        for name, buffer in model.host.named_buffers():
            assert_equal(fast.host.buffers[name][network], buffer)
    found = {(owner, kind.slot) for kind, bank in fast.banks.items() for owner in bank.block.owners.tolist()}
    assert found == slow.seeds.keys()
    for kind, bank in fast.banks.items():
        for row, owner in enumerate(bank.block.owners.tolist()):
            seed = parameters_of(slow.seeds[owner, kind.slot])
            assert_equal(bank.block.values[row], bank.block.layout.flatten_module(seed))


def good_measurements(population: Population) -> SeedMeasurements:
    """Everything a gate may ask for."""
    shape = population.table.stage.shape
    everywhere = np.ones(shape, np.bool_)
    contribution = np.ones(shape, np.float32)
    return replace(
        SeedMeasurements.none(*shape), probed=everywhere, gradient_healthy=everywhere, contribution=contribution
    )


def uncertain_measurements(fast: Population, rng: np.random.Generator) -> SeedMeasurements:
    """Some probes fail, some seeds are ill, harmful or unmeasured."""
    shape = fast.table.stage.shape
    contribution = rng.normal(0.5, 1.0, shape).astype(np.float32)
    contribution[rng.random(shape) < 0.2] = np.nan
    ages = rng.integers(0, 4, shape).astype(np.int16)
    probed, healthy = rng.random(shape) < 0.8, rng.random(shape) < 0.8
    return replace(
        SeedMeasurements.none(*shape),
        probed=probed,
        gradient_healthy=healthy,
        contribution=contribution,
        contribution_age=ages,
    )


def assert_aligned(fast: Population) -> None:
    """Rows of parameters == rows of optimizer state == seeds of the table, owner by owner."""
    seeds: list[tuple[int, ...]] = []
    for kind, bank in fast.banks.items():
        rows = len(bank.block.owners)
        assert rows > 0, "an empty bank is kept"
        stacked = [bank.block.values, bank.block.steps, bank.block.learning_rates, *bank.block.moments.values()]
        assert all(len(tensor) == rows for tensor in [*stacked, *bank.block.buffers.values()])
        seeds += [(owner, *kind) for owner in bank.block.owners.tolist()]
    owned: list[list[int]] = np.argwhere(fast.table.owning).tolist()
    assert sorted(seeds) == sorted((network, *kind_of(fast, network, slot)) for network, slot in owned)
    assert fast.host.owners.tolist() == list(range(fast.size))
    assert all(len(tensor) == fast.size for tensor in [fast.host.values, fast.host.steps, *fast.host.moments.values()])


State = dict[str, torch.Tensor]


def state_of(population: Population, network: int) -> State:
    """All there is of one network: parameters, optimizer state, table, measurements."""
    state = {f"host.{name}": tensor for name, tensor in _row(population.host, network).items()}
    for name, buffer in population.host.buffers.items():
        state[f"buffer.{name}"] = buffer[network].clone()
    for kind, bank in population.banks.items():
        for row in (bank.block.owners == network).nonzero().flatten().tolist():
            seed = {
                **_row(bank.block, row),
                **{name: buffer[row].clone() for name, buffer in bank.block.buffers.items()},
            }
            state |= {f"seed.{kind.slot}.{kind.blueprint}.{name}": tensor for name, tensor in seed.items()}
    for kind, record in ((SeedTable, population.table), (SeedMeasurements, population.measurements)):
        for field in fields(kind):
            state[f"{kind.__name__}.{field.name}"] = torch.from_numpy(getattr(record, field.name)[network].copy())
    state["germinations"] = torch.from_numpy(population.germinations[network].copy())
    return state


def _row(block: StackedParameters, row: int) -> State:
    named = {"values": block.values.detach(), "steps": block.steps, "rate": block.learning_rates, **block.moments}
    return {name: tensor[row].clone() for name, tensor in named.items()}


def assert_same_state(actual: State, expected: State, tolerance: float = 0.0) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            actual[name],
            tensor,
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
            msg=lambda message, name=name: f"{name}: {message}",
        )


def grown(isolation: Isolation, strategy: Strategy) -> tuple[Population, ReferencePopulation, Batch]:
    """Networks with seeds in many stages and of all blends, fast and as separate modules, and data to measure on."""
    chosen = instances(10)
    rules = open_rules(
        isolation=isolation, cooldown=(1, 1, 1), min_training_steps=1, harm_tolerance=1.0, blends=tuple(Blend)
    )
    fast, slow = both(chosen, plan(rules, OptimizerSettings(), strategy))
    draws = Draws(chosen)
    for _ in range(7):
        actions, batches = draws.actions(fast.legal_actions()), [draws.batch() for _ in range(2)]
        batch = draws.batch(VALIDATION)
        advance_both(fast, slow, actions, batches, batch)
    assert {kind.blend for kind in fast.banks} == {*Blend}
    assert len({*np.unique(fast.table.stage)} & {Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED}) >= 2
    return fast, slow, batch


def draw_small(examples: int, seed: int, networks: int = 3) -> Batch:
    """Random examples for networks of `make_small_population`."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(networks, examples, 4, generator=generator, dtype=torch.float64)
    return Batch(inputs, torch.randint(3, (networks, examples), generator=generator))


def grow_small(shared: PopulationConfig, hosts: list[NetworkSpec]) -> tuple[Population, ReferencePopulation]:
    """Three networks with five seeds in two slots that have learned, fast and as separate modules."""
    fast, slow = Population(shared, hosts), ReferencePopulation(shared, hosts)
    plantings = [
        np.stack([make_action(Op.GERMINATE, 0, 0), make_action(Op.GERMINATE, 1, 1), make_action(Op.GERMINATE, 0, 2)]),
        np.stack([make_action(Op.GERMINATE, 1, 2), make_action(Op.GERMINATE, 0, 0), make_wait_actions(1)[0]]),
    ]
    for actions in [*plantings, make_wait_actions(3), make_wait_actions(3)]:
        for population in (fast, slow):
            population.measurements = good_measurements(fast)
            population.decide(actions)
        batches = [draw_small(8, seed) for seed in range(5)]
        train(fast, batches)
        slow.train(batches)
    return fast, slow
