"""Controllers written by hand: never, uniform, replay, schedules, the heuristic and the look-ahead rule.

A rule reads the observation's features by name, handles the seeds that are there (advance, keep, prune), and then
germinates. `ActionBuilder` turns each step into legal actions for the networks still undecided.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from esper.config.settings import Settings
from esper.control.controller import Actions, CandidateRating, UniformStreams
from esper.engine.observation import LONGEST_PLATEAU, MOST_TRIES, FeatureReader, Observation
from esper.errors import ConfigError
from esper.growth.promise import PromiseSettings
from esper.lifecycle.actions import Head, Op, make_wait_actions
from esper.lifecycle.rules import ActionMasks, canonicalise
from esper.lifecycle.table import LIVE, Figures, SeedRating
from esper.numerics.arrays import Bools, Float32s, Floats, Ints

Numbers: TypeAlias = NDArray[Any]
"""Numbers of any precision."""

ROUNDING = 1e-6
"""Tolerance in comparing features: ages and progress are float32 shares of the episode."""


class ActionBuilder:
    """Legal actions of E networks, built step by step: WAIT, until a call decides for networks that are still open."""

    def __init__(self, masks: ActionMasks) -> None:
        self._masks = masks
        self.actions: Actions = make_wait_actions(masks.environments)
        """The actions so far, int64 ``[E, 8]``."""
        self.open: Bools = np.ones(masks.environments, np.bool_)
        """Networks that no call has decided for yet, ``[E]``."""

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
        """Germinate ``blueprint[e]`` in ``slot[e]`` where ``due``: the fastest tempo, the largest alpha allowed."""
        everyone = np.arange(len(slot))
        possible = self._masks.slot[everyone, Op.GERMINATE, slot] & self._masks.blueprint[everyone, slot, blueprint]
        rows = np.flatnonzero(due & possible & self.open)
        targets = self._masks.germination_target[rows]
        self.actions[rows, Head.OP] = Op.GERMINATE
        self.actions[rows, Head.SLOT] = slot[rows]
        self.actions[rows, Head.BLUEPRINT] = blueprint[rows]
        self.actions[rows, Head.BLEND] = self._masks.blend[rows].argmax(1)
        # Tempos and alpha targets are in rising order: the first legal tempo, the last legal target.
        self.actions[rows, Head.TEMPO] = self._masks.tempo[rows].argmax(1)
        self.actions[rows, Head.ALPHA_TARGET] = targets.shape[1] - 1 - targets[:, ::-1].argmax(1)
        self.open[rows] = False


def count_unfinished_seeds(features: FeatureReader) -> Float32s:
    """The number of unfinished seeds of each network, ``[E]``."""
    return np.sum([features.slot(f"stage_{stage.name.lower()}") for stage in LIVE], axis=(0, 2))


def compute_seed_rents(features: FeatureReader) -> Float32s:
    """The rent each resident seed adds to the network's, ``[E, S]``: what it would save to be without it."""
    # The features are log1p of relative sizes.
    cost = np.expm1(features.slot("resident_cost"))
    total = np.expm1(features.network("log_added_parameters"))
    return compute_marginal_rents(features.network("rent"), cost, total)


def compute_marginal_rents(rent: Numbers, cost: Numbers, total: Numbers) -> Numbers:
    """What each seed adds to the rent ``rent * log1p(total)``, ``[E, S]``.

    ``rent`` and ``total``, the parameters of all seeds that count, are ``[E]``; ``cost``, those of each, ``[E, S]``;
    parameters are relative to the host's.
    """
    without = np.maximum(total[:, None] - cost, 0.0)
    return rent[:, None] * (np.log1p(without + cost) - np.log1p(without))


def rate_seeds(features: FeatureReader, margin: float = 0.0) -> SeedRating[Figures]:
    """Rate every seed: it is kept if its contribution to the score exceeds its rent by ``margin``."""
    measured = features.slot("measured") > 0
    names = "accuracy_contribution", "loss_gain", "loss_gain_error"
    contribution, loss_gain, loss_error = (np.where(measured, features.slot(name), np.nan) for name in names)
    price, unknown = compute_seed_rents(features), np.full_like(contribution, np.nan)
    return SeedRating(
        contribution=contribution,
        error=unknown,
        price=price,
        threshold=price + margin,
        loss_gain=loss_gain,
        loss_error=loss_error,
        loss_threshold=unknown,
    )


def keep_or_prune(
    decisions: ActionBuilder, features: FeatureReader, probation: float, rating: SeedRating[Figures]
) -> None:
    """Fossilize the held seeds that are worth keeping, and prune the others.

    A seed is due once its contribution was measured and its stage's age reaches ``probation``, a share of the episode.
    """
    measured = (features.slot("stage_holding") > 0) & ~np.isnan(rating.contribution)
    due = measured & (features.slot("stage_age") >= probation - ROUNDING)
    decisions.act_on(Op.FOSSILIZE, due & rating.worth_keeping)
    decisions.act_on(Op.PRUNE, due & ~rating.worth_keeping)


class Never:
    """Never grows."""

    name = "none"

    def start(self, seeds: Sequence[int]) -> None:
        """It has no state."""

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
            # The choice of rank floor(u * count) among the legal ones.
            rank = (uniforms[:, head] * legal.sum(1)).astype(np.int64)
            actions[:, head] = (legal.cumsum(1) > rank[:, None]).argmax(1)
        return actions, state


SHUFFLED = "shuffled"


class Replay:
    """Replays a sequence of actions per network. Illegal ones become WAIT, and after its end it waits.

    Args:
        sequences: Actions int64 ``[T, 8]`` by the random seed of the network that they are for.

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
            ConfigError: there is no sequence for one of the random seeds.
        """
        missing = [seed for seed in seeds if seed not in self._sequences]
        if missing:
            raise ConfigError(f"no actions were recorded for seed {missing[0]}")
        return 0, [self._sequences[seed] for seed in seeds]

    def act(
        self, observation: Observation, masks: ActionMasks, state: tuple[int, list[Actions]]
    ) -> tuple[Actions, tuple[int, list[Actions]]]:
        """The next recorded action of each network where it is legal, else WAIT."""
        step, sequences = state
        wait = np.zeros(len(Head), np.int64)
        recorded: Ints = np.stack([actions[step] if step < len(actions) else wait for actions in sequences])
        return canonicalise(recorded, masks)[0], (step + 1, sequences)


def shuffle_actions(actions: Actions, seeds: Sequence[int], rng: np.random.Generator) -> Replay:
    """A replay of ``actions`` ``[T, N, 8]`` in which each network gets those of another: a random cycle through all N.

    A controller that reacts to what it observes does worse under it; one that always does the same does not.
    """
    if len(seeds) < 2:
        raise ConfigError("the actions of a single network cannot be shuffled: play at least two")
    # Each network in a random order gets the actions of the one before it.
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
    """Carries out a list of plantings, and advances and fossilizes seeds as soon as the gates allow.

    Args:
        plantings: What to germinate where and when.
        horizon: Decisions in an episode.
        name: The controller's name in results.
        keep_after: Decisions a seed is held before it is fossilized.
        patience: Decisions without progress (`History.plateau_age`) before the first planting; 0: no waiting.
        latest: Share of the episode after which no plateau is waited for.

    Raises:
        ConfigError: the patience is negative, or longer than a plateau's observed age.
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
        """The first planting that is due, else advance, else keep whatever may be kept, else wait."""
        features, decisions, done = FeatureReader(observation), ActionBuilder(masks), state.copy()
        progress = features.network("progress")
        step = np.rint(progress * self._horizon)

        # Plantings start after a plateau, or when it is too late to wait for one.
        on_plateau = features.network("plateau_age") * LONGEST_PLATEAU >= self.patience - ROUNDING
        started = done.any(axis=1) | on_plateau | (progress > self._latest + ROUNDING)
        everyone = np.ones(len(step), np.int64)
        for index, planting in enumerate(self.plantings):
            due = started & (step >= planting.step) & ~done[:, index] & decisions.open
            if due.any():
                decisions.germinate(everyone * planting.slot, everyone * planting.blueprint, due)
                done[:, index] |= due & ~decisions.open

        decisions.act_on(Op.ADVANCE, masks.slot[:, Op.ADVANCE])
        held = features.slot("stage_holding") > 0
        decisions.act_on(Op.FOSSILIZE, held & (features.slot("stage_age") >= self._keep_age - ROUNDING))
        return decisions.actions, done


class PeriodicSettings(Settings):
    """Settings of the periodic rule."""

    period: int = Field(default=2, ge=1, le=1000)
    """Decisions from one germination to the next."""
    plantings: tuple[tuple[int, int], ...] = ((0, 0),)
    """Pairs of slot and blueprint indices, germinated in this order and repeated."""
    probation: int = Field(default=6, ge=1, le=1000)
    """Decisions for which a seed is held before it is kept or pruned."""
    margin: float = Field(default=0.0, ge=-1, le=1)
    """Minimum contribution above its rent for a seed to be kept, in units of the score."""
    stop_after: float = Field(default=0.6, ge=0, le=1)
    """Fraction of the episode after which no new seed germinates."""


class Periodic:
    """Every ``period`` decisions the next planting whose slot is free; seeds are kept or pruned after probation."""

    name = "periodic"

    def __init__(self, settings: PeriodicSettings, horizon: int) -> None:
        self._settings, self._horizon = settings, horizon

    def start(self, seeds: Sequence[int]) -> Ints:
        """The clock of each network and how many plantings it has had, ``[2, E]``."""
        return np.stack([np.full(len(seeds), -1), np.zeros(len(seeds), np.int64)])

    def rate_seeds(self, observation: Observation) -> SeedRating[Figures]:
        """The rating of every seed."""
        return rate_seeds(FeatureReader(observation), self._settings.margin)

    def act(self, observation: Observation, masks: ActionMasks, state: Ints) -> tuple[Actions, Ints]:
        """Advance what may be, else keep or prune what is due, else plant if the period is over, else wait."""
        settings, features, decisions = self._settings, FeatureReader(observation), ActionBuilder(masks)

        decisions.act_on(Op.ADVANCE, masks.slot[:, Op.ADVANCE])
        keep_or_prune(decisions, features, settings.probation / self._horizon, rate_seeds(features, settings.margin))

        # The clock is the number of the decision by the observed progress; where that stands still, it goes on.
        progress = features.network("progress")
        last, planted = state
        clock = np.maximum(np.rint(progress * self._horizon).astype(np.int64), last + 1)
        due = (clock >= planted * settings.period) & (progress <= settings.stop_after)
        plantings = np.array(settings.plantings, np.int64)[planted % len(settings.plantings)]
        undecided = decisions.open.copy()
        decisions.germinate(plantings[:, 0], plantings[:, 1], due)
        return decisions.actions, np.stack([clock, planted + (undecided & ~decisions.open)])


class HeuristicSettings(Settings):
    """Settings of the heuristic rule."""

    preferences: tuple[tuple[int, int], ...] = ((0, 0),)
    """Pairs of slot and blueprint indices, most promising first. Those already tried come last."""
    patience: float = Field(default=0.0, ge=0, le=10)
    """Decisions without progress (`History.plateau_age`) before a seed germinates; 0: immediately."""
    at_a_time: int = Field(default=2, ge=1, le=100)
    """Maximum number of unfinished seeds per network."""
    most: int = Field(default=3, ge=1, le=100)
    """Maximum number of seeds per network, kept ones included."""
    probation: int = Field(default=6, ge=1, le=1000)
    """Decisions for which a seed is held before it is kept or pruned."""
    margin: float = Field(default=0.0, ge=-1, le=1)
    """Minimum contribution above its rent for a seed to be kept, in units of the score."""
    stop_after: float = Field(default=0.6, ge=0, le=1)
    """Fraction of the episode after which no new seed germinates."""
    narrowest: float = Field(default=0.0, ge=0, le=1)
    """Minimum width of a slot relative to the network's widest slot."""


class Heuristic:
    """Looks at all slots: advances, keeps and prunes seeds as their gates allow, and germinates on plateaus."""

    name = "heuristic"

    def __init__(self, settings: HeuristicSettings, horizon: int) -> None:
        self._settings, self._horizon = settings, horizon

    def start(self, seeds: Sequence[int]) -> None:
        """It has no state."""

    def rate_seeds(self, observation: Observation) -> SeedRating[Figures]:
        """The rating of every seed."""
        return rate_seeds(FeatureReader(observation), self._settings.margin)

    def act(self, observation: Observation, masks: ActionMasks, state: None) -> tuple[Actions, None]:
        """One decision per network."""
        settings, features, decisions = self._settings, FeatureReader(observation), ActionBuilder(masks)

        # First the seeds that are there: advance what may be, keep or prune what is due.
        decisions.act_on(Op.ADVANCE, masks.slot[:, Op.ADVANCE])
        keep_or_prune(decisions, features, settings.probation / self._horizon, rate_seeds(features, settings.margin))

        # Is it time for another seed?
        unfinished, fossils = count_unfinished_seeds(features), features.slot("stage_fossilized").sum(1)
        on_plateau = features.network("plateau_age") * LONGEST_PLATEAU >= settings.patience - ROUNDING
        has_room = (unfinished < settings.at_a_time) & (unfinished + fossils < settings.most)
        due = on_plateau & has_room & (features.network("progress") <= settings.stop_after)

        # The first preference that is legal, wide enough and tried least.
        slots, blueprints = np.array(settings.preferences, np.int64).T
        widths = np.exp(features.slot("log_width"))
        wide = widths >= settings.narrowest * widths.max(1, keepdims=True) - ROUNDING
        possible = masks.blueprint[:, slots, blueprints] & masks.slot[:, Op.GERMINATE][:, slots] & wide[:, slots]
        tries = np.rint(features.blueprint("tries")[:, slots, blueprints] * MOST_TRIES)
        rank = np.where(possible, tries * len(slots) + np.arange(len(slots)), np.inf)
        best = rank.argmin(1)
        decisions.germinate(slots[best], blueprints[best], possible.any(1) & due)
        return decisions.actions, None


class LookSettings(Settings):
    """Settings of the look-ahead rule; the same defaults serve every host."""

    promise: PromiseSettings = PromiseSettings()
    """How promises are measured."""
    fitted: float = Field(default=0.75, ge=0, le=1)
    """Weight of the fitted promise; the held-out promise has the rest."""
    price: float = Field(default=0.6, ge=0, le=100)
    """Factor of a candidate's rent when it is subtracted from its promise."""
    threshold: float = Field(default=0.05, ge=-1, le=1)
    """Minimum promise minus price for a candidate to be planted."""
    size: float = Field(default=0.2, ge=-10, le=10)
    """Weight of ``log1p(parameters / host parameters)`` in the ranking of candidates, since the promise of one gradient
    step underestimates large modules."""
    early: float = Field(default=0.2, ge=0, le=1)
    """Fraction of the episode during which a seed is planted at every decision; later, only one at a time."""
    probation: int = Field(default=4, ge=1, le=1000)
    """Decisions for which a seed is held before it is kept or pruned."""
    standard_errors: float = Field(default=1.0, ge=-10, le=10)
    """Number of standard errors by which a seed must lower the loss to be kept."""
    stop_after: float = Field(default=0.75, ge=0, le=1)
    """Fraction of the episode after which no new seed germinates."""


def rate_candidates(features: FeatureReader, settings: LookSettings) -> CandidateRating:
    """What is left of each candidate's promise after its rent, and its rank, by which large ones are preferred."""
    fitted, held_out = features.blueprint("promise"), features.blueprint("promise_held_out")
    worth: Floats = settings.fitted * fitted + (1 - settings.fitted) * held_out
    worth = worth - settings.price * features.blueprint("rent_due")
    # A promise of exactly 0 was not measured, or is of a module that no step can help.
    worth = np.where((fitted != 0) | (held_out != 0), worth, -np.inf)
    return CandidateRating(worth, settings.threshold, rank=worth + settings.size * features.blueprint("cost"))


class LookRule:
    """Has no preferences: it goes by what is measured of this network, before a seed is planted and after."""

    name = "look"

    def __init__(self, settings: LookSettings, horizon: int) -> None:
        self._settings, self._horizon = settings, horizon
        self.promise: PromiseSettings | None = settings.promise

    def start(self, seeds: Sequence[int]) -> None:
        """It has no state."""

    def rate_seeds(self, observation: Observation) -> SeedRating[Figures]:
        """The rating of every seed."""
        rating = rate_seeds(FeatureReader(observation))
        return replace(rating, loss_threshold=self._settings.standard_errors * rating.loss_error)

    def rate_candidates(self, observation: Observation) -> CandidateRating:
        """What is left of the promise of every candidate after its rent."""
        return rate_candidates(FeatureReader(observation), self._settings)

    def act(self, observation: Observation, masks: ActionMasks, state: None) -> tuple[Actions, None]:
        """One decision per network.

        Raises:
            ConfigError: the observation has no features of promise.
        """
        settings, features, decisions = self._settings, FeatureReader(observation), ActionBuilder(masks)
        if not features.shows_promise:
            raise ConfigError("controller 'look' needs promises: set growth.promise")

        # First the seeds that are there: advance what may be, keep or prune what is due.
        decisions.act_on(Op.ADVANCE, masks.slot[:, Op.ADVANCE])
        keep_or_prune(decisions, features, settings.probation / self._horizon, self.rate_seeds(observation))

        # Early on a seed is planted at every decision: most of what a module earns it learns together with the host.
        # Later one at a time, and only by what was measured just now: an older promise is of another network.
        progress = features.network("progress")
        alone = (features.network("promise_age") == 0) & (count_unfinished_seeds(features) == 0)
        due = (progress <= settings.early + ROUNDING) | (alone & (progress <= settings.stop_after + ROUNDING))

        # Of the legal and untried candidates that are worth their rent, the one with the highest rank.
        rating = rate_candidates(features, settings)
        possible = masks.blueprint & masks.slot[:, Op.GERMINATE, :, None] & (features.blueprint("tries") == 0)
        possible &= rating.worth > rating.threshold
        rank = np.where(possible, rating.rank, -np.inf)
        slot, blueprint = np.divmod(rank.reshape(len(rank), -1).argmax(1), rank.shape[2])
        decisions.germinate(slot, blueprint, possible.any((1, 2)) & due)
        return decisions.actions, None
