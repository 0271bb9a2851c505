"""One number instead of eight choices: every action that the rules allow is numbered, and `action_mask` is exact.

    python examples/numbered_actions.py

For learners of Gymnasium that choose from a list, such as sb3-contrib's (sb3.py) and TorchRL's (docs/interop.md).
"""

from itertools import product
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from esper.lifecycle.actions import ALPHA_SPEEDS, ALPHA_TARGETS, RELEVANT, TEMPOS, Head, clear_irrelevant_heads
from esper.lifecycle.rules import Rules
from esper.rl import GrowthVectorEnv


class NumberedActions(GrowthVectorEnv):
    """`GrowthVectorEnv` with actions ``[E]``, of which each is a row of ``table``; rows within the mask are legal."""

    def __init__(self, num_envs: int = 1, rules: Rules = Rules(), **settings: Any) -> None:  # noqa: B008
        super().__init__(num_envs, rules=rules, **settings)
        heads = (
            range(len(self.suite.sites)),
            range(len(self.suite.blueprints)),
            rules.blends,
            [TEMPOS.index(tempo) for tempo in rules.tempos],
            [ALPHA_TARGETS.index(target) for target in rules.alpha_targets],
            [ALPHA_SPEEDS.index(speed) for speed in rules.alpha_speeds],
            rules.alpha_curves,
        )
        # Heads that an operation does not read become 0, and rows that are the same then become one.
        rows = [(op, *choices) for op in rules.operations for choices in product(*heads)]
        self.table = np.unique(clear_irrelevant_heads(np.array(rows, np.int64)), axis=0)
        mask = spaces.MultiBinary(len(self.table))
        self.single_observation_space = spaces.Dict({**self.single_observation_space, "action_mask": mask})
        self.single_action_space = spaces.Discrete(len(self.table))
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def action_masks(self) -> np.ndarray:
        """Which rows are legal now, bool ``[E, n]``: in every head that the operation reads, in the slot chosen."""
        op, slot = self.table[:, Head.OP], self.table[:, Head.SLOT]
        legal = self.masks.slot[:, op, slot]
        for head in tuple(Head)[Head.BLUEPRINT :]:
            mask, choice = getattr(self.masks, head.name.lower()), self.table[:, head]
            allowed = mask[:, slot, choice] if mask.ndim == 3 else mask[:, choice]
            legal = legal & (allowed | ~RELEVANT[op, head])
        return legal

    def reset(self, **arguments: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        observation, info = super().reset(**arguments)
        return {**observation, "action_mask": self.action_masks().astype(np.int8)}, info

    def step(self, actions: np.ndarray) -> tuple[dict[str, np.ndarray], Any, Any, Any, dict[str, Any]]:
        observation, *rest = super().step(self.table[actions])
        return {**observation, "action_mask": self.action_masks().astype(np.int8)}, *rest


if __name__ == "__main__":
    envs, rng = NumberedActions(4), np.random.default_rng(0)
    observation, _ = envs.reset(seed=0)
    returns = np.zeros(4)
    for _ in range(envs.suite.steps):
        chosen = np.array([rng.choice(np.flatnonzero(mask)) for mask in observation["action_mask"]])
        observation, rewards, _, _, info = envs.step(chosen)
        assert not info["canonicalised"].any()  # nothing was illegal
        returns += rewards
    print(f"{len(envs.table)} actions; J of random ones {returns.mean():.3f}")
