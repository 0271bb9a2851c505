"""Hidden units in populations: between two layers of many hosts they grow as in each host alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from esper.control.rules import Uniform
from esper.engine.budget import Budget
from esper.errors import ConfigError, SlotError
from esper.growth.blueprints.registry import Context, get, names
from esper.lifecycle.actions import Blend, Op, make_action, make_wait_actions
from esper.lifecycle.rules import Isolation
from esper.lifecycle.table import Stage
from esper.population.backend import Snapshots, roll_back
from esper.population.evaluation import evaluate
from esper.population.execution import Execution
from esper.population.forward import select_blended
from esper.population.learning import Batch, train
from esper.population.parameters import SeedKind
from esper.population.population import NetworkSpec, Population, PopulationConfig, Strategy
from esper.population.shapley import attribute_networks
from esper.tasks.datasets import ConvHost, MlpHost
from open_rules import open_rules
from population.scenes import (
    advance_both,
    assert_aligned,
    assert_equal_parameters,
    good_measurements,
    state_of,
)
from population.test_counterfactuals import assert_same, separately
from population.test_promise import each_loss, measure
from population.test_shapley_networks import assert_as_by_hand
from reference_population import ReferencePopulation

TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}
FEATURES, CLASSES, EXAMPLES = 6, 3, 10
VECTORS, SPATIAL = ("mlp", "units_3", "input_skip", "units"), ("conv1x1", "units_3", "norm")


class Residual(nn.Module):
    """``head(x + down(act(up(x))))``."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, width)
        self.up, self.act, self.down = nn.Linear(width, hidden, bias=False), nn.SiLU(), nn.Linear(hidden, width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        x = torch.tanh(self.embed(inputs))
        return self.head(x + self.down(self.act(self.up(x))))


def plain(first: int, second: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, first), nn.ReLU(), nn.Linear(first, second), nn.Tanh(), nn.Linear(second, CLASSES)
    )


def normalised(first: int, second: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, first),
        nn.GELU(),
        nn.Linear(first, second),
        nn.LayerNorm(second),
        nn.Linear(second, CLASSES),
    )


def images(first: int, second: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, first, 3, padding=1, bias=False),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(second, CLASSES),
    )


def forced(*widths: int) -> torch.Generator:
    return torch.Generator().manual_seed(sum(widths))


@dataclass(frozen=True)
class Case:
    """Hosts of several widths, and what may grow on them."""

    build: Callable[..., nn.Module]
    widths: Sequence[tuple[int, ...]]
    """Arguments of ``build``; the first are those of the template."""
    slots: tuple[str | tuple[str, ...], ...]
    live: Callable[..., tuple[int, ...]]
    """Widths at the slots, from the same arguments."""
    input_shape: tuple[int, ...] = (FEATURES,)
    blueprints: tuple[str, ...] = VECTORS


SEVERAL = ((17, 4), (3, 4), (8, 2), (17, 4))
CASES = {
    "stackable": Case(
        lambda *widths: MlpHost(FEATURES, widths, CLASSES, forced(*widths)),
        SEVERAL,
        ("layer0", ("layer0.0", "layer0.1", "layer1.0"), "layer1", ("layer1.0", "layer1.1", "head")),
        lambda first, second: (first, second, second, CLASSES),
    ),
    "merged": Case(
        plain,
        SEVERAL,
        ("1", ("0", "1", "2"), "3", ("2", "3", "4")),
        lambda first, second: (first, second, second, CLASSES),
    ),
    "mapped": Case(
        normalised,
        ((17, 4), (3, 4), (4, 4)),
        ("1", ("0", "1", "2"), "3"),
        lambda first, second: (first, second, second),
    ),
    "residual": Case(Residual, SEVERAL, ("embed", ("up", "act", "down")), lambda width, _: (width, width)),
    "signals": Case(
        lambda *widths: ConvHost(widths, CLASSES, forced(*widths)),
        ((4, 3, 2), (2, 3, 1), (4, 1, 2)),
        ("layer0", ("layer0.0", "layer0.1", "layer1.0"), ("layer1.0", "layer1.1", "layer2.0")),
        lambda first, second, third: (first, second, third),
        (1, 14),
        SPATIAL,
    ),
    "images": Case(
        images,
        ((4, 3), (2, 3), (4, 1)),
        ("1", ("0", "1", "2", "3")),
        lambda first, second: (first, second),
        (1, 8, 8),
        SPATIAL,
    ),
}
every_case = pytest.mark.parametrize("name", CASES)


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def batch_of(case: Case, seed: int) -> Batch:
    networks = len(case.widths)
    labels = torch.randint(CLASSES, (networks, EXAMPLES), generator=torch.Generator().manual_seed(seed))
    return Batch(draw(networks, EXAMPLES, *case.input_shape, seed=seed), labels)


def configure(case: Case, strategy: Strategy = "stacked") -> tuple[PopulationConfig, list[NetworkSpec]]:
    hosts = [case.build(*widths) for widths in case.widths]
    for seed, host in enumerate(hosts):
        with torch.no_grad():
            for parameter in host.parameters():
                parameter.copy_(draw(*parameter.shape, seed=seed) / 2)
    rules = open_rules(isolation=Isolation.SHADOW, cooldown=(1, 1, 1), min_training_steps=1, harm_tolerance=1.0)
    config = PopulationConfig(
        case.build(*case.widths[0]),
        case.slots,
        case.blueprints,
        torch.zeros(2, *case.input_shape),
        rules=rules,
        strategy=strategy,
        dtype=torch.float64,
    )
    networks = [
        NetworkSpec(host, case.live(*widths), 0.01 * (1 + seed), seed)
        for seed, (host, widths) in enumerate(zip(hosts, case.widths, strict=True))
    ]
    return config, networks


def pairs_of(case: Case) -> list[int]:
    return [slot for slot, place in enumerate(case.slots) if not isinstance(place, str)]


def is_unit(case: Case, kind: SeedKind) -> bool:
    return case.blueprints[kind.blueprint].startswith("units")


def grow(name: str, strategy: Strategy, decisions: int = 8) -> tuple[Population, ReferencePopulation, Batch]:
    """Networks with units and other seeds, fast and as separate modules, equal after every decision."""
    case = CASES[name]
    config, networks = configure(case, strategy)
    fast, slow = Population(config, networks), ReferencePopulation(config, networks)
    controller = Uniform()
    state = controller.start(list(range(len(networks))))
    grown = set[SeedKind]()
    for decision in range(decisions):
        actions, state = controller.act(None, fast.legal_actions(), state)
        batches = [batch_of(case, 10 * decision + number) for number in range(2)]
        advance_both(fast, slow, actions, batches, batch_of(case, 1000 + decision))
        assert_equal_parameters(fast, slow)
        grown |= fast.banks.keys()
    assert {kind.slot for kind in grown if is_unit(case, kind)} == {*pairs_of(case)}, "units between all layers"
    assert not all(is_unit(case, kind) for kind in grown), "and other seeds"
    return fast, slow, batch_of(case, 2000)


@every_case
@pytest.mark.parametrize("strategy", ["stacked", "looped"])
@pytest.mark.few(2)
def test_networks_that_grow_units_equal_a_loop_over_models_in_all_that_is_measured(
    name: str, strategy: Strategy
) -> None:
    fast, slow, batch = grow(name, strategy)
    assert fast.execution.needs_loop is False
    # What more seeds promise.
    found, offers = measure(fast, batch), fast.config.blueprints
    names, compared = [place if isinstance(place, str) else place[-1] for place in CASES[name].slots], set[str]()
    for network, model in enumerate(slow.models):
        for row in model.look(each_loss, [(batch.inputs[network], batch.labels[network])], draws=1).rows:
            if row.blueprint in offers:
                place = network, names.index(row.slot), offers.index(row.blueprint)
                assert found.fitted[place] == pytest.approx(row.promise, abs=1e-7)
                assert found.held_out[place] == pytest.approx(row.promise_held_out, abs=1e-7)
                compared.add(row.blueprint)
    assert "units_3" in compared
    # Outputs with and without each seed: computed from a shared prefix, and from replicas.
    expected = separately(slow, fast.table, batch)
    assert fast.shares_prefixes == (name != "residual")
    assert_same(evaluate(fast, batch), expected)
    fast.shares_prefixes = False
    assert_same(evaluate(fast, batch), expected)


@pytest.mark.landing
@every_case
def test_earnings_are_those_of_separate_passes(name: str) -> None:
    fast, slow, batch = grow(name, "stacked")
    for shared in (fast.shares_prefixes, False):
        fast.shares_prefixes = shared
        found = attribute_networks(fast, batch, np.random.default_rng(0))
        assert_as_by_hand(found, slow, batch, select_blended(fast))


def test_networks_are_the_same_however_many_networks_and_examples_are_computed_at_once() -> None:
    config, networks = configure(CASES["merged"])
    config = replace(config, rules=open_rules(isolation=Isolation.NONE))
    populations = [
        Population(one, networks)
        for one in (config, replace(config, networks_per_pass=3), replace(config, examples_per_pass=4))
    ]
    plant = [make_action(Op.GERMINATE, slot, 1) for slot in (1, 1, 3, 1)]
    for population in populations:
        population.decide(np.stack(plant))
        for step in range(3):
            train(population, [batch_of(CASES["merged"], step)])
            population.measurements = good_measurements(population)
            population.decide(make_wait_actions(4))
    first, *others = populations
    assert first.table.blended.any()
    batch = batch_of(CASES["merged"], 9)
    for other in others:
        torch.testing.assert_close(other.flat.values, first.flat.values, **TOLERANCE)
        assert_same(evaluate(other, batch), evaluate(first, batch))
        np.testing.assert_allclose(measure(other, batch).fitted, measure(first, batch).fitted, rtol=1e-9)


@every_case
def test_units_cost_what_they_have_and_fit_the_layers_of_each_network(name: str) -> None:
    case = CASES[name]
    config, networks = configure(case)
    population = Population(config, networks)
    for network, spec in enumerate(networks):
        for slot, index in np.argwhere(population.specs.compatible[network]).tolist():
            seed = population.specs.create_seed(network, SeedKind(slot, index), 0)
            cost = population.specs.costs.parameters.blueprints[network, slot, index]
            assert cost == sum(parameter.numel() for parameter in seed.parameters())
            if is_unit(case, SeedKind(slot, index)):
                assert slot in pairs_of(case)
                first = spec.host.get_submodule(case.slots[slot][0])
                units = {"units_3": 3, "units": max(len(first.weight) // 8, 1)}[case.blueprints[index]]
                assert seed.first.weight.shape == (units, *first.weight.shape[1:])
    assert population.specs.compatible[:, pairs_of(case), case.blueprints.index("units_3")].all()


def test_a_budget_counts_them() -> None:
    case = CASES["merged"]
    config, networks = configure(case)
    units = case.blueprints.index("units_3")
    # Of the widest network in the first pair: 3 rows of 6 with a bias, 3 columns of 4.
    full, short = (Population(replace(config, budget=Budget(parameters=cap)), networks) for cap in (33, 32))
    assert full.specs.costs.parameters.blueprints[0, 1, units] == 33
    assert full.legal_actions().blueprint[0, 1, units]
    assert not short.legal_actions().blueprint[0, 1, units]


def test_a_rolled_back_network_has_its_fossil_units_as_they_were() -> None:
    case = CASES["stackable"]
    config, networks = configure(case)
    fossil = SeedKind(1, case.blueprints.index("units_3"))
    population = Population(config, [one._replace(fossils=(fossil,)) for one in networks])
    assert (population.table.stage[:, 1] == Stage.FOSSILIZED).all()
    train(population, [batch_of(case, 0)])
    kept, snapshots = state_of(population, 2), Snapshots.from_state(population.state)
    population.decide(np.stack([make_action(Op.GERMINATE, 3, fossil.blueprint)] * 4))
    train(population, [batch_of(case, 1)])
    roll_back(population, np.array([False, False, True, False]), snapshots)
    restored = state_of(population, 2)
    assert torch.equal(restored["host.values"], kept["host.values"])
    assert torch.equal(restored["seed.1.1.values"], kept["seed.1.1.values"])
    assert not any(key.startswith("seed.3") for key in restored)
    assert_aligned(population)


def test_what_a_population_cannot_do_with_hidden_units_is_refused() -> None:
    config, networks = configure(CASES["merged"])

    def refused(problem: str, error: type[Exception] = SlotError, **changes: object) -> None:
        with pytest.raises(error, match=problem):
            Population(replace(config, **changes), networks)

    refused("'units_3' grows between two layers, and no site names such", slots=("1", "3"))
    refused("no hidden units are on offer between the modules", blueprints=("mlp",))
    refused("is too short: name the layer", slots=("1", ("2",)))
    refused("no submodule '7'", slots=(("0", "1", "7"),))
    refused("'units_3' only adds", ConfigError, rules=open_rules(blends=tuple(Blend)))


@pytest.mark.parametrize("name", [name for name in names() if get(name).context in (Context.LAYER, Context.CALL)])
def test_what_is_made_for_one_layer_is_refused(name: str) -> None:
    config, networks = configure(CASES["merged"])
    with pytest.raises(SlotError, match=f"'{name}' is made for a layer of a single model"):
        Population(replace(config, blueprints=(*config.blueprints, name)), networks)


@pytest.mark.parametrize(
    ("between", "problem"),
    [
        (nn.Dropout(), "draws random numbers"),
        (nn.RReLU(), "draws random numbers"),
        (nn.BatchNorm1d(5), "'1' .BatchNorm1d. has parameters or buffers"),
        (nn.LayerNorm(5), "has parameters or buffers"),
    ],
)
def test_what_lies_between_the_layers_may_neither_draw_nor_keep_anything(between: nn.Module, problem: str) -> None:
    host = nn.Sequential(nn.Linear(4, 5), between, nn.Linear(5, 3))
    Execution(host, ("1",), torch.zeros(2, 4))
    with pytest.raises(SlotError, match=f"no units can be added between '0' and '2'.*{problem}"):
        Execution(host, (("0", "1", "2"),), torch.zeros(2, 4))
