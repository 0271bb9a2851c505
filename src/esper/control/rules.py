"""Controllers written by hand: never, uniform, replay, schedules, the heuristic and the look-ahead rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from esper.config.settings import Settings
from esper.control.controller import Actions, UniformStreams
from esper.engine.observation import LONGEST_PLATEAU, MOST_TRIES, FeatureReader, Observation
from esper.engine.promises import PromiseSettings
from esper.errors import ConfigError
from esper.lifecycle.actions import Head, Op, make_wait_actions
from esper.lifecycle.legality import ActionMasks, canonicalise
from esper.lifecycle.stages import LIVE
from esper.numerics.arrays import Bools, Float32s, Floats, Ints


class ActionBuilder:
    """Starts with WAIT everywhere; each call settles some of the networks that are still open."""

    def __init__(self, masks: ActionMasks) -> None:
        self._masks = masks
        self.actions: Actions = make_wait_actions(masks.environments)
        self.open: Bools = np.ones(masks.environments, np.bool_)

    def act_on(self, op: Op, due: Bools) -> None:
        """Do ``op`` (FOSSILIZE, PRUNE at once, or ADVANCE) in the first slot that is ``due``, bool ``[E, S]``."""
        possible = due & self._masks.slot[:, op] & self.open[:, None]
        rows = np.flatnonzero(possible.any(axis=1))
        self.actions[rows, Head.OP] = op
        self.actions[rows, Head.SLOT] = possible[rows].argmax(1)
        if op is Op.PRUNE:
            self.actions[rows, Head.ALPHA_SPEED] = self._masks.alpha_speed[rows].argmax(1)
            self.actions[rows, Head.ALPHA_CURVE] = self._masks.alpha_curve[rows].argmax(1)
        self.open[rows] = False

    def germinate(self, slot: Ints, blueprint: Ints, due: Bools) -> None:
        """Germinate ``blueprint[e]`` in ``slot[e]`` where ``due``: the fastest tempo, the largest alpha allowed.

        Tempos and targets are on offer in rising order.
        """
        everyone = np.arange(len(slot))
        possible = self._masks.slot[everyone, Op.GERMINATE, slot] & self._masks.blueprint[everyone, slot, blueprint]
        rows = np.flatnonzero(due & possible & self.open)
        self.actions[rows, Head.OP] = Op.GERMINATE
        self.actions[rows, Head.SLOT] = slot[rows]
        self.actions[rows, Head.BLUEPRINT] = blueprint[rows]
        self.actions[rows, Head.BLEND] = self._masks.blend[rows].argmax(1)
        self.actions[rows, Head.TEMPO] = self._masks.tempo[rows].argmax(1)
        self.actions[rows, Head.ALPHA_TARGET] = _find_last(self._masks.germination_target[rows])
        self.open[rows] = False


def _find_last(legal: Bools) -> Ints:
    """Index of the last True column of each row."""
    return legal.shape[1] - 1 - legal[:, ::-1].argmax(1)


Numbers: TypeAlias = NDArray[Any]
"""Numbers of any precision."""

ROUNDING = 1e-6
"""Ages are shares of the episode in float32."""


def count_unfinished(reading: FeatureReader) -> Float32s:
    """How many unfinished seeds each network has, ``[E]``."""
    return np.sum([reading.slot(f"stage_{stage.name.lower()}") for stage in LIVE], axis=(0, 2))


def seed_rent(reading: FeatureReader) -> Float32s:
    """The rent each resident seed adds to the network's, ``[E, S]``: what it would save to be without it."""
    cost = np.expm1(reading.slot("resident_cost"))
    total = np.expm1(reading.network("log_added_parameters"))
    return compute_marginal_rents(reading.network("rent"), cost, total)


def compute_marginal_rents(rent: Numbers, cost: Numbers, total: Numbers) -> Numbers:
    """What each seed adds to the rent ``rent * log1p(total)``, ``[E, S]``.

    ``rent`` and ``total``, the parameters of all seeds that count, are ``[E]``; ``cost``, those of each, ``[E, S]``;
    parameters are relative to the host's.
    """
    without = np.maximum(total[:, None] - cost, 0.0)
    return rent[:, None] * (np.log1p(without + cost) - np.log1p(without))


def keep_or_prune(decisions: ActionBuilder, reading: FeatureReader, trial: float, margin: float) -> None:
    """Fossilize the held seeds whose accuracy contribution exceeds their rent by ``margin``, prune the others.

    A seed is judged once its stage's age reaches ``trial``, a share of the episode, and something is known of it.
    """
    held = (reading.slot("stage_holding") > 0) & (reading.slot("measured") > 0)
    due = held & (reading.slot("stage_age") >= trial - ROUNDING)
    worth = reading.slot("accuracy_contribution") - seed_rent(reading) >= margin
    decisions.act_on(Op.FOSSILIZE, due & worth)
    decisions.act_on(Op.PRUNE, due & ~worth)


class Never:
    """Never grows."""

    name = "none"

    def start(self, seeds: Sequence[int]) -> None:
        """No state."""

    def act(self, observation: Observation, masks: ActionMasks, state: None) -> tuple[Actions, None]:
        """WAIT everywhere."""
        return make_wait_actions(masks.environments), None


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
        actions = make_wait_actions(masks.environments)
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


@dataclass(frozen=True)
class Planting:
    """Germinate ``blueprint`` in ``slot`` (both as indices) at decision ``step`` or as soon after as is legal."""

    step: int
    slot: int
    blueprint: int


class Schedule:
    """Carries out a list of plantings and keeps whatever may be kept: it advances and fossilizes as the gates allow.

    ``keep_after``: decisions a seed is held before it is fossilized. ``patience``: decisions without progress
    (`History.plateau_age`) before the first planting, as many as are told apart at most; 0: none is waited for.
    ``latest``: once more than that share of the growth is over, no plateau is waited for.

    Raises:
        ConfigError: the patience is out of range.
    """

    def __init__(
        self,
        plantings: Sequence[Planting],
        horizon: int,
        name: str = "schedule",
        keep_after: int = 1,
        patience: float = 0,
        latest: float = 1.0,
    ) -> None:
        if not 0 <= patience <= LONGEST_PLATEAU:
            raise ConfigError(f"patience {patience:g} must be from 0 to {LONGEST_PLATEAU:g} decisions")
        self.name, self.patience = name, patience
        self.plantings = tuple(plantings)
        self._horizon = horizon
        self._keep_age = keep_after / horizon
        self._latest = latest

    def start(self, seeds: Sequence[int]) -> Bools:
        """Which plantings are done, ``[E, number of plantings]``."""
        return np.zeros((len(seeds), len(self.plantings)), np.bool_)

    def act(self, observation: Observation, masks: ActionMasks, state: Bools) -> tuple[Actions, Bools]:
        """The first planting that is due, else advance, else fossilize, else wait."""
        reading, decisions, done = FeatureReader(observation), ActionBuilder(masks), state.copy()
        progress = reading.network("progress")
        step = np.rint(progress * self._horizon)
        everyone = np.ones(len(step), np.int64)
        waited = reading.network("plateau_age") * LONGEST_PLATEAU >= self.patience - ROUNDING
        begun = done.any(axis=1) | waited | (progress > self._latest + ROUNDING)
        for index, planting in enumerate(self.plantings):
            due = begun & (step >= planting.step) & ~done[:, index] & decisions.open
            if due.any():
                decisions.germinate(everyone * planting.slot, everyone * planting.blueprint, due)
                done[:, index] |= due & ~decisions.open
        decisions.act_on(Op.ADVANCE, masks.slot[:, Op.ADVANCE])
        held = reading.slot("stage_holding") > 0
        decisions.act_on(Op.FOSSILIZE, held & (reading.slot("stage_age") >= self._keep_age - ROUNDING))
        return decisions.actions, done


class PeriodicSettings(Settings):
    """When the clock strikes, and what it brings."""

    period: int = Field(default=2, ge=1, le=1000)
    """Decisions from one germination to the next."""
    plantings: tuple[tuple[int, int], ...] = ((0, 0),)
    """Slot and blueprint indices, germinated in this order, then again from the first."""
    trial: int = Field(default=6, ge=1, le=1000)
    """Decisions a seed is held before it is judged."""
    margin: float = Field(default=0.0, ge=-1, le=1)
    """Accuracy points above its rent that a seed must contribute to be kept."""
    stop_after: float = Field(default=0.6, ge=0, le=1)
    """Share of the episode after which nothing new germinates."""


class Periodic:
    """Every ``period`` decisions the next planting whose slot is free; each seed is judged after its trial."""

    name = "periodic"

    def __init__(self, settings: PeriodicSettings, horizon: int) -> None:
        self._settings = settings
        self._horizon = horizon

    def start(self, seeds: Sequence[int]) -> Ints:
        """The clock of each network and how many plantings it has had, ``[2, E]``."""
        return np.stack([np.full(len(seeds), -1), np.zeros(len(seeds), np.int64)])

    def act(self, observation: Observation, masks: ActionMasks, state: Ints) -> tuple[Actions, Ints]:
        """Advance what may be, else judge what is due, else plant if the clock says so, else wait.

        The clock is the number of the decision as progress tells it; where progress stands still, it goes on.
        """
        settings, reading, decisions = self._settings, FeatureReader(observation), ActionBuilder(masks)
        decisions.act_on(Op.ADVANCE, masks.slot[:, Op.ADVANCE])
        keep_or_prune(decisions, reading, settings.trial / self._horizon, settings.margin)
        progress = reading.network("progress")
        before, planted = state
        clock = np.maximum(np.rint(progress * self._horizon).astype(np.int64), before + 1)
        due = (clock >= planted * settings.period) & (progress <= settings.stop_after)
        plantings = np.array(settings.plantings, np.int64)[planted % len(settings.plantings)]
        unsettled = decisions.open.copy()
        decisions.germinate(plantings[:, 0], plantings[:, 1], due)
        return decisions.actions, np.stack([clock, planted + (unsettled & ~decisions.open)])


class HeuristicSettings(Settings):
    """Thresholds of the rule, and its guesses."""

    preferences: tuple[tuple[int, int], ...] = ((0, 0),)
    """Slot and blueprint indices, most promising first. What was tried before comes last."""
    patience: float = Field(default=0.0, ge=0, le=10)
    """Decisions without progress (`History.plateau_age`) before a seed germinates; 0: at once."""
    at_a_time: int = Field(default=2, ge=1, le=100)
    """Unfinished seeds a network may have."""
    most: int = Field(default=3, ge=1, le=100)
    """Seeds a network may have, kept ones included."""
    trial: int = Field(default=6, ge=1, le=1000)
    """Decisions a seed is held before it is judged."""
    margin: float = Field(default=0.0, ge=-1, le=1)
    """Accuracy points above its rent that a seed must contribute to be kept."""
    stop_after: float = Field(default=0.6, ge=0, le=1)
    """Share of the episode after which nothing new germinates."""
    narrowest: float = Field(default=0.0, ge=0, le=1)
    """A slot is tried only if its width is at least this share of the network's widest slot."""


class Heuristic:
    """Looks at all slots of a network: advances and judges seeds as their gates allow, and germinates on plateaus."""

    name = "heuristic"

    def __init__(self, settings: HeuristicSettings, horizon: int) -> None:
        self._settings = settings
        self._horizon = horizon

    def start(self, seeds: Sequence[int]) -> None:
        """No state: all it needs to remember is in the observation."""

    def act(self, observation: Observation, masks: ActionMasks, state: None) -> tuple[Actions, None]:
        """One decision per network."""
        settings, reading, decisions = self._settings, FeatureReader(observation), ActionBuilder(masks)
        decisions.act_on(Op.ADVANCE, masks.slot[:, Op.ADVANCE])
        keep_or_prune(decisions, reading, settings.trial / self._horizon, settings.margin)
        slot, blueprint, found = self._best_guess(reading, masks)
        decisions.germinate(slot, blueprint, found & self._may_try(reading))
        return decisions.actions, None

    def _may_try(self, reading: FeatureReader) -> Bools:
        settings = self._settings
        unfinished, fossils = count_unfinished(reading), reading.slot("stage_fossilized").sum(1)
        stuck = reading.network("plateau_age") * LONGEST_PLATEAU >= settings.patience - ROUNDING
        few = (unfinished < settings.at_a_time) & (unfinished + fossils < settings.most)
        return stuck & few & (reading.network("progress") <= settings.stop_after)

    def _best_guess(self, reading: FeatureReader, masks: ActionMasks) -> tuple[Ints, Ints, Bools]:
        """The first preference that is legal, wide enough and tried least: slot, blueprint, whether there is one."""
        preferences = np.array(self._settings.preferences, np.int64)
        slots, blueprints = preferences[:, 0], preferences[:, 1]
        widths = np.exp(reading.slot("log_width"))
        wide = widths >= self._settings.narrowest * widths.max(1, keepdims=True) - ROUNDING
        possible = masks.blueprint[:, slots, blueprints] & masks.slot[:, Op.GERMINATE][:, slots] & wide[:, slots]
        tried = reading.blueprint("tries")[:, slots, blueprints]
        rank = np.where(possible, np.rint(tried * MOST_TRIES) * len(preferences) + np.arange(len(preferences)), np.inf)
        best = rank.argmin(1)
        return slots[best], blueprints[best], possible.any(1)


class LookSettings(Settings):
    """When it plants, and how long it tries. One set for every host, found on the token suite's training instances."""

    promise: PromiseSettings = PromiseSettings()
    """How it looks."""
    fitted: float = Field(default=0.75, ge=0, le=1)
    """Weight of the fitted promise; the held-out one has the rest."""
    price: float = Field(default=0.05, ge=0, le=10)
    """What ``log1p(parameters / host parameters)`` of a candidate takes from its promise."""
    threshold: float = Field(default=0.05, ge=-1, le=1)
    """What must be left of a promise for a seed to be planted."""
    trial: int = Field(default=3, ge=1, le=1000)
    """Decisions a seed is held before it is judged."""
    margin: float = Field(default=0.02, ge=-1, le=1)
    """Accuracy points above its rent that a seed must contribute to be kept."""
    stop_after: float = Field(default=0.75, ge=0, le=1)
    """Share of the episode after which nothing new germinates."""


class LookRule:
    """Has no preferences: it goes by what is measured of this network, before a seed is planted and after."""

    name = "look"

    def __init__(self, settings: LookSettings, horizon: int) -> None:
        self._settings = settings
        self._horizon = horizon
        self.promise: PromiseSettings | None = settings.promise

    def start(self, seeds: Sequence[int]) -> None:
        """No state: all it needs to remember is in the observation."""

    def act(self, observation: Observation, masks: ActionMasks, state: None) -> tuple[Actions, None]:
        """One decision per network.

        Raises:
            ConfigError: nobody measured what is promised.
        """
        settings, reading, decisions = self._settings, FeatureReader(observation), ActionBuilder(masks)
        if not reading.shows_promise:
            raise ConfigError("controller 'look' goes by what blueprints promise: set conduct.promise")
        decisions.act_on(Op.ADVANCE, masks.slot[:, Op.ADVANCE])
        keep_or_prune(decisions, reading, settings.trial / self._horizon, settings.margin)
        slot, blueprint, found = self._most_promising(reading, masks)
        decisions.germinate(slot, blueprint, found & self._may_plant(reading))
        return decisions.actions, None

    def _may_plant(self, reading: FeatureReader) -> Bools:
        """One at a time, and only by what was measured just now: an older promise is of another network."""
        early = reading.network("progress") <= self._settings.stop_after + ROUNDING
        return early & (reading.network("promise_age") == 0) & (count_unfinished(reading) == 0)

    def _most_promising(self, reading: FeatureReader, masks: ActionMasks) -> tuple[Ints, Ints, Bools]:
        """The legal and untried candidate with the most promise less its price: slot, blueprint, whether it is enough.

        A promise of exactly 0 was not measured, or is of what no step can help.
        """
        settings, fitted, held_out = self._settings, reading.blueprint("promise"), reading.blueprint("promise_held_out")
        worth: Floats = settings.fitted * fitted + (1 - settings.fitted) * held_out
        worth = worth - settings.price * reading.blueprint("cost")
        possible = masks.blueprint & masks.slot[:, Op.GERMINATE, :, None] & (reading.blueprint("tries") == 0)
        flat = np.where(possible & ((fitted != 0) | (held_out != 0)), worth, -np.inf).reshape(len(worth), -1)
        best = flat.argmax(1)
        enough = flat[np.arange(len(best)), best] > settings.threshold
        return *np.divmod(best, worth.shape[2]), enough
