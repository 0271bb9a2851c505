"""Keep or prune a seed by what it contributes, less the rent it costs."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from esper.control.reading import Floats, Reading
from esper.control.rules.decisions import Decisions
from esper.lifecycle.actions import Op

Numbers: TypeAlias = NDArray[Any]
"""Of any precision."""

ROUNDING = 1e-6
"""Ages are shares of the episode in float32."""


def seed_rent(reading: Reading) -> Floats:
    """The rent each resident seed adds to the network's, ``[E, S]``: what it would save to be without it."""
    cost = np.expm1(reading.slot("resident_cost"))
    total = np.expm1(reading.network("log_added_parameters"))
    return marginal_rent(reading.network("rent"), cost, total)


def marginal_rent(rent: Numbers, cost: Numbers, total: Numbers) -> Numbers:
    """What each seed adds to the rent ``rent * log1p(total)``, ``[E, S]``.

    ``rent`` and ``total``, the parameters of all seeds that count, are ``[E]``; ``cost``, those of each, ``[E, S]``;
    parameters are relative to the host's.
    """
    without = np.maximum(total[:, None] - cost, 0.0)
    return rent[:, None] * (np.log1p(without + cost) - np.log1p(without))


def judge(decisions: Decisions, reading: Reading, trial: float, margin: float) -> None:
    """Fossilize the held seeds whose accuracy contribution exceeds their rent by ``margin``, prune the others.

    A seed is judged once its stage's age reaches ``trial``, a share of the episode, and something is known of it.
    """
    held = (reading.slot("stage_holding") > 0) & (reading.slot("measured") > 0)
    due = held & (reading.slot("stage_age") >= trial - ROUNDING)
    worth = reading.slot("accuracy_contribution") - seed_rent(reading) >= margin
    decisions.act_on(Op.FOSSILIZE, due & worth)
    decisions.act_on(Op.PRUNE, due & ~worth)
