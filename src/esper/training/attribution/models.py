"""What the seeds of one model earn, by whatever measure its user has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from esper.growth.model import GrowingModel
from esper.training.attribution.game import Bools, Floats
from esper.training.attribution.sampling import PAIRS, solve


@dataclass(frozen=True)
class ModelAttribution:
    """What each seed of a model earns, in units of the measure; the values add up to ``whole - host``."""

    values: dict[str, float]
    """Shapley values by slot."""
    errors: dict[str, float]
    """Their standard errors; 0 where they are exact."""
    interactions: dict[tuple[str, str], float] | None
    """What two seeds add together beyond what each adds alone; None where values are estimated."""
    host: float
    """The measure without any seed."""
    whole: float
    """The measure of the model as it is."""


def attribute_model(
    model: GrowingModel,
    evaluate: Callable[[GrowingModel], float],
    rng: np.random.Generator,
    pairs: int = PAIRS,
) -> ModelAttribution:
    """Shapley values of the model's seeds, live and fossilized, each at its present alpha.

    ``evaluate`` measures the model, the higher the better, and must give the same for the same model: data, mode and
    device are its business. It is called once for each of the ``2**n`` coalitions of up to `MOST_EXACT` seeds, and up
    to ``2 * pairs * (n - 1) + 2`` times for more. Seeds are left out by setting their alpha to 0; whatever ``evaluate``
    raises passes through, with all alphas as they were.

    Raises:
        ConfigError: fewer than two pairs.
    """
    seeds = model.seeds
    usual = [seed.alpha.clone() for seed in seeds.values()]
    known: dict[bytes, float] = {}

    def measured(coalition: Bools) -> float:
        for seed, alpha, takes_part in zip(seeds.values(), usual, coalition, strict=True):
            seed.alpha.copy_(alpha if takes_part else alpha.new_zeros(()))
        return float(evaluate(model))

    def worth(coalitions: Bools) -> Floats:
        for coalition in coalitions:
            if coalition.tobytes() not in known:
                known[coalition.tobytes()] = measured(coalition)
        return np.array([known[coalition.tobytes()] for coalition in coalitions])

    try:
        solution = solve(worth, len(seeds), rng, pairs)
    finally:
        for seed, alpha in zip(seeds.values(), usual, strict=True):
            seed.alpha.copy_(alpha)
    names = list(seeds)
    interactions = None
    if solution.interactions is not None:
        pairs_of = [(i, j) for i in range(len(names)) for j in range(i + 1, len(names))]
        interactions = {(names[i], names[j]): float(solution.interactions[i, j]) for i, j in pairs_of}
    return ModelAttribution(
        dict(zip(names, solution.values.tolist(), strict=True)),
        dict(zip(names, solution.errors.tolist(), strict=True)),
        interactions,
        float(solution.nobody),
        float(solution.everyone),
    )
