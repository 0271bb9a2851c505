"""Growth with a single discrete action: all actions that the rules ever allow are numbered, with an exact mask."""

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
"""Key of the observation's mask of legal actions."""


@dataclass(frozen=True)
class JointActions:
    """All actions that a suite and rules ever allow, each once. Heads that an operation does not read are 0.

    There are S * K * (blends * tempos * targets) germinations and, for the other operations, S times the choices that
    they read: 28 under the default rules on the token suite, 340 where all operations and ramps are open.
    """

    table: Ints
    """``[n, 8]``, in the order of operations; the first is WAIT."""

    @classmethod
    def from_rules(cls, suite: Suite, rules: Rules) -> Self:
        """The joint actions of a suite's sites and blueprints under ``rules``."""
        choices_by_head: dict[Head, Sequence[int]] = {
            Head.SLOT: range(len(suite.sites)),
            Head.BLUEPRINT: range(len(suite.blueprints)),
            Head.BLEND: sorted(set(rules.blends)),
            Head.TEMPO: _find_indices(TEMPOS, rules.tempos),
            Head.ALPHA_TARGET: _find_indices(ALPHA_TARGETS, rules.alpha_targets),
            Head.ALPHA_SPEED: _find_indices(ALPHA_SPEEDS, rules.alpha_speeds),
            Head.ALPHA_CURVE: sorted(set(rules.alpha_curves)),
        }
        # All combinations of what each operation reads; heads that it does not read are 0.
        rows = [
            (op, *choices)
            for op in sorted(set(rules.operations))
            for choices in product(
                *(values if RELEVANT[op, head] else (0,) for head, values in choices_by_head.items())
            )
        ]
        return cls(np.array(rows, np.int64))

    def __len__(self) -> int:
        return len(self.table)

    def legal(self, masks: Arrays) -> Bools:
        """The mask of legal actions, bool ``[E, n]``, from the masks of `esper.rl.gym.copy_conditional_masks`."""
        # Legal in every head that the operation reads, under the slot that is chosen.
        op, slot = self.table[:, Head.OP], self.table[:, Head.SLOT]
        legal: Bools = masks["slot"][:, op, slot]
        for head in tuple(Head)[Head.BLUEPRINT :]:
            mask, choice = masks[head.name.lower()], self.table[:, head]
            allowed: Bools = mask[:, slot, choice] if mask.ndim == 3 else mask[:, choice]
            legal = legal & (allowed | ~RELEVANT[op, head])
        return legal

    def decode(self, numbers: Array) -> Ints:
        """The actions ``[E, 8]`` with these numbers, integers ``[E]``.

        Raises:
            IllegalActionError: ``numbers`` is not one valid number per network.
        """
        if numbers.ndim != 1 or not np.issubdtype(numbers.dtype, np.integer):
            raise IllegalActionError(
                f"joint actions must be integers of shape (E,), not {numbers.dtype} of shape {numbers.shape}"
            )
        if np.any((numbers < 0) | (numbers >= len(self))):
            raise IllegalActionError(f"joint actions must be 0 to {len(self) - 1}, not {numbers.tolist()}")
        return self.table[numbers]


def _find_indices(values: Sequence[float], allowed: Sequence[float]) -> list[int]:
    return [index for index, value in enumerate(values) if value in allowed]


class JointVectorEnv(GrowthVectorEnv):
    """A `GrowthVectorEnv` whose actions are one number per network: a row of ``actions.table``.

    ``action_mask`` in the observation and `action_masks` are exact: actions within them are never changed.

    Args:
        num_envs: Number E of networks.
        settings: Fields of `GrowthSettings`.

    Raises:
        TaskError: the suite is unknown.
        ConfigError: another setting is not usable.
    """

    def __init__(self, num_envs: int = 1, **settings: Any) -> None:
        super().__init__(num_envs, **settings)
        self.actions = JointActions.from_rules(self.growth.suite, GrowthSettings.parse(settings).rules)
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
        """Take one decision per network, integers ``[E]``; illegal actions become WAIT.

        Raises:
            IllegalActionError: ``actions`` is not one valid number per network.
            ResetNeeded: an episode has ended, or `reset` was never called.
        """
        decoded = self.actions.decode(np.asarray(actions))
        observation, rewards, terminations, truncations, info = super().step(decoded)
        return self._add_mask(observation), rewards, terminations, truncations, info

    def action_masks(self) -> Bools:
        """The mask of actions that are legal now, bool ``[E, n]``."""
        return self.actions.legal(copy_conditional_masks(self.growth.masks))

    def _add_mask(self, observation: Arrays) -> Arrays:
        return {**observation, ACTION_MASK: self.action_masks().astype(np.int8)}
