"""Growth as Gymnasium environments: E networks as one `VectorEnv`, or a single one as an `Env`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from pydantic import Field, ValidationError, model_validator

from esper.config.settings import MOST_AT_ONCE, Settings, describe_first_error
from esper.engine.engine import GrowthConfig
from esper.engine.observation import Feature, MaskTensors, list_features
from esper.errors import ConfigError, plural
from esper.lifecycle.actions import count_choices
from esper.lifecycle.rules import ActionMasks, Rules, canonicalise
from esper.numerics.arrays import Bools, Floats
from esper.numerics.devices import CPU, DeviceName, require_device
from esper.population.population import StrategyChoice
from esper.rl.episodes import Episodes, FinalScore, StepResult
from esper.rl.rewards import OUTCOME, RewardSpec, assign_rewards, name_rewards
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite
from esper.tasks.suite import Split
from esper.tasks.suite_files import allow_file, split_name

Array = NDArray[Any]
Arrays = dict[str, Array]


class GrowthSettings(Settings):
    """The keyword arguments of ``esper/Growth-v0``."""

    suite: str = "tokens"
    """The distribution of learning problems."""
    split: Split = "train"
    """Instances of the suite: train, heldout or transfer."""
    rules: Rules = Rules()
    """Lifecycle rules, or a mapping of their fields."""
    growth: GrowthConfig = GrowthConfig()
    """Governor, budget of growth, and early ends of episodes, or a mapping of its fields."""
    reward: RewardSpec = (OUTCOME,)
    """Reward: name of a mode, its settings, or a list of these that networks use in turn."""
    strategy: StrategyChoice = "stacked"
    """Run networks stacked or looped, or auto for the faster; results differ only in rounding."""
    networks_per_pass: int | None = Field(default=None, ge=1, le=MOST_AT_ONCE)
    """Maximum number of networks computed at once; null: all. Changes only rounding."""
    examples_per_pass: int | None = Field(default=None, ge=1, le=MOST_AT_ONCE)
    """Maximum number of a network's examples computed at once; null: all. Changes only rounding. Not possible for hosts
    with batch normalisation or dropout."""
    bf16: bool = False
    """Run forward passes of networks in bfloat16 by torch's autocast."""
    device: DeviceName = CPU
    """Torch device of the networks."""

    @model_validator(mode="after")
    def _require_measured_slots(self) -> Self:
        self.growth.require_measurements(get_suite(self.suite).steps)
        return self

    @classmethod
    def parse(cls, arguments: Mapping[str, Any]) -> GrowthSettings:
        """Settings from keyword arguments. A file that the caller names as ``suite``, in ``FILE.py:NAME``, is run.

        Raises:
            ConfigError: an argument is not usable; the message names the first mistake.
        """
        suite = arguments.get("suite")
        path = split_name(suite)[0] if isinstance(suite, str) else None
        if path is not None:
            allow_file(path)
        try:
            return cls.model_validate(dict(arguments))
        except ValidationError as error:
            raise ConfigError(describe_first_error(error, cls).sentence) from error


def _make_box(features: Sequence[Feature], leading: tuple[int, ...]) -> spaces.Box:
    shape = (*leading, len(features))
    low, high = (np.array([getattr(one, end) for one in features], np.float32) for end in ("low", "high"))
    return spaces.Box(np.broadcast_to(low, shape), np.broadcast_to(high, shape), shape, np.float32)


RESET_MASK = "reset_mask"

Info = dict[str, Any]
Transition = tuple[Arrays, Floats, Bools, Bools, Info]


# Vector environments, one per autoreset mode


class GrowthVectorEnv(VectorEnv[Arrays, Array, Array]):
    """One step is one decision per network, then its minibatches, then its evaluation.

    An episode has a fixed horizon, which the agent observes: its end is termination, never truncation. Nothing
    resets automatically here; ``reset(options={"reset_mask": bool [E]})`` begins new episodes where it is True, and
    leaves the others as they are.

    Any integers ``[E, 8]`` are accepted as actions. Heads that an operation does not use become 0, an illegal action
    becomes WAIT, and ``info["action"]`` is the action that took effect. ``info["masks"]`` are the exact conditional
    masks. As in all vector environments, ``info["_key"]`` shows for which networks ``info["key"]`` was set.

    Args:
        num_envs: The number of networks E.
        settings: Keyword arguments as in `GrowthSettings`.

    Raises:
        TaskError: an unknown suite.
        ConfigError: another setting is not usable, such as a reward whose cost changes during a training.
    """

    metadata: dict[str, Any] = {"render_modes": [], "autoreset_mode": AutoresetMode.DISABLED}
    autoreset_mode = AutoresetMode.DISABLED

    def __init__(self, num_envs: int = 1, **settings: Any) -> None:
        if num_envs < 1:
            raise ConfigError(f"num_envs is {num_envs}: give at least 1")
        self._settings = given = GrowthSettings.parse(settings)
        if any(reward.intervention_after for reward in given.reward):
            raise ConfigError(
                "reward.intervention_after: an environment does not know how much of the training is done; leave it "
                "out here, or train with `esper train`, which raises the cost of interventions as it says"
            )
        self.num_envs = num_envs
        self.suite = suite = get_suite(given.suite)
        self._device = require_device(given.device)

        # One network's observation: the declared features in their declared ranges, and the flat action mask.
        slots, blueprints = len(suite.sites), len(suite.blueprints)
        self.single_action_space = spaces.MultiDiscrete(list(count_choices(slots, blueprints)))
        features = list_features(given.growth.promise is not None)
        parts: dict[str, spaces.Space[Any]] = {
            "globals": _make_box(features.globals, ()),
            "slots": _make_box(features.slots, (slots,)),
            "blueprints": _make_box(features.blueprints, (slots, blueprints)),
            "action_mask": spaces.MultiBinary(int(self.single_action_space.nvec.sum())),
        }
        self.single_observation_space = spaces.Dict(parts)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.generators: list[np.random.Generator | None] = [None] * num_envs
        """From which each network draws its instances; None before its first one."""
        self._episodes: Episodes | None = None
        self._masks: ActionMasks | None = None

    @property
    def episodes(self) -> Episodes:
        """The current episodes, after the first `reset`."""
        if self._episodes is None:
            raise ResetNeeded("call reset() first")
        return self._episodes

    @property
    def masks(self) -> ActionMasks:
        """The legal actions now, after the first `reset`."""
        if self._masks is None:
            raise ResetNeeded("call reset() first")
        return self._masks

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Arrays, Info]:
        """Start new episodes, everywhere or where ``options["reset_mask"]`` is True.

        Network i draws its instances, one after the other, from its own generator, seeded with ``seed + i`` or
        ``seed[i]``. Without a seed, the generators continue.

        Raises:
            ConfigError: the mask, the seeds or an option are invalid.
            ResetNeeded: only some networks would be reset before the first reset of all.
        """
        super().reset(seed=seed if isinstance(seed, int) else None)
        rows = self._rows_to_reset(options or {})
        if self._episodes is None and not rows.all():
            raise ResetNeeded("reset all networks once before resetting some of them")
        self._begin(rows, seed)
        return self.observe(), self.describe()

    def step(self, actions: Array) -> Transition:
        """One decision per network, integers ``[E, 8]``.

        Raises:
            IllegalActionError: ``actions`` is not an integer array of that shape.
            ResetNeeded: an episode has ended, or none was begun.
        """
        ended = self.episodes.finished
        if ended.any():
            raise ResetNeeded(
                f"episodes {np.flatnonzero(ended).tolist()} have ended; reset them with options={{'{RESET_MASK}': ...}}"
            )
        result, step_info = self.decide(actions)
        info = {**self.describe(), **_add_masks(step_info, ~ended)}
        return self.observe(), result.reward, result.finished, np.zeros_like(ended), info

    def action_masks(self) -> Bools:
        """The flat masks ``[E, sum(head sizes)]``: choices that are legal under some legal earlier choice."""
        return self.masks.flat()

    def final_score(self) -> FinalScore:
        """Score, accuracy and added parameters of the committed networks on test data, which nothing else reads."""
        return self.episodes.final_score()

    def observe(self) -> Arrays:
        """The observations, each array ``[E, ...]``, in the order of the observation space."""
        arrays = {name: part.cpu().numpy() for name, part in self.episodes.observe()._asdict().items()}
        return {**arrays, "action_mask": self.masks.flat().astype(np.int8)}

    def describe(self) -> Info:
        """The info of all networks: exact masks by head, names of instances, and the reward mode that pays each.

        The flat mask of an observation cannot show that a blueprint fits one slot and not the other; these can. Shapes
        as in `ActionMasks`.
        """
        all_rows = np.ones(self.num_envs, np.bool_)
        # Copies: an agent may write into them, and the environment still decides by the originals.
        masks = {name: getattr(self.masks, name).copy() for name in MaskTensors._fields}
        names = np.array([instance.name for instance in self.episodes.instances], object)
        rewards = np.array(assign_rewards(name_rewards(self._settings.reward), self.num_envs), object)
        return _add_masks({"masks": _add_masks(masks, all_rows), "instance": names, "reward_mode": rewards}, all_rows)

    # Agents act within `torch.no_grad` or `inference_mode`, but networks learn: leaving the latter ends the former too.
    @torch.inference_mode(False)
    def decide(self, actions: Array) -> tuple[StepResult, Info]:
        """Take one decision per network from any integers ``[E, 8]``, also in episodes that have ended.

        Returns:
            The result, and an info dictionary: the ``action`` that took effect ``[E, 8]``, whether it differs from the
            one passed (``canonicalised [E]``), and whether the governor rolled the network back (``rolled_back [E]``).
        """
        # Samples of the action space are rarely legal, so illegal actions are replaced instead of rejected.
        episodes = self.episodes
        effective, changed = canonicalise(np.asarray(actions), self.masks)
        result = episodes.step(effective.astype(np.int64))
        self._masks = episodes.legal_actions()
        return result, {"action": effective, "canonicalised": changed, "rolled_back": result.intervention.rows}

    @torch.inference_mode(False)
    def _begin(self, rows: Bools, seed: int | Sequence[int | None] | None) -> None:
        """Start new episodes in ``rows``, bool ``[E]``, on instances that each network draws from its own generator."""
        if isinstance(seed, Sequence) and len(seed) != self.num_envs:
            raise ConfigError(f"{plural(len(seed), 'seed')} for {plural(self.num_envs, 'network')}")
        seeds = seed if isinstance(seed, Sequence) else [None if seed is None else seed + i for i in range(len(rows))]
        indices, settings = rows.nonzero()[0], self._settings
        instances: list[Instance] = []
        for row in indices.tolist():
            generator = self.generators[row]
            if generator is None or seeds[row] is not None:
                generator = self.generators[row] = seeding.np_random(seeds[row])[0]
            instances += self.suite.sample(1, settings.split, generator)
        if self._episodes is None:
            self._episodes = Episodes(
                self.suite,
                instances,
                settings.rules,
                settings.growth,
                rewards=assign_rewards(settings.reward, self.num_envs),
                strategy=settings.strategy,
                networks_per_pass=settings.networks_per_pass,
                examples_per_pass=settings.examples_per_pass,
                bf16=settings.bf16,
                device=self._device,
            )
        else:
            self._episodes.restart(indices, instances)
        self._masks = self._episodes.legal_actions()

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


class SameStepGrowth(GrowthVectorEnv):
    """`GrowthVectorEnv` in which the next episode starts in the same step in which one ends.

    ``info["final_obs"]`` (object array of single observations) and ``info["final_info"]`` describe the end of an
    episode.
    """

    metadata: dict[str, Any] = {**GrowthVectorEnv.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}
    autoreset_mode = AutoresetMode.SAME_STEP

    def step(self, actions: Array) -> Transition:
        """As `GrowthVectorEnv.step`, with the first observation of the next episode where one has ended."""
        observation, rewards, terminations, truncations, info = super().step(actions)
        if not terminations.any():
            return observation, rewards, terminations, truncations, info
        # The last observation and info are kept beside the first ones of the new episodes, as Gymnasium prescribes.
        final = np.full(self.num_envs, None, object)
        for row in np.flatnonzero(terminations):
            final[row] = {name: array[row] for name, array in observation.items()}
        ending = {"final_obs": final, "final_info": _restrict(info, terminations)}
        observation, fresh = self.reset(options={RESET_MASK: terminations})
        info = {**_restrict(info, ~terminations), **fresh, **_add_masks(ending, terminations)}
        return observation, rewards, terminations, truncations, info


class NextStepGrowth(GrowthVectorEnv):
    """`GrowthVectorEnv` in which the step after an episode's end ignores its action, starts a new one and pays 0."""

    metadata: dict[str, Any] = {**GrowthVectorEnv.metadata, "autoreset_mode": AutoresetMode.NEXT_STEP}
    autoreset_mode = AutoresetMode.NEXT_STEP

    def step(self, actions: Array) -> Transition:
        """As `GrowthVectorEnv.step`, but a reset where the last step was an episode's end."""
        ended = self.episodes.finished
        if not ended.any():
            return super().step(actions)
        # Networks share one program: those that ended take part in the step of the others, whatever their action, and
        # are reset after it.
        result, step_info = self.decide(actions)
        observation, fresh = self.reset(options={RESET_MASK: ended})
        info = {**fresh, **_add_masks(step_info, ~ended)}
        rewards = np.where(ended, 0.0, result.reward)
        return observation, rewards, result.finished & ~ended, np.zeros_like(ended), info


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


def _add_masks(values: Mapping[str, Any], rows: Bools) -> Info:
    """``values`` with Gymnasium's marks: ``_key`` is where ``key`` was set."""
    return {**values, **{f"_{key}": rows.copy() for key in values}}


def _restrict(info: Info, rows: Bools) -> Info:
    """The ``info`` restricted to ``rows``."""
    values = {key: value for key, value in info.items() if not key.startswith("_")}
    nested = {key: _restrict(cast(Info, value), rows) for key, value in values.items() if isinstance(value, dict)}
    return _add_masks({**values, **nested}, rows)


# A single environment


class GrowthEnv(gymnasium.Env[dict[str, Any], Array]):
    """An environment with one network: as `GrowthVectorEnv`, without the axis over networks in arguments and results.

    Arguments and errors are those of `GrowthVectorEnv`, except ``num_envs``.
    """

    metadata: dict[str, Any] = {"render_modes": []}

    def __init__(self, **settings: Any) -> None:
        if "num_envs" in settings:
            raise ConfigError("num_envs is an argument of GrowthVectorEnv: make that one with gymnasium.make_vec")
        self.vector = GrowthVectorEnv(1, **settings)
        """The same network as a vector environment."""
        self.observation_space = self.vector.single_observation_space
        self.action_space = self.vector.single_action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Arrays, dict[str, Any]]:
        """Start a new episode on an instance drawn from ``np_random``.

        Raises:
            ConfigError: an option is given.
        """
        super().reset(seed=seed)
        if options:
            raise ConfigError(f"unknown reset option '{next(iter(options))}' (known: none)")
        self.vector.generators = [self.np_random]
        observation, info = self.vector.reset()
        return _first_row(observation), _describe_first(info)

    def step(self, action: Array) -> tuple[Arrays, float, bool, bool, dict[str, Any]]:
        """One decision, integers ``[8]``.

        Raises:
            IllegalActionError: ``action`` is not an integer array of that shape.
            ResetNeeded: the episode has ended, or none was begun.
        """
        vector = self.vector
        if vector.episodes.finished[0]:
            raise ResetNeeded("call reset() to begin an episode")
        observation, reward, finished, _, info = vector.step(np.asarray(action)[None])
        info = {
            **_describe_first(info),
            "action": info["action"][0],
            "canonicalised": bool(info["canonicalised"][0]),
        }
        return _first_row(observation), float(reward[0]), bool(finished[0]), False, info

    def action_masks(self) -> Bools:
        """The flat mask ``[sum(head sizes)]``: choices that are legal under some legal earlier choice."""
        return self.vector.action_masks()[0]

    def final_score(self) -> float:
        """J of the committed network on test data, which nothing else reads."""
        return float(self.vector.final_score().score[0])


def _describe_first(info: Info) -> Info:
    masks = {name: mask for name, mask in info["masks"].items() if not name.startswith("_")}
    return {"masks": _first_row(masks), "instance": info["instance"][0], "reward_mode": info["reward_mode"][0]}


def _first_row(arrays: Arrays) -> Arrays:
    return {name: array[0] for name, array in arrays.items()}
