"""What the seeds of a population's networks earn, from as few forward passes as there can be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from esper.training.attribution.game import Bools, Floats, Solution
from esper.training.attribution.sampling import MOST_EXACT, PAIRS, solve
from esper.training.attribution.worths import worths_without
from esper.training.learning import Batch
from esper.training.passes import Participation, as_is
from esper.training.population import Population

ACCURACY, LOSS = 0, 1
"""The two worths: accuracy in [0, 1], and minus the mean loss in nats. The higher, the better."""

NOBODY = -1

Seats = NDArray[np.int64]
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
    """Of pairs of slots, ``[2, E, S, S]``; NaN in networks of more than `MOST_EXACT` players."""
    host: Floats
    """Worth of the networks without these seeds, ``[2, E]``."""
    whole: Floats
    """Worth of the networks with all of them, ``[2, E]``."""


def attribute_networks(
    population: Population,
    batch: Batch,
    rng: np.random.Generator,
    participation: Participation | None = None,
    *,
    pairs: int = PAIRS,
    shared: bool = True,
) -> Attribution:
    """Shapley values on ``batch`` of the seeds that take part in the forward pass, blended or fossilized.

    Each counts with its present alpha against its absence. ``participation`` chooses others: `committed` the fossils.
    Exact for up to `MOST_EXACT` seeds in a network, else estimated from ``pairs`` pairs of orders (`solve`). What a
    network's seeds earn follows from the network, its batch and ``rng`` alone, which draws the same orders for all.
    ``shared`` as in `forward_variants`.

    Raises:
        ConfigError: fewer than two pairs.
    """
    played = as_is(population) if participation is None else participation
    shared = shared and population.shares_prefixes
    found = _blank(played.slots)
    for networks, seats in _games(played.slots):

        def worth(coalitions: Bools, seats: Seats = seats) -> Floats:
            off = _absent(coalitions, seats, played.slots.shape[1])
            return worths_without(population, played, batch, off, shared=shared)

        _enter(found, networks, seats, solve(worth, seats.shape[1], rng, pairs))
    return found


def _games(players: Bools) -> Iterator[tuple[Bools, Seats]]:
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


def _absent(coalitions: Bools, seats: Seats, slots: int) -> Bools:
    """``[V, E, S]``: the slots of the players who are not in the coalitions ``[V, n]``."""
    off = np.zeros((len(coalitions), len(seats), slots), np.bool_)
    network, seat = (seats != NOBODY).nonzero()
    off[:, network, seats[network, seat]] = ~coalitions[:, seat]
    return off


def _blank(players: Bools) -> Attribution:
    shape, count = (2, *players.shape), players.shape[1]
    return Attribution(
        players,
        np.zeros(shape),
        np.zeros(shape),
        np.full((*shape, count), np.nan),
        np.zeros(shape[:2]),
        np.zeros(shape[:2]),
    )


def _enter(found: Attribution, networks: Bools, seats: Seats, solution: Solution) -> None:
    """Write down what the players of one game earned, each at its slot."""
    network, seat = (seats != NOBODY).nonzero()
    slot = seats[network, seat]
    found.values[:, network, slot] = solution.values[:, network, seat]
    found.errors[:, network, slot] = solution.errors[:, network, seat]
    found.host[:, networks] = solution.nobody[:, networks]
    found.whole[:, networks] = solution.everyone[:, networks]
    if solution.interactions is not None:
        found.interactions[:, networks] = 0.0
        network, one, other = ((seats[:, :, None] != NOBODY) & (seats[:, None] != NOBODY)).nonzero()
        places = network, seats[network, one], seats[network, other]
        found.interactions[:, *places] = solution.interactions[:, network, one, other]
