"""Digits for hosts of a hundred narrow layers, with a slot behind each, half of which hold a fossil from the start."""

from collections.abc import Callable, Sequence
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import esper
from control.situations import NO_PRIOR
from esper.control.controller import Controller
from esper.control.learned import LearnedController
from esper.control.policy import Policy, PolicySettings
from esper.control.rules import Heuristic, HeuristicSettings, Never, Planting, Schedule
from esper.engine.observation import list_features
from esper.growth.export import export
from esper.lifecycle.table import Stage
from esper.numerics.modules import Linear, Stackable
from esper.population.evaluation import evaluate
from esper.population.parameters import SeedKind
from esper.rl.episodes import Episodes
from esper.tasks.datasets import DigitsSuite
from factories import Loop
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


def test_contributions_are_those_of_separate_passes() -> None:
    running = episodes()
    play(running, Never(), steps=2)
    population = running.population
    assert population.shares_prefixes
    fused = evaluate(population, running.validation).loss_contribution
    population.shares_prefixes = False
    separate = evaluate(population, running.validation).loss_contribution
    assert (np.isfinite(fused).sum(1) == SEEDS).all()
    assert np.nanmedian(np.abs(fused)) > 0.01
    np.testing.assert_allclose(fused, separate, rtol=1e-4, atol=1e-5)


# A deep model of its owner's with a hundred slots, from `esper.attach` to files that need no Esper.


BLOCKS, PLANTED, KEPT = 100, 50, 10
NARROW = 6
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


def grown() -> Loop:
    """Fifty seeds, of which ten are fossils already."""
    model = esper.attach(deep_host(), {r"re:1\.\d+": ["norm", "lowrank"]}, torch.zeros(2, 4))
    plantings = [Planting(0, 2 * place, place % 2) for place in range(PLANTED)]
    controller = Schedule(plantings, HORIZON)
    loop = Loop(controller, model, evaluate=lambda _: (1.0, 0.5), rules=open_rules(), horizon=HORIZON)
    for _ in range(PLANTED + KEPT):
        loop.epoch()
    return loop


@pytest.mark.slow
def test_it_grows_is_saved_finalized_and_exported(tmp_path: Path) -> None:
    loop = grown()
    model, inputs = loop.model, loop.inputs[:16]
    stages = loop.grower.network.table.stage[0]
    assert len(model.slots) == BLOCKS
    assert (stages == Stage.FOSSILIZED).sum() == KEPT
    assert (stages == Stage.HOLDING).sum() == PLANTED - KEPT
    assert [seed.fossilized for seed in model.seeds.values()].count(True) == KEPT

    esper.save(model, tmp_path / "saved")
    again = esper.load(tmp_path / "saved", deep_host(), inputs[:2])
    assert torch.equal(again.eval()(inputs), model.eval()(inputs))

    plain = model.finalize("drop")
    for seed in model.seeds.values():
        if not seed.fossilized:
            seed.alpha.zero_()
    torch.testing.assert_close(plain(inputs), model(inputs))
    assert not torch.equal(plain(inputs), deep_host()(inputs))

    export(plain, tmp_path / "net.pt2", inputs[:2])
    exported = torch.export.load(tmp_path / "net.pt2").module()
    torch.testing.assert_close(exported(inputs), plain(inputs), atol=1e-5, rtol=1e-5)
