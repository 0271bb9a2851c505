"""Cooperative games: what a coalition of players is worth together, and what each player earns by that.

Worths are arrays whose last axis runs over all coalitions of n players, ``[..., 2**n]``, in the order of
`every_coalition`; further axes hold so many games of the same players. A player who never changes a worth earns
exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import factorial

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]

Worth = Callable[[Bools], Floats]
"""The characteristic function: worths ``[..., V]`` of coalitions ``[V, n]``, True for those who take part."""


@dataclass(frozen=True)
class Solution:
    """What n players earn, in units of the worth."""

    values: Floats
    """Shapley values ``[..., n]``. They add up to ``everyone - nobody``."""
    errors: Floats
    """Their standard errors ``[..., n]``; 0 where they are exact."""
    interactions: Floats | None
    """Of each pair, ``[..., n, n]``: what both together add beyond what each adds alone, on average over all
    coalitions of others; 0 of a player with itself. None where values are estimated."""
    nobody: Floats
    """Worth of the empty coalition, ``[...]``."""
    everyone: Floats
    """Worth of all together, ``[...]``."""


def every_coalition(players: int) -> Bools:
    """All coalitions, ``[2**n, n]``: player i takes part in coalition c if bit i of c is set."""
    number, player = np.arange(2**players, dtype=np.int64), np.arange(players, dtype=np.int64)
    return (number[:, None] >> player & 1).astype(np.bool_)


def solve_exactly(worth: Worth, players: int) -> Solution:
    """The solution of a game from the worths of all its coalitions."""
    worths = worth(every_coalition(players))
    values = shapley_values(worths)
    return Solution(values, np.zeros_like(values), shapley_interactions(worths), worths[..., 0], worths[..., -1])


def shapley_values(worths: Floats) -> Floats:
    """``[..., n]`` from worths ``[..., 2**n]``.

    ``phi_i = sum over C without i of |C|! (n - |C| - 1)! / n! * (v(C + i) - v(C))`` (Shapley, 1953).
    """
    players = _players(worths)
    coalitions = every_coalition(players)
    values = np.zeros((*worths.shape[:-1], players))
    for player in range(players):
        without = np.flatnonzero(~coalitions[:, player])
        marginal = worths[..., without + 2**player] - worths[..., without]
        values[..., player] = marginal @ _weights(coalitions[without].sum(axis=1), players)
    return values


def shapley_interactions(worths: Floats) -> Floats:
    """``[..., n, n]`` from worths ``[..., 2**n]``, symmetric with a diagonal of zeros.

    ``I_ij = sum over C without i, j of |C|! (n - |C| - 2)! / (n - 1)! * (v(C + ij) - v(C + i) - v(C + j) + v(C))``
    (Grabisch and Roubens, 1999).
    """
    players = _players(worths)
    coalitions = every_coalition(players)
    found = np.zeros((*worths.shape[:-1], players, players))
    for i in range(players):
        for j in range(i):
            without = np.flatnonzero(~coalitions[:, i] & ~coalitions[:, j])
            # Bracketed so that a player without effect gives differences of exactly 0.
            with_i = worths[..., without + 2**i + 2**j] - worths[..., without + 2**i]
            synergy = with_i - (worths[..., without + 2**j] - worths[..., without])
            found[..., i, j] = synergy @ _weights(coalitions[without].sum(axis=1), players - 1)
            found[..., j, i] = found[..., i, j]
    return found


def _weights(sizes: NDArray[np.int_], players: int) -> Floats:
    """How often one of ``players`` in random order comes right after certain others, by the number of these."""
    return np.array([factorial(size) * factorial(players - size - 1) / factorial(players) for size in sizes.tolist()])


def _players(worths: Floats) -> int:
    return worths.shape[-1].bit_length() - 1
