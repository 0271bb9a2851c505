"""Who is paid by which mode."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from esper.rl.rewards.facts import Facts
from esper.rl.rewards.modes import MODES, Terms
from esper.rl.rewards.settings import RewardSettings

Floats = NDArray[np.float64]


class Scheme:
    """The reward settings of E environments; several may share the same."""

    def __init__(self, settings: Sequence[RewardSettings]) -> None:
        self._kinds = list(dict.fromkeys(settings))
        self._kind_of: NDArray[np.int64] = np.array([self._kinds.index(one) for one in settings])

    def pay(self, facts: Facts) -> Terms:
        """What the rewards are the sum of, ``[E]`` each; every environment is paid by its own mode."""
        paid: Terms = {}
        for index, settings in enumerate(self._kinds):
            theirs = self._kind_of == index
            terms = MODES[settings.mode].pay(facts.step(settings.family, settings.rent_on), settings)
            for name, term in terms.items():
                paid[name] = np.where(theirs, term, paid.get(name, 0.0))
        return paid


def total(terms: Terms) -> Floats:
    """The rewards ``[E]``."""
    return np.sum(list(terms.values()), axis=0)


def in_turns(settings: Sequence[RewardSettings], environments: int, group: int = 1) -> list[RewardSettings]:
    """The settings of each environment: neighbours in groups of ``group`` share theirs, and groups take turns."""
    return [settings[environment // group % len(settings)] for environment in range(environments)]
