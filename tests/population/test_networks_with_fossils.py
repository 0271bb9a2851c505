"""A network that starts with fossils is trained as a plain network of that shape would be, from scratch."""

import copy
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.engine.governor import Governor, GovernorSettings
from esper.errors import IllegalActionError, SlotError
from esper.growth.blueprints.registry import get
from esper.growth.seed import Seed
from esper.growth.site import Site
from esper.lifecycle.actions import Blend, make_wait_actions
from esper.lifecycle.stages import Stage
from esper.numerics.random_streams import module_generator
from esper.population.backend import PopulationBackend
from esper.population.learning import start_training, train
from esper.population.parameters import SeedKind
from esper.population.population import Fossils, NetworkSpec, Population, Strategy
from open_rules import open_rules
from population.scenes import (
    SUITE,
    VALIDATION,
    Draws,
    assert_aligned,
    assert_same_state,
    instances,
    networks,
    parameters_of,
    plan,
    seed_values,
    state_of,
)

TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}
DECISIONS, BATCHES = 3, 4
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
            site = sites[slot].with_width(network.widths[slot])
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
    for _ in range(DECISIONS):
        population.decide(make_wait_actions(len(starts)))
        batches = [draws.batch() for _ in range(BATCHES)]
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
    measured = backend.start_measurement(start_training(population, [batch]), everywhere, check_finite=True).fetch()
    found = governor.check(
        measured.training.loss, measured.skill, measured.finite, None, np.ones(len(SHAPES), np.bool_)
    )
    assert found.rows.tolist() == [True, False, False, False]
    after = state_of(population, 0)
    assert (population.table.stage[0] == Stage.FOSSILIZED).tolist() == [True, False, True]
    values = [name for name in start if name.endswith("values")]
    assert_same_state({name: after[name] for name in values}, {name: start[name] for name in values})
