"""Shapley values of games with too many coalitions to ask for all: estimates from random orders of the players."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from esper.errors import ConfigError
from esper.training.attribution.game import Bools, Solution, Worth, solve_exactly

MOST_EXACT = 6
"""Players up to which all coalitions are asked for."""
PAIRS = 32
"""Orders that are drawn beyond, each with its reverse."""


def solve(worth: Worth, players: int, rng: np.random.Generator, pairs: int = PAIRS) -> Solution:
    """Exact for up to `MOST_EXACT` players, for which nothing is drawn; estimated beyond.

    Raises:
        ConfigError: fewer than two pairs.
    """
    if pairs < 2:
        raise ConfigError(f"{pairs} pairs of orders give no standard error: ask for at least 2")
    return solve_exactly(worth, players) if players <= MOST_EXACT else solve_by_sampling(worth, players, rng, pairs)


def solve_by_sampling(worth: Worth, players: int, rng: np.random.Generator, pairs: int) -> Solution:
    """Players join in random orders; each earns on average what the worth rises by when it joins.

    Every order is followed by its reverse, in which who came early comes late: antithetic sampling, which is exact
    where players interact in pairs only (Mitchell et al., 2022). Values add up to ``everyone - nobody``
    order by order. Standard errors are those of a mean over pairs of orders, which are independent.
    """
    orders = antithetic_orders(players, pairs, rng)
    joining = _joining(orders)
    worths = worth(joining.reshape(-1, players))
    worths = worths.reshape(*worths.shape[:-1], *joining.shape[:-1])
    gains = np.diff(worths, axis=-1)
    ranks = np.broadcast_to(np.argsort(orders, axis=-1), gains.shape)
    by_player = np.take_along_axis(gains, ranks, axis=-1)
    by_pair = by_player.reshape(*by_player.shape[:-2], pairs, 2, players).mean(axis=-2)
    values = by_pair.mean(axis=-2)
    errors = by_pair.std(axis=-2, ddof=1) / np.sqrt(pairs)
    return Solution(values, errors, None, worths[..., 0, 0], worths[..., 0, -1])


def antithetic_orders(players: int, pairs: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """``[2 * pairs, n]``: random orders of the players, each followed by its reverse."""
    forward = rng.permuted(np.tile(np.arange(players), (pairs, 1)), axis=1)
    return np.stack([forward, forward[:, ::-1]], axis=1).reshape(-1, players)


def _joining(orders: NDArray[np.int64]) -> Bools:
    """The coalitions on the way from nobody to everyone, ``[orders, n + 1, n]``."""
    ranks = np.argsort(orders, axis=-1)
    return ranks[:, None, :] < np.arange(orders.shape[-1] + 1, dtype=np.int64)[:, None]
