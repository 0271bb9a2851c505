"""What seeds earn: Shapley values and pairwise interactions of the seeds of a network.

First the cooperative game: what a coalition of players is worth together, and what each player earns by that. Worths
are arrays whose last axis runs over all coalitions of n players, ``[..., 2**n]``, in the order of `list_coalitions`;
further axes hold so many games of the same players. A player who never changes a worth earns exactly 0. Then the seeds
of a population's networks, from as few forward passes as there can be, and those of one model by its user's measure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import factorial

import numpy as np
import torch
from numpy.typing import NDArray

from esper.errors import ConfigError
from esper.growth.model import GrowingModel
from esper.numerics.arrays import Bools, Floats, Ints
from esper.numerics.deferred import to_arrays
from esper.population.evaluation import EVALUATION_CHUNK, measure_variants
from esper.population.forward import ActiveSeeds, select_blended
from esper.population.learning import Batch
from esper.population.population import Population
from esper.population.prefix_sharing import Variants, forward_variants

Worth = Callable[[Bools], Floats]
"""The characteristic function: worths ``[..., V]`` of coalitions ``[V, n]``, True for those who take part."""


@dataclass(frozen=True)
class ShapleySolution:
    """What n players earn, in units of the worth."""

    values: Floats
    """Shapley values ``[..., n]``. They add up to ``everyone - nobody``."""
    errors: Floats
    """Their standard errors ``[..., n]``; 0 where they are exact."""
    interactions: Floats | None
    """For each pair, ``[..., n, n]``: what both together add beyond what each adds alone, on average over all
    coalitions of others; 0 of a player with itself. None where values are estimated."""
    nobody: Floats
    """Worth of the empty coalition, ``[...]``."""
    everyone: Floats
    """Worth of all together, ``[...]``."""


def list_coalitions(players: int) -> Bools:
    """All coalitions, ``[2**n, n]``: player i takes part in coalition c if bit i of c is set."""
    number, player = np.arange(2**players, dtype=np.int64), np.arange(players, dtype=np.int64)
    return (number[:, None] >> player & 1).astype(np.bool_)


def solve_exactly(worth: ValueFunction, players: int) -> ShapleySolution:
    """The solution of a game from the worths of all its coalitions."""
    worths = worth(list_coalitions(players))
    values = compute_shapley_values(worths)
    return ShapleySolution(
        values, np.zeros_like(values), compute_shapley_interactions(worths), worths[..., 0], worths[..., -1]
    )


def compute_shapley_values(worths: Floats) -> Floats:
    """``[..., n]`` from worths ``[..., 2**n]``.

    ``phi_i = sum over C without i of |C|! (n - |C| - 1)! / n! * (v(C + i) - v(C))`` (Shapley, 1953).
    """
    players = _count_players(worths)
    coalitions = list_coalitions(players)
    values = np.zeros((*worths.shape[:-1], players))
    for player in range(players):
        without = np.flatnonzero(~coalitions[:, player])
        marginal = worths[..., without + 2**player] - worths[..., without]
        values[..., player] = marginal @ _weigh_orders(coalitions[without].sum(axis=1), players)
    return values


def compute_shapley_interactions(worths: Floats) -> Floats:
    """``[..., n, n]`` from worths ``[..., 2**n]``, symmetric with a diagonal of zeros.

    ``I_ij = sum over C without i, j of |C|! (n - |C| - 2)! / (n - 1)! * (v(C + ij) - v(C + i) - v(C + j) + v(C))``
    (Grabisch and Roubens, 1999).
    """
    players = _count_players(worths)
    coalitions = list_coalitions(players)
    interactions = np.zeros((*worths.shape[:-1], players, players))
    for i in range(players):
        for j in range(i):
            without = np.flatnonzero(~coalitions[:, i] & ~coalitions[:, j])
            # Bracketed so that a player without effect gives differences of exactly 0.
            with_i = worths[..., without + 2**i + 2**j] - worths[..., without + 2**i]
            synergy = with_i - (worths[..., without + 2**j] - worths[..., without])
            interactions[..., i, j] = synergy @ _weigh_orders(coalitions[without].sum(axis=1), players - 1)
            interactions[..., j, i] = interactions[..., i, j]
    return interactions


def _weigh_orders(sizes: NDArray[np.int_], players: int) -> Floats:
    """How often one of ``players`` in random order comes right after certain others, by the number of these."""
    return np.array([factorial(size) * factorial(players - size - 1) / factorial(players) for size in sizes.tolist()])


def _count_players(worths: Floats) -> int:
    return worths.shape[-1].bit_length() - 1


MOST_EXACT = 6
"""Players up to which all coalitions are asked for."""
PAIRS = 32
"""Orders that are drawn beyond, each with its reverse."""


def solve(worth: ValueFunction, players: int, rng: np.random.Generator, pairs: int = PAIRS) -> ShapleySolution:
    """Exact for up to `MOST_EXACT` players, for which nothing is drawn; estimated beyond.

    Raises:
        ConfigError: fewer than two pairs.
    """
    if pairs < 2:
        raise ConfigError(f"{pairs} pairs of orders give no standard error: set at least 2")
    return solve_exactly(worth, players) if players <= MOST_EXACT else solve_by_sampling(worth, players, rng, pairs)


def solve_by_sampling(worth: ValueFunction, players: int, rng: np.random.Generator, pairs: int) -> ShapleySolution:
    """Players join in random orders; each earns on average what the worth rises by when it joins.

    Every order is followed by its reverse, in which who came early comes late: antithetic sampling, which is exact
    where players interact in pairs only (Mitchell et al., 2022). Values add up to ``everyone - nobody``
    order by order. Standard errors are those of a mean over pairs of orders, which are independent.
    """
    orders = draw_antithetic_orders(players, pairs, rng)
    joining = _growing_coalitions(orders)
    worths = worth(joining.reshape(-1, players))
    worths = worths.reshape(*worths.shape[:-1], *joining.shape[:-1])
    gains = np.diff(worths, axis=-1)
    ranks = np.broadcast_to(np.argsort(orders, axis=-1), gains.shape)
    by_player = np.take_along_axis(gains, ranks, axis=-1)
    by_pair = by_player.reshape(*by_player.shape[:-2], pairs, 2, players).mean(axis=-2)
    values = by_pair.mean(axis=-2)
    errors = by_pair.std(axis=-2, ddof=1) / np.sqrt(pairs)
    return ShapleySolution(values, errors, None, worths[..., 0, 0], worths[..., 0, -1])


def draw_antithetic_orders(players: int, pairs: int, rng: np.random.Generator) -> Ints:
    """``[2 * pairs, n]``: random orders of the players, each followed by its reverse."""
    forward = rng.permuted(np.tile(np.arange(players), (pairs, 1)), axis=1)
    return np.stack([forward, forward[:, ::-1]], axis=1).reshape(-1, players)


def _growing_coalitions(orders: Ints) -> Bools:
    """The coalitions on the way from nobody to everyone, ``[orders, n + 1, n]``."""
    ranks = np.argsort(orders, axis=-1)
    return ranks[:, None, :] < np.arange(orders.shape[-1] + 1, dtype=np.int64)[:, None]


VARIANTS_AT_ONCE = 64
"""Variants in one forward pass, which has `EVALUATION_CHUNK` examples of all of them together. Both bound memory and
change no result."""


@torch.inference_mode()
def measure_worths(population: Population, active: ActiveSeeds, batch: Batch, off: Bools, *, shared: bool) -> Floats:
    """``[2, E, V]``: accuracy, and minus the mean loss in nats, of V variants of each network.

    ``off`` ``[V, E, S]`` says whose seeds are switched off in which variant; ``shared`` as in `forward_variants`.
    """
    population.execution.train(False)
    off = off & active.slots
    variants, networks, slots = off.shape
    # Sorted from the first slot to the last, so that neighbours have the most in common.
    by_slot = off.transpose(0, 2, 1).reshape(variants, -1)
    distinct, place = np.unique(by_slot, axis=0, return_inverse=True)
    distinct = distinct.reshape(-1, slots, networks).transpose(0, 2, 1)
    groups = np.split(distinct, range(VARIANTS_AT_ONCE, len(distinct), VARIANTS_AT_ONCE))
    measured = [_measure_group(population, active, batch, group, shared=shared) for group in groups]
    found = np.concatenate(measured, axis=-1)[..., place.reshape(-1)]
    return np.stack([found[:, network, _first_alike(off[:, network])] for network in range(networks)], axis=1)


def _first_alike(off: Bools) -> NDArray[np.intp]:
    """``[V]``: the first variant like each, of one network's ``[V, S]``, so that what is alike is worth just the same.

    Elsewhere in a batch, the same sums may be rounded another way.
    """
    _, first, place = np.unique(off, axis=0, return_index=True, return_inverse=True)
    return first[place.reshape(-1)]


def _measure_group(population: Population, active: ActiveSeeds, batch: Batch, off: Bools, *, shared: bool) -> Floats:
    """``[2, E, V]`` of one group of different variants."""
    variants = Variants(active, np.zeros_like(active.alpha), off)
    chunk = max(EVALUATION_CHUNK // len(off), 1)
    total = torch.zeros(2, population.size, len(off), dtype=torch.float64, device=batch.labels.device)
    for inputs, labels in zip(torch.split(batch.inputs, chunk, 1), torch.split(batch.labels, chunk, 1), strict=True):
        logits = forward_variants(population, variants, inputs, shared=shared)
        losses, accuracies = measure_variants(logits, labels)
        total += torch.stack([accuracies, -losses]).to(total) * labels.shape[1]
    (means,) = to_arrays(total / batch.labels.shape[1])
    return means


ACCURACY, LOSS = 0, 1
"""The two worths: accuracy in [0, 1], and minus the mean loss in nats. The higher, the better."""

NOBODY = -1

Seats = Ints
"""The slot of each player of each network, or `NOBODY`, ``[E, n]``."""


@dataclass(frozen=True)
class Attribution:
    """What the seeds of E networks earn; axis 0 tells the two worths apart, `ACCURACY` and `LOSS`."""

    players: Bools
    """``[E, S]``: the slots whose seeds were counted."""
    values: Floats
    """Shapley values ``[2, E, S]``, in each network adding up to ``whole - host``; exactly 0 where nobody plays."""
    errors: Floats
    """Their standard errors ``[2, E, S]``; 0 where they are exact."""
    interactions: Floats
    """For pairs of slots, ``[2, E, S, S]``; NaN in networks of more than `MOST_EXACT` players."""
    host: Floats
    """Worth of the networks without these seeds, ``[2, E]``."""
    whole: Floats
    """Worth of the networks with all of them, ``[2, E]``."""


def attribute_networks(
    population: Population,
    batch: Batch,
    rng: np.random.Generator,
    active: ActiveSeeds | None = None,
    *,
    pairs: int = PAIRS,
    shared: bool = True,
) -> Attribution:
    """Shapley values on ``batch`` of the seeds that take part in the forward pass, blended or fossilized.

    Each counts with its present alpha against its absence. ``active`` chooses others: `select_committed` the fossils.
    Exact for up to `MOST_EXACT` seeds in a network, else estimated from ``pairs`` pairs of orders (`solve`). What a
    network's seeds earn follows from the network, its batch and ``rng`` alone, which draws the same orders for all.
    ``shared`` as in `forward_variants`.

    Raises:
        ConfigError: fewer than two pairs.
    """
    played = select_blended(population) if active is None else active
    shared = shared and population.shares_prefixes
    attribution = _empty_attribution(played.slots)
    for networks, seats in _split_games(played.slots):

        def worth(coalitions: Bools, seats: Seats = seats) -> Floats:
            off = _absent_slots(coalitions, seats, played.slots.shape[1])
            return measure_worths(population, played, batch, off, shared=shared)

        _write_solution(attribution, networks, seats, solve_game(worth, seats.shape[1], rng, pairs))
    return attribution


def _split_games(players: Bools) -> Iterator[tuple[Bools, Seats]]:
    """The networks, bool ``[E]``, and seats of each game: one for all with few players, one for all others."""
    counts = players.sum(axis=1)
    few = counts <= MOST_EXACT
    slots = np.arange(players.shape[1], dtype=np.int64)
    if few.any():
        seated = few[:, None] & (slots < counts[:, None])
        seats = np.where(seated, np.argsort(~players, axis=1, kind="stable"), NOBODY)
        yield few, seats[:, : counts[few].max()]
    if not few.all():
        # A seat for every slot: so the orders do not depend on which other networks there are.
        yield ~few, np.where(players & ~few[:, None], slots, NOBODY)


def _absent_slots(coalitions: Bools, seats: Seats, slots: int) -> Bools:
    """``[V, E, S]``: the slots of the players who are not in the coalitions ``[V, n]``."""
    off = np.zeros((len(coalitions), len(seats), slots), np.bool_)
    network, seat = (seats != NOBODY).nonzero()
    off[:, network, seats[network, seat]] = ~coalitions[:, seat]
    return off


def _empty_attribution(players: Bools) -> Attribution:
    shape, count = (2, *players.shape), players.shape[1]
    return Attribution(
        players,
        np.zeros(shape),
        np.zeros(shape),
        np.full((*shape, count), np.nan),
        np.zeros(shape[:2]),
        np.zeros(shape[:2]),
    )


def _write_solution(attribution: Attribution, networks: Bools, seats: Seats, solution: ShapleySolution) -> None:
    """Write down what the players of one game earned, each at its slot."""
    network, seat = (seats != NOBODY).nonzero()
    slot = seats[network, seat]
    attribution.values[:, network, slot] = solution.values[:, network, seat]
    attribution.errors[:, network, slot] = solution.errors[:, network, seat]
    attribution.host[:, networks] = solution.empty_value[:, networks]
    attribution.whole[:, networks] = solution.grand_value[:, networks]
    if solution.interactions is not None:
        attribution.interactions[:, networks] = 0.0
        network, one, other = ((seats[:, :, None] != NOBODY) & (seats[:, None] != NOBODY)).nonzero()
        places = network, seats[network, one], seats[network, other]
        attribution.interactions[:, *places] = solution.interactions[:, network, one, other]


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
    alphas = [seed.alpha.clone() for seed in seeds.values()]
    known: dict[bytes, float] = {}

    def measure(coalition: Bools) -> float:
        for seed, alpha, takes_part in zip(seeds.values(), alphas, coalition, strict=True):
            seed.alpha.copy_(alpha if takes_part else alpha.new_zeros(()))
        return float(evaluate(model))

    def worth(coalitions: Bools) -> Floats:
        for coalition in coalitions:
            if coalition.tobytes() not in known:
                known[coalition.tobytes()] = measure(coalition)
        return np.array([known[coalition.tobytes()] for coalition in coalitions])

    try:
        solution = solve_game(worth, len(seeds), rng, pairs)
    finally:
        for seed, alpha in zip(seeds.values(), alphas, strict=True):
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
        float(solution.empty_value),
        float(solution.grand_value),
    )
