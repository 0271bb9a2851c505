"""Reward modes: pure functions of what a step led to. Accuracies in [0, 1], rent per unit of log1p(added / host)."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from esper.errors import ConfigError

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Outcome:
    """What one step led to, per network; all ``[E]``."""

    potential: Floats
    """`potential` of the network after the step; after the last step, of what was committed."""
    potential_before: Floats
    """The same after the step before; 0 at the start of an episode."""
    finished: NDArray[np.bool_]
    """Whether this was the episode's last step."""


def potential(accuracy: Floats, added: Floats, host: Floats, rent: Floats) -> Floats:
    """``accuracy - rent * log1p(added / host)``, the objective J of a whole network; parameters are counts."""
    return accuracy - rent * np.log1p(added / host)


def outcome(step: Outcome) -> Floats:
    """``potential - potential_before``: telescopes over an episode to J of the committed network, exactly.

    Known failure: noise of single evaluations enters every step's reward, though not their sum.
    """
    return step.potential - step.potential_before


def sparse(step: Outcome) -> Floats:
    """J of the committed network at the last step, 0 before.

    Known failure: gives no hint which of the episode's decisions mattered.
    """
    return np.where(step.finished, step.potential, 0.0)


RewardMode = Callable[[Outcome], Floats]

REWARD_MODES: dict[str, RewardMode] = {"outcome": outcome, "sparse": sparse}


def get_reward_mode(name: str) -> RewardMode:
    """The mode of that name; raises ConfigError naming the known ones."""
    if name not in REWARD_MODES:
        near = difflib.get_close_matches(name, REWARD_MODES, n=1)
        hint = f", did you mean '{near[0]}'?" if near else ""
        raise ConfigError(f"unknown reward mode '{name}'{hint} (known: {', '.join(REWARD_MODES)})")
    return REWARD_MODES[name]
