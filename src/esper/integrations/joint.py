"""Growth with one choice instead of eight: every action that the rules ever allow, numbered, under an exact mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Self

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from esper.errors import IllegalActionError
from esper.lifecycle.actions import ALPHA_SPEEDS, ALPHA_TARGETS, RELEVANT, TEMPOS, Head
from esper.lifecycle.rules import Rules
from esper.numerics.arrays import Bools, Ints
from esper.rl.gym import Array, Arrays, GrowthSettings, GrowthVectorEnv, Info, Transition, copy_conditional_masks
from esper.tasks.suite import Suite

ACTION_MASK = "action_mask"
"""The part of an observation that says what is legal."""


@dataclass(frozen=True)
class JointActions:
    """All actions that a suite and rules ever allow, each once; heads that an operation does not read are 0.

    There are S * K * (blends * tempos * targets) germinations and, for the other operations, S times the choices that
    they read: 28 under the default rules on the token suite, 340 where all operations and ramps are open.
    """

    table: Ints
    """``[n, 8]``, in the order of operations; the first is WAIT."""

    @classmethod
    def of(cls, suite: Suite, rules: Rules) -> Self:
        """Those of a suite's sites and blueprints under ``rules``."""
        offered: dict[Head, Sequence[int]] = {
            Head.SLOT: range(len(suite.sites)),
            Head.BLUEPRINT: range(len(suite.blueprints)),
            Head.BLEND: sorted(set(rules.blends)),
            Head.TEMPO: _places(TEMPOS, rules.tempos),
            Head.ALPHA_TARGET: _places(ALPHA_TARGETS, rules.alpha_targets),
            Head.ALPHA_SPEED: _places(ALPHA_SPEEDS, rules.alpha_speeds),
            Head.ALPHA_CURVE: sorted(set(rules.alpha_curves)),
        }
        rows = [
            (op, *choices)
            for op in sorted(set(rules.operations))
            for choices in product(*(values if RELEVANT[op, head] else (0,) for head, values in offered.items()))
        ]
        return cls(np.array(rows, np.int64))

    def __len__(self) -> int:
        return len(self.table)

    def legal(self, masks: Arrays) -> Bools:
        """Which of them are legal, bool ``[E, n]``, from `esper.rl.gym.copy_conditional_masks`."""
        op, slot = self.table[:, Head.OP], self.table[:, Head.SLOT]
        legal: Bools = masks["slot"][:, op, slot]
        for head in tuple(Head)[Head.BLUEPRINT :]:
            mask, choice = masks[head.name.lower()], self.table[:, head]
            allowed: Bools = mask[:, slot, choice] if mask.ndim == 3 else mask[:, choice]
            legal = legal & (allowed | ~RELEVANT[op, head])
        return legal

    def decode(self, chosen: Array) -> Ints:
        """The actions ``[E, 8]`` with these numbers, integers ``[E]``.

        Raises:
            IllegalActionError: ``chosen`` is not one number of an action per network.
        """
        if chosen.ndim != 1 or not np.issubdtype(chosen.dtype, np.integer):
            raise IllegalActionError(
                f"joint actions must be integers of shape (E,), not {chosen.dtype} of shape {chosen.shape}"
            )
        if np.any((chosen < 0) | (chosen >= len(self))):
            raise IllegalActionError(f"joint actions must be 0 to {len(self) - 1}, not {chosen.tolist()}")
        return self.table[chosen]


def _places(offered: Sequence[float], allowed: Sequence[float]) -> list[int]:
    return [place for place, value in enumerate(offered) if value in allowed]


class JointVectorEnv(GrowthVectorEnv):
    """As `GrowthVectorEnv`, but an action is one number per network: its row in ``actions.table``.

    ``action_mask`` in the observation and `action_masks` are exact: whoever chooses within them is never overruled.

    Args:
        num_envs: E.
        settings: as `GrowthSettings`.

    Raises:
        TaskError: an unknown suite.
        ConfigError: another setting is not usable.
    """

    def __init__(self, num_envs: int = 1, **settings: Any) -> None:
        super().__init__(num_envs, **settings)
        self.actions = JointActions.of(self.growth.suite, GrowthSettings.parse(settings).rules)
        mask = spaces.MultiBinary(len(self.actions))
        self.single_observation_space = spaces.Dict({**self.growth.observation_space, ACTION_MASK: mask})
        self.single_action_space = spaces.Discrete(len(self.actions))
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Arrays, Info]:
        """Begin new episodes, as `GrowthVectorEnv.reset` does."""
        observation, info = super().reset(seed=seed, options=options)
        return self._add_mask(observation), info

    def step(self, actions: Array) -> Transition:
        """One decision per network, integers ``[E]``; what is illegal now becomes WAIT.

        Raises:
            IllegalActionError: ``actions`` is not one number of an action per network.
            ResetNeeded: an episode has ended, or none was begun.
        """
        decoded = self.actions.decode(np.asarray(actions))
        observation, rewards, terminations, truncations, info = super().step(decoded)
        return self._add_mask(observation), rewards, terminations, truncations, info

    def action_masks(self) -> Bools:
        """Which actions are legal now, bool ``[E, n]``."""
        return self.actions.legal(copy_conditional_masks(self.growth.masks))

    def _add_mask(self, observation: Arrays) -> Arrays:
        return {**observation, ACTION_MASK: self.action_masks().astype(np.int8)}
