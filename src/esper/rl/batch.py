"""What an update learns from: whole episodes with their advantages and returns."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from esper.rl.rollout import Rollout

SMALLEST = 1e-8
"""Added to deviations and variances that are divided by."""


class Batch(NamedTuple):
    """Whole episodes and what to learn from them."""

    rollout: Rollout
    advantage: Tensor
    """``[T, E]``."""
    target: Tensor
    """Returns ``[T, E]``: what the values should have been; less the twins', where there are twins."""
    is_open: Tensor
    """bool ``[T, E, 8]``: the step is part of the episode and the head had a choice."""

    def at(self, index: Tensor) -> Batch:
        """The episodes of the environments at ``index``, int64 ``[n]``."""
        return Batch(self.rollout.at(index), self.advantage[:, index], self.target[:, index], self.is_open[:, index])

    def standardised(self) -> Batch:
        """With advantages of mean 0 and deviation 1."""
        counted = self.advantage[self.rollout.running]
        return self._replace(advantage=(self.advantage - counted.mean()) / (counted.std() + SMALLEST))
