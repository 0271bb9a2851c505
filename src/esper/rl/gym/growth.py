"""What all environments stand on: spaces, settings, and episodes that draw their instances and accept any integers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from pydantic import ValidationError, model_validator

from esper.config.settings import Settings, describe_first_error
from esper.control.observation import Feature, MaskTensors, Observation, list_features
from esper.errors import ConfigError
from esper.lifecycle.actions import head_sizes
from esper.lifecycle.legality import ActionMasks, canonicalise
from esper.lifecycle.rules import Rules
from esper.numerics.arrays import Bools, Floats, Ints
from esper.numerics.devices import CPU, DeviceName, usable_device
from esper.population.population import StrategyChoice
from esper.rl.episode_config import EpisodeConfig
from esper.rl.episodes import Episodes
from esper.rl.rewards import OUTCOME, RewardSpec, assign_rewards
from esper.tasks.registry import get_suite
from esper.tasks.suite import Split, Suite

Array = NDArray[Any]
Arrays = dict[str, Array]


@dataclass(frozen=True)
class GrowthStep:
    """What one step of E networks led to, all ``[E, ...]``."""

    reward: Floats
    finished: Bools
    action: Ints
    """The actions that took effect, ``[E, 8]``."""
    canonicalised: Bools
    """Whose action was not what they asked for."""
    rolled_back: Bools
    """Whom the governor rolled back."""


class GrowthSettings(Settings):
    """The keyword arguments of ``esper/Growth-v0``."""

    suite: str = "tokens"
    """Which learning problems."""
    split: Split = "train"
    """Which of the suite's instances: train, heldout or transfer."""
    rules: Rules = Rules()
    """What may happen to seeds; a mapping of its fields does too."""
    conduct: EpisodeConfig = EpisodeConfig()
    """The governor, caps on growth, and when episodes end early; a mapping of its fields does too."""
    reward: RewardSpec = (OUTCOME,)
    """How the agent is paid: a mode's name, its settings, or a list of either that the networks use in turns."""
    strategy: StrategyChoice = "stacked"
    """How networks are run: stacked, looped, or auto for the faster of the two; the results are the same."""
    device: DeviceName = CPU
    """Where the networks live, as torch names it."""

    @model_validator(mode="after")
    def _slots_are_measured(self) -> Self:
        self.conduct.require_measurements(get_suite(self.suite).steps)
        return self

    @classmethod
    def parse(cls, arguments: Mapping[str, Any]) -> GrowthSettings:
        """The settings given by keyword; raises ConfigError that names the first mistake."""
        try:
            return cls.model_validate(dict(arguments))
        except ValidationError as error:
            raise ConfigError(describe_first_error(error, cls).sentence) from error


class Growth:
    """E episodes on instances of a suite's split.

    Raises:
        TaskError: an unknown suite.
        ConfigError: E below 1, or this machine has no such device.
    """

    def __init__(self, size: int, settings: GrowthSettings) -> None:
        if size < 1:
            raise ConfigError(f"num_envs is {size}, but must be at least 1")
        self.size = size
        self.suite = get_suite(settings.suite)
        self._settings = settings
        self._device = usable_device(settings.device)
        self._episodes: Episodes | None = None
        self._masks: ActionMasks | None = None

    @property
    def begun(self) -> bool:
        """Whether there are episodes at all."""
        return self._episodes is not None

    @property
    def episodes(self) -> Episodes:
        """The present episodes, once they have begun."""
        assert self._episodes is not None, "environments check `begun` first"
        return self._episodes

    @property
    def observation_space(self) -> spaces.Dict:
        """One network's observation: the declared features in their declared ranges, and the flat action mask.

        ``globals`` ``[G]``, ``slots`` ``[S, F]``, ``blueprints`` ``[S, K, D]``, ``action_mask`` ``[sum(head sizes)]``.
        """
        slots, blueprints = len(self.suite.sites), len(self.suite.blueprints)
        features = list_features(self._settings.conduct.promise is not None)
        parts: dict[str, spaces.Space[Any]] = {
            "globals": _make_box(features.globals, ()),
            "slots": _make_box(features.slots, (slots,)),
            "blueprints": _make_box(features.blueprints, (slots, blueprints)),
            "action_mask": spaces.MultiBinary(sum(sizes_of(self.suite))),
        }
        return spaces.Dict(parts)

    @property
    def masks(self) -> ActionMasks:
        """What is legal now, once episodes have begun."""
        assert self._masks is not None, "environments check `begun` first"
        return self._masks

    # Agents act within `torch.no_grad` or `inference_mode`, but networks learn: leaving the latter ends the former too.
    @torch.inference_mode(False)
    def begin(self, rows: Bools, generators: Sequence[np.random.Generator]) -> None:
        """Begin new episodes in ``rows``, bool ``[E]``; each draws its instance from its own generator."""
        chosen = rows.nonzero()[0]
        settings = self._settings
        instances = [self.suite.sample(1, settings.split, generators[row])[0] for row in chosen.tolist()]
        if self._episodes is None:
            self._episodes = Episodes(
                self.suite,
                instances,
                settings.rules,
                settings.conduct,
                rewards=assign_rewards(settings.reward, self.size),
                strategy=settings.strategy,
                device=self._device,
            )
        else:
            self._episodes.restart(chosen, instances)
        self._masks = self._episodes.legal_actions()

    @torch.inference_mode(False)
    def step(self, actions: Array) -> GrowthStep:
        """One decision per network from any integers ``[E, 8]``: what is illegal becomes WAIT.

        Raises:
            IllegalActionError: ``actions`` is no integer array of that shape.
        """
        effective, changed = canonicalise(np.asarray(actions), self.masks)
        result = self.episodes.step(effective.astype(np.int64))
        self._masks = self.episodes.legal_actions()
        rolled_back = np.zeros(self.size, np.bool_)
        rolled_back[[incident.environment for incident in result.incidents]] = True
        return GrowthStep(result.reward, result.finished, effective, changed, rolled_back)

    def observation(self) -> Arrays:
        """What the agent sees, as `observation_arrays`."""
        return observation_arrays(self.episodes.observe(), self.masks)


def sizes_of(suite: Suite) -> tuple[int, ...]:
    """How many choices each of the eight heads has on a suite."""
    return head_sizes(len(suite.sites), len(suite.blueprints))


def action_space(suite: Suite) -> spaces.MultiDiscrete:
    """One choice per head, in the order of `esper.lifecycle.actions.Head`."""
    return spaces.MultiDiscrete(list(sizes_of(suite)))


def _make_box(features: Sequence[Feature], leading: tuple[int, ...]) -> spaces.Box:
    shape = (*leading, len(features))
    low, high = (
        np.broadcast_to(np.array(ends, np.float32), shape)
        for ends in ([feature.low for feature in features], [feature.high for feature in features])
    )
    return spaces.Box(low, high, shape, np.float32)


def observation_arrays(observation: Observation, masks: ActionMasks) -> Arrays:
    """The observations of E networks, each array ``[E, ...]`` in the order of `Growth.observation_space`."""
    arrays = {name: part.cpu().numpy() for name, part in observation._asdict().items()}
    return {**arrays, "action_mask": masks.flat().astype(np.int8)}


def conditional_masks(masks: ActionMasks) -> Arrays:
    """The exact masks by head, each bool ``[E, ...]``: a choice's legality given the choices before it.

    The flat mask of an observation cannot say that a blueprint fits one slot and not the other; these can. Shapes as
    in `esper.lifecycle.legality.ActionMasks`.
    """
    # Copies: an agent may write into what it was given, and the environment still decides by the originals.
    return {name: getattr(masks, name).copy() for name in MaskTensors._fields}
