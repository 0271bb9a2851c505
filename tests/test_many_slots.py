"""Digits for hosts of a hundred narrow layers, with a slot behind each, half of which hold a fossil from the start."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise, product
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

import esper
from control.situations import NO_PRIOR
from esper import Grower, GrowingModel
from esper.control.controller import Controller
from esper.control.learned import LearnedController
from esper.control.policy import Policy, PolicySettings
from esper.control.rules import Heuristic, HeuristicSettings, Never, Planting, Schedule
from esper.engine.budget import Charge, Cost, Costs
from esper.engine.gradients import HealthTable
from esper.engine.history import History
from esper.engine.measurements import TrainingReport
from esper.engine.observation import (
    BLUEPRINT_FEATURES,
    SLOT_FEATURES,
    FeatureInputs,
    FeatureReader,
    Observation,
    list_features,
    observe,
)
from esper.growth.blueprints.registry import Blueprint, get
from esper.growth.site import Layout
from esper.lifecycle.actions import Blend, Op
from esper.lifecycle.legality import legal_actions, require_legal
from esper.lifecycle.rules import Rules
from esper.lifecycle.stages import Stage
from esper.lifecycle.table import Evidence, SeedTable
from esper.lifecycle.transitions import step
from esper.numerics.arrays import Bools, Floats, Ints
from esper.numerics.stacking import Stackable
from esper.population import shapley
from esper.population.evaluation import evaluate
from esper.population.parameters import SeedKind
from esper.population.population import Population
from esper.population.prefix_sharing import Variants, forward_variants
from esper.population.shapley import ACCURACY, LOSS, attribute_networks
from esper.rl.episodes import Episodes
from esper.tasks.datasets import DigitsSuite
from esper.tasks.layers import Linear
from lifecycle.support import DEFAULT, RULE_SETS, random_compatibility, random_evidence, sample
from open_rules import open_rules
from rl.short import QUICK, play

SLOTS, SEEDS = 100, 50
WIDTH = 4
NETWORKS = 2


class DeepHost(Stackable):
    """Inputs ``[..., B, D]`` through layers without skips to logits ``[..., B, classes]``.

    Linear and orthogonal, so that neither what the first seeds do nor their gradient is lost on the way.
    """

    def __init__(self, features: int, widths: Sequence[int], classes: int, generator: torch.Generator) -> None:
        super().__init__()
        layers = [Linear(*sizes, generator) for sizes in pairwise((features, *widths))]
        for layer in layers:
            nn.init.orthogonal_(layer.weight, generator=generator)
        self.layers = nn.Sequential(*layers)
        self.head = Linear(widths[-1], classes, generator)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.layers(inputs))


class DeepSuite(DigitsSuite):
    steps = 5
    batches_per_step = 1
    batch_size = 8
    validation_size = 16
    sites = tuple(f"layers.{slot}" for slot in range(SLOTS))
    host_widths = ((WIDTH,) * SLOTS,)

    def build_host(self, widths: tuple[int, ...], generator: torch.Generator) -> DeepHost:
        return DeepHost(self.input_shape[0], widths, self.classes, generator)


SUITE = DeepSuite()


def episodes() -> Episodes:
    """Every network has its fossils in slots of its own, of all kinds."""
    rng = np.random.default_rng(2)
    chosen = [rng.permutation(SLOTS)[:SEEDS].tolist() for _ in range(NETWORKS)]
    fossils = [tuple(SeedKind(slot, slot % len(SUITE.blueprints)) for slot in slots) for slots in chosen]
    return Episodes(SUITE, SUITE.sample(NETWORKS, "train", rng), QUICK, fossils=fossils)


# Whole episodes of networks with a hundred slots and fifty seeds and more.


SPEC = list_features(promise=False).spec


def heuristic() -> Controller:
    everything = tuple(product(range(SLOTS), range(len(SUITE.blueprints))))
    return Heuristic(HeuristicSettings(preferences=everything, at_a_time=SLOTS, most=SLOTS), SUITE.steps)


def policy() -> Controller:
    """Untrained, and eager to germinate."""
    settings = PolicySettings(advice=None, width=8, hidden=8, op_prior=NO_PRIOR.model_copy(update={"germinate": 3.0}))
    return LearnedController(Policy(SPEC, settings, torch.Generator().manual_seed(0)), greedy=False)


@pytest.mark.landing
@pytest.mark.parametrize("controller", [heuristic, policy])
def test_an_episode_is_played_to_its_end(controller: Callable[[], Controller]) -> None:
    running = episodes()
    results = play(running, controller())
    population, owning = running.population, running.population.table.owning
    assert running.finished.all()
    assert len(results) == SUITE.steps
    # What was paid adds up to what the network is worth in the end.
    np.testing.assert_allclose(sum(result.reward for result in results), running.potential, atol=1e-9)
    assert (owning.sum(1) > SEEDS + 1).all()
    rows = [
        (network, slot) for (slot, _, _), bank in population.banks.items() for network in bank.block.owners.tolist()
    ]
    assert sorted(rows) == list(zip(*(places.tolist() for places in owning.nonzero()), strict=True))


# What fifty seeds of a network with a hundred slots earn.


PAIRS = 2


@pytest.fixture(scope="module")
def learned() -> Episodes:
    """Networks whose seeds have begun to say something."""
    running = episodes()
    play(running, Never(), steps=2)
    return running


def test_counterfactuals_are_those_of_separate_passes(learned: Episodes) -> None:
    fused = evaluate(learned.population, learned.validation).loss_contribution
    separate = evaluate(learned.population, learned.validation, shared=False).loss_contribution
    assert learned.population.shares_prefixes
    assert (np.isfinite(fused).sum(1) == SEEDS).all()
    assert np.nanmedian(np.abs(fused)) > 0.01
    np.testing.assert_allclose(fused, separate, rtol=1e-4, atol=1e-5)


def test_estimated_values_add_up_and_cost_no_more_than_their_orders(
    learned: Episodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []

    def counted(population: Population, variants: Variants, inputs: Tensor, *, shared: bool) -> Tensor:
        computed.append(len(variants.toggled) * inputs.shape[1])
        return forward_variants(population, variants, inputs, shared=shared)

    monkeypatch.setattr(shapley, "forward_variants", counted)
    found = attribute_networks(learned.population, learned.validation, np.random.default_rng(0), pairs=PAIRS)
    for worth in (ACCURACY, LOSS):
        earned = found.values[worth].sum(1)
        np.testing.assert_allclose(earned, found.full_value[worth] - found.host_value[worth], atol=1e-9)
    assert ((found.values[LOSS] != 0) == found.players).all()
    places = int(found.players.any(0).sum())
    assert sum(computed) <= (2 * PAIRS * (places - 1) + 2) * SUITE.validation_size


# Networks of one slot each, and the same slots side by side in networks of many.


ENVIRONMENTS, HUNDRED = 6, 100
ALONE = ENVIRONMENTS * HUNDRED
"""Networks of one slot each that together have as many."""
STEPS = 40

Array = NDArray[np.generic]
Part = TypeVar("Part", SeedTable, Evidence)


def lived(rules: Rules, compatible: Bools, generator: np.random.Generator) -> SeedTable:
    """The table ``[ALONE, 1]`` of networks that have acted at random for a while, each for itself."""
    table = SeedTable.dormant(ALONE, 1)
    for _ in range(STEPS):
        evidence = random_evidence(ALONE, 1, generator)
        actions = sample(legal_actions(table, evidence, rules, compatible), generator)
        table = step(table, evidence, actions, rules, compatible).table
    return table


def together(array: Array) -> Array:
    """Slots ``[ALONE, 1, ...]`` as those of networks with many, ``[ENVIRONMENTS, HUNDRED, ...]``."""
    return array.reshape(ENVIRONMENTS, HUNDRED, *array.shape[2:])


def all_together(part: Part) -> Part:
    """The same of a table or of evidence."""
    return type(part)(**{field.name: together(getattr(part, field.name)) for field in fields(part)})


# A hundred slots: what is legal in each is what would be legal if it were the only one.


BLUEPRINTS = 5


@pytest.mark.parametrize("name", ["default-none", "wide-shadow", "narrow-shadow", "one_target-none"])
def test_masks_are_those_of_every_slot_by_itself(name: str) -> None:
    rules, generator = RULE_SETS[name], np.random.default_rng(3)
    compatible = random_compatibility(ALONE, 1, BLUEPRINTS, generator)
    table, evidence = lived(rules, compatible, generator), random_evidence(ALONE, 1, generator)
    assert len(set(table.stage.ravel().tolist())) >= len(Stage) - 2, "the walk was too short to test every stage"
    alone = legal_actions(table, evidence, rules, compatible)
    masks = legal_actions(all_together(table), all_together(evidence), rules, together(compatible))
    for op in set(Op) - {Op.WAIT}:  # which reads no slot
        slots = together(alone.slot[:, op])
        np.testing.assert_array_equal(masks.slot[:, op], slots)
        np.testing.assert_array_equal(masks.op[:, op], slots.any(1))
    np.testing.assert_array_equal(masks.blueprint, together(alone.blueprint))
    np.testing.assert_array_equal(masks.alpha_target, together(alone.alpha_target))
    for _ in range(20):
        require_legal(sample(masks, generator), masks)


# A hundred slots: what a controller sees of each is what it would see if it were the only one.


KINDS = [get(name) for name in ("norm", "mlp", "lowrank", "gate")]
Arrange = Callable[[Array], Array]
"""Turns arrays of networks with one slot each into arrays of other networks."""


@dataclass
class Offered:
    kinds: Sequence[type[Blueprint]]
    costs: Costs
    compatible: Bools
    widths: Ints
    learning_rates: Floats


@dataclass
class Held:
    """Networks, given by their arrays."""

    specs: Offered
    table: SeedTable
    evidence: Evidence
    host_parameters: Ints
    budget_left: Floats
    layouts: np.ndarray
    """Names ``[E, S]``."""

    def slots_of_layout(self, layout: Layout) -> Bools:
        return self.layouts == layout.value

    @property
    def charge(self) -> Charge:
        return Charge(self.specs.costs.parameters, self.host_parameters)


def alone(array: Array) -> Array:
    return array


def side_by_side(array: Array) -> Array:
    """Slots ``[ALONE, 1, ...]`` in networks of many; of what all slots of a network share, its first slot's."""
    return together(array) if array.shape[1:2] == (1,) else array[::HUNDRED]


def view(arranged: Arrange) -> FeatureInputs:
    """Random networks: slots that have lived for a while, and numbers that mean nothing."""
    rng = np.random.default_rng(8)

    def networks() -> Floats:
        return arranged(np.repeat(rng.random(ENVIRONMENTS), HUNDRED))

    def slots(*each: int) -> Floats:
        return arranged(rng.normal(size=(ALONE, 1, *each)))

    compatible = random_compatibility(ALONE, 1, len(KINDS), rng)
    table, evidence = (
        type(part)(**{one.name: arranged(getattr(part, one.name)) for one in fields(part)})
        for part in (lived(DEFAULT, compatible, rng), random_evidence(ALONE, 1, rng))
    )
    price = rng.integers(1, 100, compatible.shape) * compatible
    cost = Cost(arranged(price), arranged(rng.integers(0, 10, (ALONE, 1, len(Blend)))))
    widths, layouts = rng.integers(1, 99, (ALONE, 1)), rng.choice([layout.value for layout in Layout], (ALONE, 1))
    offered = Offered(KINDS, Costs(cost, cost, cost), arranged(compatible), arranged(widths), networks())
    host = (1000 + 1000 * networks()).astype(np.int64)
    held = Held(offered, table, evidence, host, networks(), arranged(layouts))
    past = History(*table.stage.shape, len(KINDS), math.log(10), 0.1)
    health = HealthTable.none(*table.stage.shape)
    past.training = TrainingReport(networks(), networks(), networks(), np.abs(slots()), health)
    past.accuracy_contribution, past.loss_contribution_before = slots(), slots()
    past.loss_contribution = np.where(table.owning, slots(), np.nan)
    past.tries, past.outcomes = np.abs(slots(len(KINDS))), slots(len(KINDS))
    return FeatureInputs(held, past, networks(), 30, networks(), networks(), networks())


def seen(arranged: Arrange) -> Observation:
    return observe(view(arranged))


def test_features_are_those_of_every_slot_by_itself() -> None:
    many, single = seen(side_by_side), seen(alone)
    shape = (ENVIRONMENTS, HUNDRED)
    assert many.slots.shape == (*shape, len(SLOT_FEATURES))
    assert many.blueprints.shape == (*shape, len(KINDS), len(BLUEPRINT_FEATURES))
    for index, feature in enumerate(SLOT_FEATURES):
        if feature.name != "depth":
            assert torch.equal(many.slots[..., index], single.slots[..., index].view(shape)), feature.name
    assert torch.equal(many.blueprints, single.blueprints.view(many.blueprints.shape))


def test_depth_rises_evenly_from_the_first_slot_to_the_last() -> None:
    depths = FeatureReader(seen(side_by_side)).slot("depth")
    np.testing.assert_allclose(np.diff(depths), 1 / (HUNDRED - 1), rtol=1e-4)
    assert depths[:, [0, -1]].tolist() == [[0, 1]] * ENVIRONMENTS


def test_a_network_has_added_what_its_slots_have() -> None:
    many, single = (FeatureReader(seen(way)).network("log_added_parameters") for way in (side_by_side, alone))
    added = np.expm1(single).reshape(ENVIRONMENTS, HUNDRED).sum(1)
    assert (added > 0.1).all()
    np.testing.assert_allclose(np.expm1(many), added, rtol=1e-4)


# A deep model of its owner's with a hundred slots, from `esper.attach` to files that need no Esper.


BLOCKS, PLANTED, KEPT = 100, 50, 10
NARROW, CLASSES = 6, 3
HORIZON = 200


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(NARROW)
        self.mlp = nn.Sequential(nn.Linear(NARROW, NARROW), nn.GELU(), nn.Linear(NARROW, NARROW))

    def forward(self, features: Tensor) -> Tensor:
        return features + self.mlp(self.norm(features))


def deep_host() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, NARROW), nn.Sequential(*(Block() for _ in range(BLOCKS))), nn.Linear(NARROW, 3))


def deep_examples(count: int = 16) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(1))


def grown() -> tuple[GrowingModel, Grower]:
    """Fifty seeds, of which ten are fossils already."""
    model = esper.attach(deep_host(), {r"re:1\.\d+": ["norm", "lowrank"]}, deep_examples(2))
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=1e-3))
    plantings = [Planting(0, 2 * place, place % 2) for place in range(PLANTED)]
    grower = Grower(
        model,
        optimizer,
        controller=Schedule(plantings, HORIZON),
        evaluate=lambda _: (1.0, 0.5),
        rules=open_rules(),
        horizon=HORIZON,
    )
    labels = torch.arange(len(deep_examples())) % CLASSES
    for _ in range(PLANTED + KEPT):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(deep_examples()), labels)
        loss.backward()
        optimizer.step()
        grower.step(train_loss=loss)
    return model, grower


@pytest.mark.slow
def test_it_grows_is_saved_finalized_and_exported(tmp_path: Path) -> None:
    model, grower = grown()
    stages = grower.network.table.stage[0]
    assert len(model.slots) == BLOCKS
    assert (stages == Stage.FOSSILIZED).sum() == KEPT
    assert (stages == Stage.HOLDING).sum() == PLANTED - KEPT
    assert [seed.fossilized for seed in model.seeds.values()].count(True) == KEPT

    esper.save(model, tmp_path / "saved")
    again = esper.load(tmp_path / "saved", deep_host(), deep_examples(2))
    assert torch.equal(again.eval()(deep_examples()), model.eval()(deep_examples()))

    plain = model.finalize("drop")
    for seed in model.seeds.values():
        if not seed.fossilized:
            seed.alpha.zero_()
    torch.testing.assert_close(plain(deep_examples()), model(deep_examples()))
    assert not torch.equal(plain(deep_examples()), deep_host()(deep_examples()))

    esper.export(plain, tmp_path / "net.pt2", deep_examples(2))
    exported = torch.export.load(tmp_path / "net.pt2").module()
    torch.testing.assert_close(exported(deep_examples()), plain(deep_examples()), atol=1e-5, rtol=1e-5)
