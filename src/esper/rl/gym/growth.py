"""What both faces of the environment stand on: episodes that draw their own instances and accept any integers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError, model_validator

from esper.devices import CPU, DeviceName, usable_device
from esper.errors import ConfigError
from esper.lifecycle.legality import ActionMasks, canonicalise
from esper.lifecycle.rules import Rules
from esper.mistakes import first_mistake
from esper.rl.conduct import Conduct
from esper.rl.episodes import Episodes, FinalScore
from esper.rl.gym.spaces import Array, Arrays, conditional_masks, observation_arrays
from esper.rl.rewards.scheme import in_turns
from esper.rl.rewards.settings import OUTCOME, RewardSpec
from esper.settings import Settings
from esper.tasks.registry import get_suite
from esper.tasks.suite import Split
from esper.training.plan import StrategyChoice

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Stepped:
    """What one step of E networks led to, all ``[E, ...]``."""

    reward: NDArray[np.float64]
    finished: Bools
    action: NDArray[np.int64]
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
    conduct: Conduct = Conduct()
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
    def of(cls, arguments: Mapping[str, Any]) -> GrowthSettings:
        """The settings given by keyword; raises ConfigError that names the first mistake."""
        try:
            return cls.model_validate(dict(arguments))
        except ValidationError as error:
            raise ConfigError(first_mistake(error, cls).sentence) from error


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
    def ended(self) -> Bools:
        """``[E]``: which episodes have come to their end."""
        return self._running.finished

    @property
    def instances(self) -> list[str]:
        """The name of each network's instance."""
        return [instance.name for instance in self._running.instances]

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
                rewards=in_turns(settings.reward, self.size),
                strategy=settings.strategy,
                device=self._device,
            )
        else:
            self._episodes.restart(chosen, instances)
        self._masks = self._episodes.legal_actions()

    @torch.inference_mode(False)
    def step(self, actions: Array) -> Stepped:
        """One decision per network from any integers ``[E, 8]``: what is illegal becomes WAIT.

        Raises:
            IllegalActionError: ``actions`` is no integer array of that shape.
        """
        effective, changed = canonicalise(np.asarray(actions), self._legal)
        result = self._running.step(effective.astype(np.int64))
        self._masks = self._running.legal_actions()
        rolled_back = np.zeros(self.size, np.bool_)
        rolled_back[[incident.environment for incident in result.incidents]] = True
        return Stepped(result.reward, result.finished, effective, changed, rolled_back)

    def observation(self) -> Arrays:
        """What the agent sees, as `esper.rl.gym.spaces.observation_arrays`."""
        return observation_arrays(self._running.observe(), self._legal)

    def action_masks(self) -> Bools:
        """The flat masks ``[E, sum(head sizes)]``."""
        return self._legal.flat()

    def conditional_masks(self) -> Arrays:
        """The exact masks, as `esper.rl.gym.spaces.conditional_masks`."""
        return conditional_masks(self._legal)

    def final_score(self) -> FinalScore:
        """The committed networks on test data."""
        return self._running.final_score()

    @property
    def _running(self) -> Episodes:
        assert self._episodes is not None, "faces check `begun` first"
        return self._episodes

    @property
    def _legal(self) -> ActionMasks:
        assert self._masks is not None, "faces check `begun` first"
        return self._masks
