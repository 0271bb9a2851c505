"""Contributions of seeds: Shapley values and pairwise interactions of the seeds of a network.

The first part is about cooperative games: values v(C) of all coalitions C of n players are arrays ``[..., 2**n]`` in
the order of `list_coalitions`; leading axes are different games. A player who never changes a coalition's value gets
exactly 0. The second part applies this to the seeds of a population's networks, with as few forward passes as possible,
and to the seeds of one model under a user's measure.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from math import factorial

import numpy as np
import torch
from numpy.typing import NDArray

from esper.errors import ConfigError
from esper.growth.model import GrowingModel
from esper.numerics.arrays import Bools, Floats, Ints
from esper.numerics.devices import to_arrays
from esper.population.evaluation import EVALUATION_CHUNK, Variants, forward_variants, score_variants
from esper.population.forward import ActiveSeeds, select_blended
from esper.population.learning import Batch
from esper.population.population import Population

ValueFunction = Callable[[Bools], Floats]
"""The characteristic function of a game: maps coalitions ``[V, n]``, True for members, to values ``[..., V]``."""


@dataclass(frozen=True)
class ShapleySolution:
    """Shapley values and interactions of n players, in units of the coalitions' values."""

    values: Floats
    """Shapley values ``[..., n]``. They add up to ``grand_value - empty_value``."""
    errors: Floats
    """Standard errors of the values, ``[..., n]``; 0 where values are exact, NaN where the error is unknown."""
    interactions: Floats | None
    """How much each pair of players adds together beyond what each adds alone, ``[..., n, n]``: on average over all
    coalitions of the others or, from `solve_by_pairs`, in the presence of all others. None where values are estimated
    from orders."""
    empty_value: Floats
    """Value of the empty coalition, ``[...]``."""
    grand_value: Floats
    """Value of the grand coalition, of all players, ``[...]``."""


def list_coalitions(players: int) -> Bools:
    """All coalitions, ``[2**n, n]``: player i is a member of coalition c if bit i of c is set."""
    number, player = np.arange(2**players, dtype=np.int64), np.arange(players, dtype=np.int64)
    return (number[:, None] >> player & 1).astype(np.bool_)


def solve_exactly(value_fn: ValueFunction, players: int) -> ShapleySolution:
    """The solution of a game from the values of all its coalitions."""
    v = value_fn(list_coalitions(players))
    values = compute_shapley_values(v)
    return ShapleySolution(values, np.zeros_like(values), compute_shapley_interactions(v), v[..., 0], v[..., -1])


def compute_shapley_values(v: Floats) -> Floats:
    """Shapley values ``[..., n]`` from the values ``[..., 2**n]`` of all coalitions.

    ``phi_i = sum over C without i of |C|! (n - |C| - 1)! / n! * (v(C + i) - v(C))`` (Shapley, 1953).
    """
    players = v.shape[-1].bit_length() - 1
    coalitions = list_coalitions(players)
    values = np.zeros((*v.shape[:-1], players))
    for i in range(players):
        without = np.flatnonzero(~coalitions[:, i])
        marginal = v[..., without + 2**i] - v[..., without]
        values[..., i] = marginal @ _weigh_coalitions(coalitions[without].sum(axis=1), players)
    return values


def compute_shapley_interactions(v: Floats) -> Floats:
    """Interactions ``[..., n, n]`` from the values ``[..., 2**n]`` of all coalitions, symmetric, with a zero diagonal.

    ``I_ij = sum over C without i, j of |C|! (n - |C| - 2)! / (n - 1)! * (v(C + ij) - v(C + i) - v(C + j) + v(C))``
    (Grabisch and Roubens, 1999).
    """
    players = v.shape[-1].bit_length() - 1
    coalitions = list_coalitions(players)
    interactions = np.zeros((*v.shape[:-1], players, players))
    for i in range(players):
        for j in range(i):
            without = np.flatnonzero(~coalitions[:, i] & ~coalitions[:, j])
            # Brackets make the differences of a player without effect exactly 0.
            with_i = v[..., without + 2**i + 2**j] - v[..., without + 2**i]
            synergy = with_i - (v[..., without + 2**j] - v[..., without])
            interactions[..., i, j] = synergy @ _weigh_coalitions(coalitions[without].sum(axis=1), players - 1)
            interactions[..., j, i] = interactions[..., i, j]
    return interactions


def _weigh_coalitions(sizes: NDArray[np.int_], players: int) -> Floats:
    """``|C|! (n - |C| - 1)! / n!``, by the size of C: the probability that a player follows C in a random order."""
    return np.array([factorial(size) * factorial(players - size - 1) / factorial(players) for size in sizes.tolist()])


MOST_EXACT = 6
"""Largest number of players for which all coalitions are measured."""
PAIRS = 32
"""Number of orders drawn for more players, each with its reverse."""


def solve_game(
    value_fn: ValueFunction, players: int, rng: np.random.Generator | None, pairs: int = PAIRS
) -> ShapleySolution:
    """The solution of a game, exact for up to `MOST_EXACT` players and estimated for more.

    Estimates use ``pairs`` pairs of random orders or, without ``rng``, pairs of players, which costs a tenth. Exact
    solutions draw no random numbers.
    """
    if pairs < 2:
        raise ConfigError(f"{pairs} pairs of orders give no standard error: set at least 2")
    if players <= MOST_EXACT:
        return solve_exactly(value_fn, players)
    return solve_by_pairs(value_fn, players) if rng is None else solve_by_sampling(value_fn, players, rng, pairs)


def solve_by_pairs(value_fn: ValueFunction, players: int) -> ShapleySolution:
    """Estimate a game's solution from the grand coalition N without each player, and without each pair of players.

    ``I_ij = v(N) - v(N - i) - v(N - j) + v(N - ij)`` and ``phi_i = v(N) - v(N - i) - (sum over j of I_ij) / 2``. Both
    are exact if players interact only in pairs (a 2-additive game: Grabisch, 1997). Otherwise their errors are unknown,
    and values need not add up. The values of ``n (n + 1) / 2 + 2`` coalitions are needed.
    """
    # Pairs i <= j: the pair of a player with itself leaves out this one player.
    first, second = np.triu_indices(players)
    player = np.eye(players, dtype=np.bool_)
    everyone = np.ones((1, players), np.bool_)
    v = value_fn(np.concatenate([everyone, ~(player[first] | player[second]), ~everyone]))
    grand, without, empty = v[..., 0], v[..., 1:-1], v[..., -1]

    # Bracketed so that a player without effect gives differences of exactly 0.
    without_one = without[..., first == second]
    marginal = grand[..., None] - without_one
    synergy = marginal[..., first] - (without_one[..., second] - without)
    synergy[..., first == second] = 0.0
    interactions = np.zeros((*v.shape[:-1], players, players))
    interactions[..., first, second] = interactions[..., second, first] = synergy
    values = marginal - interactions.sum(axis=-1) / 2
    return ShapleySolution(values, np.full_like(values, np.nan), interactions, empty, grand)


def solve_by_sampling(value_fn: ValueFunction, players: int, rng: np.random.Generator, pairs: int) -> ShapleySolution:
    """Estimate a game's solution: a player's mean marginal contribution when players join in random orders.

    Every order is followed by its reverse, which is exact if players interact only in pairs (Mitchell et al., 2022).
    Standard errors are those of a mean over pairs of orders, which are independent.
    """
    # The coalitions on the way from the empty to the grand one, [orders, n + 1, n].
    orders = draw_antithetic_orders(players, pairs, rng)
    ranks = np.argsort(orders, axis=-1)
    coalitions = ranks[:, None, :] < np.arange(players + 1, dtype=np.int64)[:, None]
    v = value_fn(coalitions.reshape(-1, players))
    v = v.reshape(*v.shape[:-1], *coalitions.shape[:-1])

    # What each player adds when it joins, averaged over both orders of a pair, then over pairs.
    marginal = np.diff(v, axis=-1)
    by_player = np.take_along_axis(marginal, np.broadcast_to(ranks, marginal.shape), axis=-1)
    by_pair = by_player.reshape(*by_player.shape[:-2], pairs, 2, players).mean(axis=-2)
    errors = by_pair.std(axis=-2, ddof=1) / np.sqrt(pairs)
    return ShapleySolution(by_pair.mean(axis=-2), errors, None, v[..., 0, 0], v[..., 0, -1])


def draw_antithetic_orders(players: int, pairs: int, rng: np.random.Generator) -> Ints:
    """``[2 * pairs, n]``: random orders of the players, each followed by its reverse."""
    forward = rng.permuted(np.tile(np.arange(players), (pairs, 1)), axis=1)
    return np.stack([forward, forward[:, ::-1]], axis=1).reshape(-1, players)


VARIANTS_AT_ONCE = 64
"""Number of variants in one forward pass, which has `EVALUATION_CHUNK` examples of all of them together. Both limit
memory and do not change results."""


@torch.inference_mode()
def measure_variant_values(population: Population, active: ActiveSeeds, batch: Batch, off: Bools) -> Floats:
    """Accuracy and negative mean loss in nats, ``[2, E, V]``, of V variants of each network.

    ``off`` ``[V, E, S]`` are the seeds that are switched off in each variant.
    """
    population.execution.train(False)
    off = off & active.slots
    variants, networks, slots = off.shape

    # Each distinct variant once, sorted from the first slot to the last, so that neighbours share the most.
    by_slot = off.transpose(0, 2, 1).reshape(variants, -1)
    distinct, place = np.unique(by_slot, axis=0, return_inverse=True)
    distinct = distinct.reshape(-1, slots, networks).transpose(0, 2, 1)
    values: list[Floats] = []
    for group in np.split(distinct, range(VARIANTS_AT_ONCE, len(distinct), VARIANTS_AT_ONCE)):
        toggled = Variants(active, np.zeros_like(active.alpha), group)
        chunk = max(EVALUATION_CHUNK // len(group), 1)
        total = torch.zeros(2, networks, len(group), dtype=torch.float64, device=batch.labels.device)
        parts = torch.split(batch.inputs, chunk, 1), torch.split(batch.labels, chunk, 1)
        for inputs, labels in zip(*parts, strict=True):
            logits = forward_variants(population, toggled, inputs)
            losses, accuracies, *_ = score_variants(logits, labels)
            total += torch.stack([accuracies, -losses]).to(total) * labels.shape[1]
        values += to_arrays(total / batch.labels.shape[1])
    by_variant = np.take(np.concatenate(values, axis=-1), place.reshape(-1), axis=-1)

    # Variants that differ only in other networks all get the value of the first, because rounding may depend on the
    # place in a batch.
    for network in range(networks):
        _, first, place = np.unique(off[:, network], axis=0, return_index=True, return_inverse=True)
        by_variant[:, network] = by_variant[:, network, first[place.reshape(-1)]]
    return by_variant


ACCURACY, LOSS = 0, 1
"""Indices of the two values: accuracy in [0, 1], and the negative mean loss in nats. Higher is better for both."""

NO_PLAYER = -1


@dataclass(frozen=True)
class Attribution:
    """Shapley values of the seeds of E networks; axis 0 is the kind of value, `ACCURACY` or `LOSS`."""

    players: Bools
    """``[E, S]``: the slots whose seeds were counted."""
    values: Floats
    """Shapley values ``[2, E, S]``, which add up to ``full_value - host_value`` in each network; exactly 0 in slots
    without a player."""
    errors: Floats
    """Standard errors of the values, ``[2, E, S]``; 0 where values are exact, NaN where the error is unknown."""
    interactions: Floats
    """Interactions of pairs of slots, ``[2, E, S, S]``; NaN in networks whose values are estimated from orders."""
    host_value: Floats
    """Value of the networks without these seeds, ``[2, E]``."""
    full_value: Floats
    """Value of the networks with all of them, ``[2, E]``."""


def attribute_networks(
    population: Population,
    batch: Batch,
    rng: np.random.Generator | None,
    active: ActiveSeeds | None = None,
    *,
    pairs: int = PAIRS,
) -> Attribution:
    """Shapley values, on ``batch``, of the seeds that take part in the forward pass, blended or fossilized.

    Each seed at its current alpha is compared with its absence; ``active`` selects other seeds. Values are exact for up
    to `MOST_EXACT` seeds in a network. For more, they are estimated from ``pairs`` pairs of orders or, without ``rng``,
    from pairs of seeds (`solve_game`). The values of a network depend only on the network, its batch and ``rng``, which
    draws the same orders for all networks.
    """
    active = select_blended(population) if active is None else active
    players, slots = active.slots, np.arange(active.slots.shape[1], dtype=np.int64)
    shape, networks_shape = (2, *players.shape), (2, len(players))
    attribution = Attribution(
        players,
        values=np.zeros(shape),
        errors=np.zeros(shape),
        interactions=np.full((*shape, len(slots)), np.nan),
        host_value=np.zeros(networks_shape),
        full_value=np.zeros(networks_shape),
    )

    # One exact game for all networks with few players, one estimated game for all others. A game is the slot of each
    # player of each network, `NO_PLAYER` where it has fewer, [E, n].
    counts = players.sum(axis=1)
    few = counts <= MOST_EXACT
    games: list[tuple[Bools, Ints]] = []
    if few.any():
        first_slots = np.argsort(~players, axis=1, kind="stable")[:, : counts[few].max()]
        seated = few[:, None] & (slots[: counts[few].max()] < counts[:, None])
        games.append((few, np.where(seated, first_slots, NO_PLAYER)))
    if not few.all():
        # A player for every slot, so that the orders do not depend on the other networks.
        games.append((~few, np.where(players & ~few[:, None], slots, NO_PLAYER)))

    # A coalition is the variant of each network in which all other players are switched off.
    def compute_values(network: Ints, player: Ints, slot: Ints, coalitions: Bools) -> Floats:
        off = np.zeros((len(coalitions), *players.shape), np.bool_)
        off[:, network, slot] = ~coalitions[:, player]
        return measure_variant_values(population, active, batch, off)

    for networks, player_slots in games:
        network, player = (player_slots != NO_PLAYER).nonzero()
        slot = player_slots[network, player]

        value_fn = partial(compute_values, network, player, slot)
        solution = solve_game(value_fn, player_slots.shape[1], rng, pairs)

        # From players back to slots.
        attribution.values[:, network, slot] = solution.values[:, network, player]
        attribution.errors[:, network, slot] = solution.errors[:, network, player]
        attribution.host_value[:, networks] = solution.empty_value[:, networks]
        attribution.full_value[:, networks] = solution.grand_value[:, networks]
        if solution.interactions is not None:
            attribution.interactions[:, networks] = 0.0
            present = player_slots != NO_PLAYER
            network, i, j = (present[:, :, None] & present[:, None]).nonzero()
            pair = network, player_slots[network, i], player_slots[network, j]
            attribution.interactions[:, *pair] = solution.interactions[:, network, i, j]
    return attribution


@dataclass(frozen=True)
class ModelAttribution:
    """Shapley values of the seeds of a model, in units of the measure; they add up to ``full_value - host_value``."""

    values: dict[str, float]
    """Shapley values by slot."""
    errors: dict[str, float]
    """Standard errors of the values; 0 where they are exact."""
    interactions: dict[tuple[str, str], float] | None
    """How much two seeds add together beyond what each adds alone; None where values are estimated."""
    host_value: float
    """The measure without any seed."""
    full_value: float
    """The measure of the unchanged model."""


def attribute_model(
    model: GrowingModel,
    evaluate: Callable[[GrowingModel], float],
    rng: np.random.Generator,
    pairs: int = PAIRS,
) -> ModelAttribution:
    """Shapley values of the model's seeds, live and fossilized, each at its current alpha.

    ``evaluate`` measures the model; higher is better. It must return the same value for the same model. It is called
    once for each of the ``2**n`` coalitions of up to `MOST_EXACT` seeds, and up to ``2 * pairs * (n - 1) + 2`` times
    for more. Seeds are left out by setting their alpha to 0, which is restored whatever happens.
    """
    seeds = model.seeds
    alphas = [seed.alpha.clone() for seed in seeds.values()]
    cache: dict[bytes, float] = {}

    def value_fn(coalitions: Bools) -> Floats:
        for coalition in coalitions:
            if coalition.tobytes() not in cache:
                for seed, alpha, member in zip(seeds.values(), alphas, coalition, strict=True):
                    seed.alpha.copy_(alpha if member else alpha.new_zeros(()))
                cache[coalition.tobytes()] = float(evaluate(model))
        return np.array([cache[coalition.tobytes()] for coalition in coalitions])

    try:
        solution = solve_game(value_fn, len(seeds), rng, pairs)
    finally:
        for seed, alpha in zip(seeds.values(), alphas, strict=True):
            seed.alpha.copy_(alpha)
    interactions = None
    if solution.interactions is not None:
        pairs_of_seeds = combinations(enumerate(seeds), 2)
        interactions = {(a, b): float(solution.interactions[i, j]) for (i, a), (j, b) in pairs_of_seeds}
    return ModelAttribution(
        dict(zip(seeds, solution.values.tolist(), strict=True)),
        dict(zip(seeds, solution.errors.tolist(), strict=True)),
        interactions,
        float(solution.empty_value),
        float(solution.grand_value),
    )
