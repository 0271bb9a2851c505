"""What fifty seeds of a network with a hundred slots earn."""

from __future__ import annotations

import numpy as np
import pytest
from torch import Tensor

from esper.control.rules import Never
from esper.population import shapley
from esper.population.evaluation import evaluate
from esper.population.population import Population
from esper.population.prefix_sharing import Variants, forward_variants
from esper.population.shapley import ACCURACY, LOSS, attribute_networks
from esper.rl.episodes import Episodes
from rl.many_slots import SEEDS, SUITE, episodes
from rl.short import play

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
