"""Growth as Gymnasium environments: E networks as one `VectorEnv`, or a single one as an `Env`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray
from pydantic import ValidationError, model_validator

from esper.config.settings import Settings, describe_first_error
from esper.engine.config import EpisodeConfig
from esper.engine.observation import Feature, MaskTensors, Observation, list_features
from esper.errors import ConfigError
from esper.lifecycle.actions import count_choices
from esper.lifecycle.legality import ActionMasks, canonicalise
from esper.lifecycle.rules import Rules
from esper.numerics.arrays import Bools, Floats, Ints
from esper.numerics.devices import CPU, DeviceName, require_device
from esper.population.population import StrategyChoice
from esper.rl.episodes import Episodes, FinalScore
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
        self._device = require_device(settings.device)
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
        rolled_back[[incident.environment for incident in result.rollbacks]] = True
        return GrowthStep(result.reward, result.finished, effective, changed, rolled_back)

    def observation(self) -> Arrays:
        """What the agent sees, as `make_observation_arrays`."""
        return make_observation_arrays(self.episodes.observe(), self.masks)


def sizes_of(suite: Suite) -> tuple[int, ...]:
    """How many choices each of the eight heads has on a suite."""
    return count_choices(len(suite.sites), len(suite.blueprints))


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


def make_observation_arrays(observation: Observation, masks: ActionMasks) -> Arrays:
    """The observations of E networks, each array ``[E, ...]`` in the order of `Growth.observation_space`."""
    arrays = {name: part.cpu().numpy() for name, part in observation._asdict().items()}
    return {**arrays, "action_mask": masks.flat().astype(np.int8)}


def copy_conditional_masks(masks: ActionMasks) -> Arrays:
    """The exact masks by head, each bool ``[E, ...]``: a choice's legality given the choices before it.

    The flat mask of an observation cannot say that a blueprint fits one slot and not the other; these can. Shapes as
    in `esper.lifecycle.legality.ActionMasks`.
    """
    # Copies: an agent may write into what it was given, and the environment still decides by the originals.
    return {name: getattr(masks, name).copy() for name in MaskTensors._fields}


RESET_MASK = "reset_mask"

Info = dict[str, Any]
Transition = tuple[Arrays, Floats, Bools, Bools, Info]


class GrowthVectorEnv(VectorEnv[Arrays, Array, Array]):
    """One step is one decision per network, then its minibatches, then its evaluation.

    An episode has a fixed horizon, which the agent observes: its end is termination, never truncation. Nothing resets
    by itself here; ``reset(options={"reset_mask": bool [E]})`` begins new episodes where the mask is True and leaves
    all others as they are.

    Any integers ``[E, 8]`` are accepted as actions. Heads that an operation does not read become 0, an illegal action
    becomes WAIT, and ``info["action"]`` says what took effect. ``info["masks"]`` holds the exact conditional masks.
    As in all vector environments ``info["_key"]`` says for which networks ``info["key"]`` was set.

    Args:
        num_envs: E.
        settings: as `GrowthSettings`.

    Raises:
        TaskError: an unknown suite.
        ConfigError: another setting is not usable.
    """

    metadata: dict[str, Any] = {"render_modes": [], "autoreset_mode": AutoresetMode.DISABLED}
    autoreset_mode = AutoresetMode.DISABLED

    def __init__(self, num_envs: int = 1, **settings: Any) -> None:
        self.growth = Growth(num_envs, GrowthSettings.parse(settings))
        self.num_envs = num_envs
        self.single_observation_space = self.growth.observation_space
        self.single_action_space = action_space(self.growth.suite)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._generators: list[np.random.Generator | None] = [None] * num_envs

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Arrays, Info]:
        """Begin new episodes, everywhere or where ``options["reset_mask"]`` is True.

        Network i draws its instances, one after the other, from its own generator, seeded with ``seed + i`` or
        ``seed[i]``. Without a seed the generators go on.

        Raises:
            ConfigError: the mask, the seeds or an option are not usable.
            ResetNeeded: some networks are to be reset before all were.
        """
        super().reset(seed=seed if isinstance(seed, int) else None)
        rows = self._rows_to_reset(options or {})
        if not self.growth.begun and not rows.all():
            raise ResetNeeded("reset all networks once before resetting some of them")
        self.growth.begin(rows, self._generators_for(rows, seed))
        return self.growth.observation(), self._info()

    def step(self, actions: Array) -> Transition:
        """One decision per network, integers ``[E, 8]``.

        Raises:
            IllegalActionError: ``actions`` is no integer array of that shape.
            ResetNeeded: an episode has ended, or none was begun.
        """
        if not self.growth.begun:
            raise ResetNeeded("call reset() before step()")
        ended = self.growth.episodes.finished
        if ended.any():
            raise ResetNeeded(
                f"episodes {np.flatnonzero(ended).tolist()} have ended; reset them with options={{'{RESET_MASK}': ...}}"
            )
        stepped = self.growth.step(actions)
        info = {**self._info(), **_decision_info(stepped, ~ended)}
        return self.growth.observation(), stepped.reward, stepped.finished, np.zeros_like(ended), info

    def action_masks(self) -> Bools:
        """The flat masks ``[E, sum(head sizes)]``: choices that are legal under some legal earlier choice."""
        return self.growth.masks.flat()

    def final_score(self) -> FinalScore:
        """Score, accuracy and added parameters of the committed networks on test data, which nothing else reads."""
        return self.growth.episodes.final_score()

    def _info(self) -> Info:
        """What holds of every network now."""
        everyone = np.ones(self.num_envs, np.bool_)
        masks = _add_masks(copy_conditional_masks(self.growth.masks), everyone)
        names = np.array([instance.name for instance in self.growth.episodes.instances], object)
        return _add_masks({"masks": masks, "instance": names}, everyone)

    def _rows_to_reset(self, options: Mapping[str, Any]) -> Bools:
        """The networks to reset, bool ``[E]``."""
        unknown = sorted(options.keys() - {RESET_MASK})
        if unknown:
            raise ConfigError(f"unknown reset option '{unknown[0]}' (known: {RESET_MASK})")
        mask: Array = np.asarray(options.get(RESET_MASK, np.ones(self.num_envs, np.bool_)))
        if mask.dtype != np.bool_ or mask.shape != (self.num_envs,):
            raise ConfigError(f"{RESET_MASK} must be a bool array of shape ({self.num_envs},)")
        if not mask.any():
            raise ConfigError(f"{RESET_MASK} is False everywhere; there is nothing to reset")
        return mask

    def _generators_for(self, rows: Bools, seed: int | Sequence[int | None] | None) -> list[np.random.Generator]:
        """Every network's generator, renewed in ``rows`` where there is a seed."""
        if isinstance(seed, Sequence) and len(seed) != self.num_envs:
            raise ConfigError(f"{len(seed)} seeds for {self.num_envs} networks")
        seeds = seed if isinstance(seed, Sequence) else [None if seed is None else seed + i for i in range(len(rows))]
        generators: list[np.random.Generator] = []
        for row, present in enumerate(self._generators):
            renew = present is None or (rows[row] and seeds[row] is not None)
            generators.append(seeding.np_random(seeds[row])[0] if renew or present is None else present)
        self._generators = [*generators]
        return generators


class SameStepGrowth(GrowthVectorEnv):
    """As `GrowthVectorEnv`; an episode that ends begins anew in the same step.

    ``info["final_obs"]`` (object array of single observations) and ``info["final_info"]`` hold how it ended.
    """

    metadata: dict[str, Any] = {**GrowthVectorEnv.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}
    autoreset_mode = AutoresetMode.SAME_STEP

    def step(self, actions: Array) -> Transition:
        """As `GrowthVectorEnv.step`, with the first observation of the next episode where one has ended."""
        observation, rewards, terminations, truncations, info = super().step(actions)
        if not terminations.any():
            return observation, rewards, terminations, truncations, info
        final = np.full(self.num_envs, None, object)
        for row in np.flatnonzero(terminations):
            final[row] = {name: array[row] for name, array in observation.items()}
        ending = {"final_obs": final, "final_info": _restrict(info, terminations)}
        observation, fresh = self.reset(options={RESET_MASK: terminations})
        info = {**_restrict(info, ~terminations), **fresh, **_add_masks(ending, terminations)}
        return observation, rewards, terminations, truncations, info


class NextStepGrowth(GrowthVectorEnv):
    """As `GrowthVectorEnv`; the step after an episode's end ignores its action and begins a new one, at reward 0."""

    metadata: dict[str, Any] = {**GrowthVectorEnv.metadata, "autoreset_mode": AutoresetMode.NEXT_STEP}
    autoreset_mode = AutoresetMode.NEXT_STEP

    def step(self, actions: Array) -> Transition:
        """As `GrowthVectorEnv.step`, but a reset where the last step was an episode's end."""
        if not self.growth.begun or not self.growth.episodes.finished.any():
            return super().step(actions)
        ended = self.growth.episodes.finished
        # Networks share one program: those that ended are carried along by the others' step, whatever their action, and
        # then begin anew.
        stepped = self.growth.step(actions)
        observation, fresh = self.reset(options={RESET_MASK: ended})
        info = {**fresh, **_decision_info(stepped, ~ended)}
        rewards = np.where(ended, 0.0, stepped.reward)
        return observation, rewards, stepped.finished & ~ended, np.zeros_like(ended), info


_MODES = {kind.autoreset_mode: kind for kind in (GrowthVectorEnv, SameStepGrowth, NextStepGrowth)}


def make_vector(
    num_envs: int = 1, *, autoreset_mode: AutoresetMode | str = AutoresetMode.DISABLED, **arguments: Any
) -> GrowthVectorEnv:
    """The vector environment of an autoreset mode (``Disabled``, ``SameStep`` or ``NextStep``).

    Other arguments as `GrowthVectorEnv`.
    """
    names = [mode.value for mode in AutoresetMode]
    if not isinstance(autoreset_mode, AutoresetMode) and autoreset_mode not in names:
        raise ConfigError(f"unknown autoreset mode '{autoreset_mode}' (known: {', '.join(names)})")
    return _MODES[AutoresetMode(autoreset_mode)](num_envs, **arguments)


def _decision_info(stepped: GrowthStep, rows: Bools) -> Info:
    info = {
        "action": stepped.action,
        "canonicalised": stepped.canonicalised,
        "rolled_back": stepped.rolled_back,
    }
    return _add_masks(info, rows)


def _add_masks(values: Mapping[str, Any], rows: Bools) -> Info:
    """``values`` with Gymnasium's marks: ``_key`` is where ``key`` was set."""
    return {**values, **{f"_{key}": rows.copy() for key in values}}


def _restrict(info: Info, rows: Bools) -> Info:
    """The same ``info``, said of ``rows`` only."""
    values = {key: value for key, value in info.items() if not key.startswith("_")}
    nested = {key: _restrict(cast(Info, value), rows) for key, value in values.items() if isinstance(value, dict)}
    return _add_masks({**values, **nested}, rows)


class GrowthEnv(gymnasium.Env[dict[str, Any], Array]):
    """A view of one network: what `GrowthVectorEnv` is to E of them.

    Arguments, actions, observations and ``info`` are the same, without the axis over networks.

    Args:
        settings: as `GrowthSettings`.

    Raises:
        TaskError: an unknown suite.
        ConfigError: another setting is not usable.
    """

    metadata: dict[str, Any] = {"render_modes": []}

    def __init__(self, **settings: Any) -> None:
        self.growth = Growth(1, GrowthSettings.parse(settings))
        self.observation_space = self.growth.observation_space
        self.action_space = action_space(self.growth.suite)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Arrays, dict[str, Any]]:
        """Begin a new episode on an instance drawn from ``np_random``.

        Raises:
            ConfigError: there are no options.
        """
        super().reset(seed=seed)
        if options:
            raise ConfigError(f"unknown reset option '{next(iter(options))}' (known: none)")
        self.growth.begin(np.ones(1, np.bool_), [self.np_random])
        return _first_row(self.growth.observation()), self._info()

    def step(self, action: Array) -> tuple[Arrays, float, bool, bool, dict[str, Any]]:
        """One decision, integers ``[8]``.

        Raises:
            IllegalActionError: ``action`` is no integer array of that shape.
            ResetNeeded: the episode has ended, or none was begun.
        """
        if not self.growth.begun or self.growth.episodes.finished[0]:
            raise ResetNeeded("call reset() to begin an episode")
        stepped = self.growth.step(np.asarray(action)[None])
        info = {**self._info(), "action": stepped.action[0], "canonicalised": bool(stepped.canonicalised[0])}
        reward, finished = float(stepped.reward[0]), bool(stepped.finished[0])
        return _first_row(self.growth.observation()), reward, finished, False, info

    def action_masks(self) -> Bools:
        """The flat mask ``[sum(head sizes)]``: choices that are legal under some legal earlier choice."""
        return self.growth.masks.flat()[0]

    def final_score(self) -> float:
        """J of the committed network on test data, which nothing else reads."""
        return float(self.growth.episodes.final_score().score[0])

    def _info(self) -> dict[str, Any]:
        (instance,) = self.growth.episodes.instances
        return {"masks": _first_row(copy_conditional_masks(self.growth.masks)), "instance": instance.name}


def _first_row(arrays: Arrays) -> Arrays:
    return {name: array[0] for name, array in arrays.items()}
