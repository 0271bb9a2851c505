"""Controllers that look at nothing but what is legal: never grow, choose uniformly, repeat recorded actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from esper.control.controller import Actions, UniformStreams
from esper.control.observation import Observation
from esper.errors import ConfigError
from esper.lifecycle.actions import Head, wait
from esper.lifecycle.legality import ActionMasks, canonicalise
from esper.numerics.arrays import Bools, Floats, Ints


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
            legal = masks.find_legal(head, actions[:, Head.OP], actions[:, Head.SLOT])
            actions[:, head] = _pick(legal, uniforms[:, head])
        return actions, state


def _pick(legal: Bools, uniforms: Floats) -> Ints:
    """One of the True columns of each row, by a uniform number in [0, 1)."""
    rank = (uniforms * legal.sum(1)).astype(np.int64)
    return (legal.cumsum(1) > rank[:, None]).argmax(1)


SHUFFLED = "shuffled"


class Replay:
    """Plays a sequence of actions for each network; what is not legal there becomes WAIT, and after its end it waits.

    Args:
        sequences: Actions int64 ``[T, 8]`` by the seed of the network that they are for.

    Raises:
        ConfigError: a sequence has another shape.
    """

    def __init__(self, sequences: Mapping[int, Actions], name: str = "replay") -> None:
        for seed, actions in sequences.items():
            if actions.ndim != 2 or actions.shape[1] != len(Head):
                raise ConfigError(f"the actions for seed {seed} are {actions.shape}, but must be [T, {len(Head)}]")
        self.name = name
        self._sequences = dict(sequences)

    def start(self, seeds: Sequence[int]) -> tuple[int, list[Actions]]:
        """The number of decisions taken, and the networks' sequences.

        Raises:
            ConfigError: there is no sequence for one of the seeds.
        """
        unknown = [seed for seed in seeds if seed not in self._sequences]
        if unknown:
            raise ConfigError(f"no actions were recorded for seed {unknown[0]}")
        return 0, [self._sequences[seed] for seed in seeds]

    def act(
        self, observation: Observation, masks: ActionMasks, state: tuple[int, list[Actions]]
    ) -> tuple[Actions, tuple[int, list[Actions]]]:
        """The next recorded action of each network, as far as it is legal."""
        step, sequences = state
        wished: Ints = np.stack(
            [actions[step] if step < len(actions) else np.zeros(len(Head), np.int64) for actions in sequences]
        )
        return canonicalise(wished, masks)[0], (step + 1, sequences)


def shuffle_actions(actions: Actions, seeds: Sequence[int], rng: np.random.Generator) -> Replay:
    """Everybody's actions ``[T, N, 8]`` for somebody else: a random cycle through all N networks of these seeds.

    Whoever decides by what it sees loses by it; whoever always does the same does not.

    Raises:
        ConfigError: there are fewer than two networks.
    """
    if len(seeds) < 2:
        raise ConfigError("the actions of a single network cannot be shuffled: play at least two")
    order = rng.permutation(len(seeds))
    donors = np.empty_like(order)
    donors[order] = np.roll(order, 1)
    return Replay({seed: actions[:, donor] for seed, donor in zip(seeds, donors.tolist(), strict=True)}, SHUFFLED)
