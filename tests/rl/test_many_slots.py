"""Whole episodes of networks with a hundred slots and fifty seeds and more."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
from esper.engine.observation import list_features

from control.synthetic import NO_PRIOR
from esper.control.controller import Controller
from esper.control.learned import LearnedController
from esper.control.policy import Policy, PolicySettings
from esper.control.rules import Heuristic, HeuristicSettings
from rl.many_slots import SEEDS, SLOTS, SUITE, episodes
from rl.short import play

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
