"""Populations do what separate modules with torch.optim do: stacked, with every blend, with fossils at the start."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.engine.budget import Budget
from esper.engine.governor import Governor, GovernorSettings
from esper.errors import IllegalActionError, SlotError
from esper.growth.blueprints.registry import get
from esper.growth.site import Site
from esper.growth.slot import Seed
from esper.lifecycle.actions import Blend, Op, make_action, make_wait_actions
from esper.lifecycle.rules import Isolation, Rules
from esper.lifecycle.table import Stage
from esper.numerics.random_streams import module_generator
from esper.population.backend import PopulationBackend
from esper.population.evaluation import evaluate
from esper.population.learning import start_training, train
from esper.population.parameters import SeedKind
from esper.population.population import STRATEGIES, Fossils, NetworkSpec, Population, Strategy
from esper.tasks.suite import OptimizerSettings
from open_rules import open_rules
from population.scenes import (
    SUITE,
    VALIDATION,
    Draws,
    advance_both,
    assert_aligned,
    assert_equal_parameters,
    assert_same_state,
    both,
    good_measurements,
    grown,
    instances,
    networks,
    parameters_of,
    plan,
    seed_values,
    state_of,
)

# The stacked population does what a plain loop over separate modules with torch.optim does.


TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}
DECISIONS, BATCHES = 10, 5
OPTIMIZERS = [
    OptimizerSettings(name="adamw", weight_decay=0.01),
    OptimizerSettings(name="sgd", momentum=0.9, weight_decay=0.01),
    OptimizerSettings(name="adamw", clip_norm=0.5),
]


@pytest.mark.parametrize("isolation", list(Isolation))
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["adamw", "sgd", "clipped"])
@pytest.mark.parametrize("strategy", ["stacked", "looped"])
@pytest.mark.few(1)
def test_fifty_steps_equal_a_loop_over_modules(
    isolation: Isolation, optimizer: OptimizerSettings, strategy: str
) -> None:
    chosen = instances(14)
    rules = open_rules(
        isolation=isolation, cooldown=(1, 1, 1), min_training_steps=1, harm_tolerance=1.0, blends=tuple(Blend)
    )
    fast, slow = both(chosen, plan(rules, optimizer, strategy))
    draws = Draws(chosen)
    stages: set[int] = set()
    for _ in range(DECISIONS):
        actions, batches = draws.actions(fast.legal_actions()), [draws.batch() for _ in range(BATCHES)]
        advance_both(fast, slow, actions, batches, draws.batch(VALIDATION))
        assert_equal_parameters(fast, slow)
        stages |= set(np.unique(fast.table.stage).tolist())
    assert {Stage.GERMINATED, Stage.BLENDING, Stage.HOLDING, Stage.PRUNED} <= stages
    assert (Stage.TRAINING in stages) == (isolation is not Isolation.NONE)
    assert len({kind.blueprint for kind in fast.banks}) >= 3, "the test means to mix blueprints"
    assert {kind.blend for kind in fast.banks} == {*Blend}, "and blends"


# Blends are real in populations: they compute, learn and cost what they do in single models, and differ.


MLP = SUITE.blueprints.index("mlp")
SLOT, COUNT = 1, 3


def rules(isolation: Isolation = Isolation.NONE) -> Rules:
    return Rules(isolation=isolation, operations=tuple(Op), blends=tuple(Blend), alpha_targets=(0.5, 1.0))


def with_seeds(blend: Blend, isolation: Isolation = Isolation.NONE, strategy: Strategy = "stacked") -> Population:
    """All networks have the same kind of seed, which has learned for three decisions."""
    chosen = instances(COUNT)
    population, draws = Population(plan(rules(isolation), strategy=strategy), networks(chosen)), Draws(chosen)
    for actions in ([make_action(Op.GERMINATE, SLOT, MLP, blend=blend)] * COUNT, *[make_wait_actions(COUNT)] * 3):
        population.measurements = good_measurements(population)
        population.decide(np.stack(actions))
        train(population, [draws.batch() for _ in range(3)])
    return population


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("isolation", list(Isolation))
def test_no_blend_is_computed_as_another(isolation: Isolation, strategy: Strategy) -> None:
    found = {blend: with_seeds(blend, isolation, strategy) for blend in Blend}
    held_back = Draws(instances(COUNT)).batch(VALIDATION)
    for one, other in combinations(found.values(), 2):
        ours, theirs = (evaluate(population, held_back) for population in (one, other))
        assert (np.abs(ours.loss_contribution - theirs.loss_contribution)[:, SLOT] > 1e-9).all()
        if isolation is Isolation.NONE:
            assert (np.abs(ours.loss - theirs.loss) > 1e-9).all()
            assert (one.host.values != other.host.values).any(dim=1).all()


@pytest.mark.parametrize("isolation", list(Isolation))
def test_gates_learn_with_their_seeds(isolation: Isolation) -> None:
    population = with_seeds(Blend.GATE, isolation)
    bank = population.banks[SeedKind(SLOT, MLP, Blend.GATE)]
    for name in ("gate.weight", "gate.bias"):
        assert (bank.block.parameters[name].abs().amax(1) > 0).all(), name
    assert bank.block.steps.tolist() == [9] * COUNT
    assert_aligned(population)


def test_a_new_alpha_leaves_a_seed_its_blend_and_all_it_has_learned() -> None:
    for blend in Blend:
        population = with_seeds(blend)
        before = state_of(population, 0)
        population.measurements = good_measurements(population)
        population.decide(np.stack([make_action(Op.SET_ALPHA, SLOT, alpha_target=0.5)] * COUNT))
        assert population.table.blend[:, SLOT].tolist() == [blend] * COUNT
        after = state_of(population, 0)
        for name in before:
            if name.startswith("seed."):
                assert torch.equal(after[name], before[name]), name


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("isolation", list(Isolation))
def test_seeds_cost_what_they_are_made_of(isolation: Isolation, strategy: Strategy) -> None:
    """By the modules that the same seeds are in separate models."""
    fast, slow, _ = grown(isolation, strategy)
    costs = fast.specs.costs
    parameters, flops, memory = (cost.resident(fast.table) for cost in (costs.parameters, costs.flops, costs.memory))
    for network, slot in np.ndindex(*fast.table.stage.shape):
        seed = slow.seeds.get((network, slot))
        own = 0 if seed is None else sum(parameter.numel() for parameter in seed.parameters())
        assert parameters[network, slot] == own
        assert memory[network, slot] == own * 8 * 4  # float64; value, gradient and two moments
        site = slow.models[network].slots[SUITE.sites[slot]].site
        assert flops[network, slot] == (0 if seed is None else seed.flops_at(site))
    assert fast.count_seed_parameters(fast.table.owning).tolist() == parameters.sum(1).tolist()


@pytest.mark.parametrize("what", ["parameters", "flops", "memory"])
@pytest.mark.parametrize("blend", Blend)
def test_budgets_have_room_for_what_the_dearest_blend_needs(blend: Blend, what: str) -> None:
    free = with_seeds(blend)
    price = int(getattr(free.specs.costs, what).resident(free.table)[0, SLOT])
    for cap, fits in ((price, True), (price - 1, False)):
        allowed = rules().model_copy(update={"blends": (Blend.ADD, blend)})
        capped = replace(plan(allowed), budget=Budget(**{what: cap}))
        population = Population(capped, networks(instances(COUNT)))
        assert population.legal_actions().blueprint[0, SLOT, MLP] == fits
        if fits:
            population.decide(
                np.stack([make_action(Op.GERMINATE, SLOT, MLP, blend=blend), *make_wait_actions(COUNT - 1)])
            )
            assert population.budget_left[0] == 0.0


# A network that starts with fossils is trained as a plain network of that shape would be, from scratch.


FEW, STEPS = 3, 4
SHAPES: Sequence[Fossils] = [
    (
        SeedKind(0, SUITE.blueprints.index("token_mix"), Blend.GATE),
        SeedKind(2, SUITE.blueprints.index("input_skip"), Blend.MULTIPLY),
    ),
    (),
    (SeedKind(1, SUITE.blueprints.index("mlp")),),
    (
        SeedKind(0, SUITE.blueprints.index("attention")),
        SeedKind(1, SUITE.blueprints.index("norm"), Blend.GATE),
        SeedKind(2, 0, Blend.MULTIPLY),
    ),
]


def given(shapes: Sequence[Fossils] = SHAPES) -> list[NetworkSpec]:
    starts = networks(instances(len(shapes)))
    return [start._replace(fossils=shape) for start, shape in zip(starts, shapes, strict=True)]


class Plain(nn.Module):
    """The host with its seeds for good, by hooks and nothing else."""

    def __init__(self, network: NetworkSpec, sites: Sequence[Site]) -> None:
        super().__init__()
        self.host = copy.deepcopy(network.host).double()
        self.seeds = nn.ModuleDict()
        for slot, kind, blend in network.fossils:
            site = replace(sites[slot], width=network.widths[slot])
            blueprint = get(SUITE.blueprints[kind])(site, module_generator(network.seed, slot, 0))
            seed = Seed(blueprint, site, blend).double()
            seed.alpha.fill_(1.0)
            self.seeds[str(slot)] = seed
            self.host.get_submodule(SUITE.sites[slot]).register_forward_hook(
                lambda _module, _inputs, output, seed=seed: seed(output, self.inputs)
            )

    def forward(self, inputs: Tensor) -> Tensor:
        self.inputs = inputs
        return self.host(inputs)


@pytest.mark.parametrize("strategy", ["stacked", "looped"])
def test_it_learns_as_a_plain_network_from_scratch(strategy: Strategy) -> None:
    starts = given()
    population = Population(plan(open_rules(), strategy=strategy), starts)
    models = [Plain(one, population.execution.sites) for one in starts]
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=one.learning_rate, betas=SUITE.optimizer.betas, weight_decay=0.0)
        for model, one in zip(models, starts, strict=True)
    ]
    draws = Draws(instances(len(starts)))
    for _ in range(FEW):
        population.decide(make_wait_actions(len(starts)))
        batches = [draws.batch() for _ in range(STEPS)]
        train(population, batches)
        for network, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            for batch in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(batch.inputs[network]), batch.labels[network]).backward()
                optimizer.step()
    for network, model in enumerate(models):
        torch.testing.assert_close(
            population.host.values.detach()[network], population.host.layout.flatten_module(model.host), **TOLERANCE
        )
        for kind in starts[network].fossils:
            row, seed = seed_values(population, network, kind.slot), model.seeds[str(kind.slot)]
            assert row is not None
            assert isinstance(seed, Seed)
            shape = population.banks[kind].block.layout
            torch.testing.assert_close(row, shape.flatten_module(parameters_of(seed)), **TOLERANCE)


def test_rows_belong_to_fossils_and_replaced_networks_take_theirs_along() -> None:
    population = Population(plan(open_rules()), given())
    assert_aligned(population)
    assert population.germinations.tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 1]]
    before = state_of(population, 2)
    population.replace(np.array([0, 3]), [given()[1], given()[0]])
    assert_aligned(population)
    assert (population.table.stage == Stage.FOSSILIZED).sum(1).tolist() == [0, 0, 1, 2]
    assert_same_state(state_of(population, 2), before)


def test_a_start_that_cannot_be_made_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    population = Population(plan(open_rules()), given())
    state = population.state

    def broken(*arguments: object) -> None:
        raise SlotError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(get("token_mix"), "__init__", broken)
        with pytest.raises(SlotError, match="injected"):
            population.replace(np.array([1]), given()[:1])
    assert population.state is state
    unfit = given()[1]._replace(fossils=(SeedKind(0, 0),))
    monkeypatch.setattr(get(SUITE.blueprints[0]), "supports", classmethod(lambda cls, site: False))
    with pytest.raises(IllegalActionError, match="cannot start with blueprint 0 in slot 0"):
        population.replace(np.array([1]), [unfit])
    assert population.state is state


def test_a_rollback_keeps_the_fossils_of_the_start() -> None:
    """Trouble in the very first step: the good state to return to is the start itself."""
    population = Population(plan(open_rules()), given())
    start = state_of(population, 0)
    draws = Draws(instances(len(SHAPES)))
    backend = PopulationBackend(population, SUITE, draws.batch(VALIDATION), draws.batch)
    governor = Governor(backend, GovernorSettings())
    population.decide(make_wait_actions(len(SHAPES)))
    batch = draws.batch()
    batch.inputs[0] = torch.nan
    everywhere = np.ones(population.table.stage.shape, np.bool_)
    training, found = backend.start_measurement(
        start_training(population, [batch]), everywhere, check_finite=True
    ).fetch()
    assert found.skill is not None
    assert found.finite is not None
    found = governor.check(training.loss, found.skill, found.finite, None, np.ones(len(SHAPES), np.bool_))
    assert found.rows.tolist() == [True, False, False, False]
    after = state_of(population, 0)
    assert (population.table.stage[0] == Stage.FOSSILIZED).tolist() == [True, False, True]
    values = [name for name in start if name.endswith("values")]
    assert_same_state({name: after[name] for name in values}, {name: start[name] for name in values})
