"""Controllers that look at nothing but what is legal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from esper.control.controller import Actions, UniformStreams
from esper.control.spaces import Observation
from esper.lifecycle.actions import Head, wait
from esper.lifecycle.legality import ActionMasks


class Never:
    """Never grows."""

    name = "none"

    def start(self, seeds: Sequence[int]) -> None:
        """No state."""

    def act(self, observation: Observation, masks: ActionMasks, state: None) -> tuple[Actions, None]:
        """WAIT everywhere."""
        return wait(masks.environments), None


class Uniform:
    """Draws every head uniformly from what is legal given the heads before."""

    name = "random"

    def start(self, seeds: Sequence[int]) -> UniformStreams:
        """One random stream per network."""
        return UniformStreams(seeds)

    def act(
        self, observation: Observation, masks: ActionMasks, state: UniformStreams
    ) -> tuple[Actions, UniformStreams]:
        """A legal action per network."""
        uniforms = state.draw()
        actions = wait(masks.environments)
        for head in Head:
            legal = masks.given(head, actions[:, Head.OP], actions[:, Head.SLOT])
            actions[:, head] = _pick(legal, uniforms[:, head])
        return actions, state


def _pick(legal: NDArray[np.bool_], uniforms: NDArray[np.float64]) -> NDArray[np.int64]:
    """One of the True columns of each row, by a uniform number in [0, 1)."""
    rank = (uniforms * legal.sum(1)).astype(np.int64)
    return (legal.cumsum(1) > rank[:, None]).argmax(1)
