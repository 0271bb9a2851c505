"""Rewards of a controller: a registry of reward modes, each a function of about ten lines.

To add a reward, write a function like `pay_sparse` and decorate it with `register_reward`, here or in your own file.
`RewardTracker` records each step as `RewardInputs`, which a mode turns into the terms of the reward.

J is the score minus rent of the whole network, and at the end that of the committed network. All modes except `escrow`
pay J over an episode, minus costs of actions, and differ in when they pay it. docs/rewards.md compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar, cast, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, field_validator, model_validator

from esper.config.arguments import describe_value
from esper.config.settings import Settings
from esper.engine.budget import RentBasis
from esper.engine.measurements import CommittedEvaluation, Evaluation
from esper.errors import ConfigError, did_you_mean
from esper.lifecycle.actions import Head, Op
from esper.lifecycle.table import SeedTable, Stage
from esper.numerics.arrays import Bools, Floats, Int8s, Ints, replace_where
from esper.population.population import Population
from esper.tasks.instance import Instance
from esper.tasks.suite import Suite

Family = Literal["accuracy", "loss"]
"""Unit of scores and contributions: accuracy, or the relative decrease of the loss."""
RewardTerms = dict[str, Floats]
"""The terms whose sum is the reward, by name, ``[E]`` each."""
ROLLBACK = "rollback"
"""The term that holds the governor's penalty for a rollback."""


# What a reward is computed from


class RewardState(NamedTuple):
    """E networks at one moment, measured on validation data; in finished episodes, the committed networks."""

    score: dict[Family, Floats]
    """Score of the whole network, ``[E]``; 1 is perfect. In the family loss: 1 - loss / ln(classes); 0 is guessing."""
    contribution: dict[Family, Floats]
    """How much score the network would lose without the seed in a slot, ``[E, S]``; 0 without a blended seed and, in
    finished episodes, without a fossil."""
    rent: dict[RentBasis, Floats]
    """`compute_rent` on the seeds that count, ``[E]``."""
    stage: Int8s
    """A `Stage` for each slot, ``[E, S]``."""
    alpha: Floats
    """``[E, S]``; 0 without a blended seed."""

    @classmethod
    def zeros(cls, environments: int, slots: int) -> Self:
        """The state before the first step. With zeros, sums of changes telescope to the final value."""
        row, table = np.zeros(environments), np.zeros((environments, slots))
        return cls(
            score={"accuracy": row, "loss": row},
            contribution={"accuracy": table, "loss": table},
            rent={"parameters": row, "flops": row},
            stage=np.full(table.shape, Stage.DORMANT, np.int8),  # 0 as well
            alpha=table,
        )


class RewardInputs(NamedTuple):
    """One step of E networks: everything a reward may depend on."""

    before: RewardState
    after: RewardState
    finished: Bools
    """Whether this was the episode's last step, ``[E]``."""
    acted: Bools
    """Whether the controller did anything but wait, ``[E]``."""
    pruned_age: Ints
    """Steps since germination of the seed that the controller pruned, ``[E]``; -1 if it pruned none."""


class RewardSettings(Settings):
    """Reward of a controller: weights of its terms, in units of the score; only those of the chosen mode are accepted.

    A weight of 0.01 equals one percentage point of accuracy.
    """

    rent_on: RentBasis = "parameters"
    """Unit of rent: parameters or FLOPs."""
    progress: float = Field(default=0.02, ge=0, allow_inf_nan=False)
    """Advance per slot on its way from germination to holding; subtracted again at the end."""
    attribution: float = Field(default=0.5, ge=0, allow_inf_nan=False)
    """Fraction of the seeds' contributions that is paid in advance; subtracted again at the end."""
    intervention: float = Field(default=0.001, ge=0, allow_inf_nan=False)
    """Cost of every operation except wait."""
    intervention_after: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of training after which the intervention cost starts. It then rises linearly, and is complete halfway to
    the end. With a cost from the start, a policy may learn never to act before it has learned to act well."""
    shock: float = Field(default=0.002, ge=0, allow_inf_nan=False)
    """Cost of changing a seed's alpha by 1 in one step; it grows with the square of the change."""
    early_prune: float = Field(default=0.01, ge=0, allow_inf_nan=False)
    """Cost of pruning a seed early."""
    early_age: int = Field(default=5, ge=1, le=1000)
    """Maximum number of steps since germination at which pruning counts as early."""
    mode: str = "outcome"
    """Name of the reward mode."""
    family: Family = "accuracy"
    """Unit of scores and contributions: accuracy, or the relative reduction of the loss."""

    @field_validator("mode")
    @classmethod
    def _require_mode(cls, name: str) -> str:
        if name not in MODES:
            hint = did_you_mean(name, MODES, limit=1, separator=",")
            raise ValueError(
                f"unknown reward mode '{name}'{hint} (known: {', '.join(MODES)}; one of your own: name the file that "
                "registers it, as ESPER_SUITES=FILE.py)"
            )
        return name

    @model_validator(mode="after")
    def _require_supported(self) -> Self:
        mode = MODES[self.mode]
        if self.family not in mode.families:
            modes = [name for name in MODES if self.family in MODES[name].families]
            raise ValueError(
                f"reward mode '{self.mode}' is for {' or '.join(mode.families)}, not for {self.family}; "
                f"modes for {self.family} are {', '.join(modes)}"
            )
        for weight in WEIGHTS:
            if weight not in mode.weights and getattr(self, weight) != type(self).model_fields[weight].default:
                modes = [name for name in MODES if weight in MODES[name].weights]
                raise ValueError(
                    f"reward mode '{self.mode}' does not use {weight}: remove it, or choose {' or '.join(modes)}"
                )
        return self

    def at_progress(self, progress: float) -> RewardSettings:
        """The settings at this share of the training, 0 to 1: interventions may not cost their full price yet."""
        if self.intervention_after == 0:
            return self
        ramp = (1 - self.intervention_after) / 2
        share = min(max((progress - self.intervention_after) / ramp, 0.0), 1.0)
        return self.model_copy(update={"intervention": self.intervention * share})


WEIGHTS = tuple(name for name in RewardSettings.model_fields if name not in ("rent_on", "mode", "family"))
"""The fields that only some modes read."""


# The registry


@dataclass(frozen=True)
class RewardMode:
    """A reward function, the families of scores it can pay in, and the weights that it reads."""

    compute: Callable[[RewardInputs, RewardSettings], RewardTerms]
    families: tuple[str, ...]
    weights: tuple[str, ...] = ()


MODES: dict[str, RewardMode] = {}
"""Reward modes by name."""
LAMBDA = "<lambda>"
"""The name of all functions without a name; two of them are never the same definition."""
_Pay = TypeVar("_Pay", bound=Callable[[RewardInputs, RewardSettings], RewardTerms])


def register_reward(
    name: str, *, families: Sequence[str] = ("accuracy",), weights: Sequence[str] = ()
) -> Callable[[_Pay], _Pay]:
    """Decorator that registers a function as the reward mode ``name``.

    ```python
    @register_reward("late")
    def pay_late(inputs: RewardInputs, settings: RewardSettings) -> dict[str, np.ndarray]:
        return {"objective": np.where(inputs.finished, inputs.after.score["accuracy"], 0.0)}
    ```

    The function returns the terms whose sum is a step's reward, by name, ``[E]`` each, in units of the score; the name
    ``rollback`` is the governor's. The reward of a network must depend only on that network. ``families`` are the
    families of scores that it can pay in, ``weights`` the fields of `RewardSettings` that it reads. The same definition
    again, as in a notebook, replaces it.

    Raises:
        ConfigError: the name is empty, the decorated object is not a function, another function has that name, or a
            family or weight does not exist.
    """
    if not isinstance(name, str) or not name:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"a reward mode needs a name, as in @register_reward('mine'), not {describe_value(name)}")
    if not (isinstance(families, list | tuple) and isinstance(weights, list | tuple) and families):
        raise ConfigError(f"reward mode {name!r}: give families and weights as lists, such as ['accuracy']")
    for kind, values, choices in (("family", families, get_args(Family)), ("weight", weights, WEIGHTS)):
        if unknown := [value for value in values if value not in choices]:
            raise ConfigError(
                f"reward mode {name!r}: there is no {kind} {unknown[0]!r}; choose from {', '.join(choices)}"
            )

    def register(pay: _Pay) -> _Pay:
        if not isinstance(cast("object", pay), FunctionType):
            raise ConfigError(f"reward mode {name!r} is {describe_value(pay)}: decorate a function")
        present = MODES[name].compute if name in MODES else pay
        same_definition = (present.__module__, present.__qualname__) == (pay.__module__, pay.__qualname__)
        if not same_definition or (pay.__name__ == LAMBDA and present is not pay):
            raise ConfigError(f"reward mode {name!r} is taken by {present.__qualname__}: choose another name")
        MODES[name] = RewardMode(pay, tuple(families), tuple(weights))
        return pay

    return register


# Parts of rewards: pure functions of a step, ``[E]`` each, in units of the score

PROGRESS: dict[Stage, float] = {
    Stage.GERMINATED: 0.25,
    Stage.TRAINING: 0.5,
    Stage.BLENDING: 0.75,
    Stage.HOLDING: 1.0,
    Stage.FOSSILIZED: 1.0,
}
"""How far a slot has come; 0 in all other stages."""
_PROGRESS_BY_STAGE = np.array([PROGRESS.get(stage, 0.0) for stage in Stage])


def compute_rent(added: NDArray[np.number], host: NDArray[np.number], rent: Floats) -> Floats:
    """``rent * log1p(added / host)``; all ``[E]``, added and host in parameters or in FLOPs."""
    return rent * np.log1p(added.astype(float) / host.astype(float))


def compute_objective(state: RewardState, settings: RewardSettings) -> Floats:
    """``J = score - rent`` of the whole network."""
    return state.score[settings.family] - state.rent[settings.rent_on]


def sum_contributions(state: RewardState, settings: RewardSettings) -> Floats:
    """``C``: the contributions of all seeds together."""
    return state.contribution[settings.family].sum(axis=1)


def shape_by_potential(before: Floats, after: Floats, finished: Bools) -> Floats:
    """``F = P' - P``, where P' is 0 at the end, so that all advances have been taken back by then.

    Potential-based shaping with discount 1 (Ng, Harada and Russell 1999) adds up to 0 over an episode, so it does not
    change the order of returns.
    """
    return np.where(finished, 0.0, after) - before


def shape_by_progress(inputs: RewardInputs, settings: RewardSettings) -> Floats:
    """``progress * F`` of the sum of `PROGRESS` over *all* slots."""
    before, after = (_PROGRESS_BY_STAGE[state.stage].sum(axis=1) for state in (inputs.before, inputs.after))
    return settings.progress * shape_by_potential(before, after, inputs.finished)


def charge_interventions(inputs: RewardInputs, settings: RewardSettings) -> Floats:
    """``-intervention`` for every operation except wait."""
    return -settings.intervention * inputs.acted.astype(np.float64)


def charge_early_prune(inputs: RewardInputs, settings: RewardSettings) -> Floats:
    """``-early_prune`` for pruning a seed of at most ``early_age`` steps."""
    early = (inputs.pruned_age >= 0) & (inputs.pruned_age <= settings.early_age)
    return -settings.early_prune * early.astype(np.float64)


# Rewards

_INTERVENTION = ("intervention", "intervention_after")
_EARLY_PRUNE = ("early_prune", "early_age")


@register_reward("outcome", families=("accuracy", "loss"))
def pay_outcome(inputs: RewardInputs, settings: RewardSettings) -> RewardTerms:
    """``J' - J``: telescopes to J of the committed network, exactly.

    Known failure: noise of single evaluations affects every step's reward, though not their sum. In the family loss,
    moving alpha back and forth costs nothing (docs/rewards.md).
    """
    return {"objective": compute_objective(inputs.after, settings) - compute_objective(inputs.before, settings)}


@register_reward("sparse")
def pay_sparse(inputs: RewardInputs, settings: RewardSettings) -> RewardTerms:
    """``J'`` of the committed network at the last step, 0 before.

    Known failure: gives no hint which of the episode's decisions mattered.
    """
    return {"objective": np.where(inputs.finished, compute_objective(inputs.after, settings), 0.0)}


@register_reward("minimal", weights=_EARLY_PRUNE)
def pay_minimal(inputs: RewardInputs, settings: RewardSettings) -> RewardTerms:
    """`pay_sparse` minus the cost of early pruning.

    Known failures: that of `pay_sparse`; and even a measurably harmful seed is kept up to `early_age`.
    """
    return {**pay_sparse(inputs, settings), "early_prune": charge_early_prune(inputs, settings)}


@register_reward("simplified", weights=("progress", *_INTERVENTION))
def pay_simplified(inputs: RewardInputs, settings: RewardSettings) -> RewardTerms:
    """`pay_sparse`, plus shaping by the progress of all slots, minus the cost of interventions.

    Known failure: progress shows that a seed exists, not that it is good; where most seeds are pruned, advances are
    only noise. The cost of interventions may teach a policy never to act before it learns anything else.
    """
    return {
        **pay_sparse(inputs, settings),
        "progress": shape_by_progress(inputs, settings),
        "intervention": charge_interventions(inputs, settings),
    }


@register_reward(
    "shaped",
    families=("accuracy", "loss"),
    weights=("attribution", "progress", *_INTERVENTION, "shock", *_EARLY_PRUNE),
)
def pay_shaped(inputs: RewardInputs, settings: RewardSettings) -> RewardTerms:
    """`pay_outcome`, plus ``attribution * F`` of the contributions C and shaping by progress, minus all costs.

    Known failure: every ramp of alpha has a cost, so growth that gains less than its shock (a third of the weight for
    three steps) does not pay; and there are six weights to tune.
    """
    before, after = sum_contributions(inputs.before, settings), sum_contributions(inputs.after, settings)
    return {
        **pay_outcome(inputs, settings),
        "attribution": settings.attribution * shape_by_potential(before, after, inputs.finished),
        "progress": shape_by_progress(inputs, settings),
        "intervention": charge_interventions(inputs, settings),
        # 1 for a jump of alpha from 0 to 1, 1/3 for a ramp of 3 steps
        "shock": -settings.shock * np.square(inputs.after.alpha - inputs.before.alpha).sum(axis=1),
        "early_prune": charge_early_prune(inputs, settings),
    }


@register_reward("escrow", families=("accuracy", "loss"))
def pay_escrow(inputs: RewardInputs, settings: RewardSettings) -> RewardTerms:
    """``(C' - C) - (rent' - rent)``: changes of contributions are paid, positive and negative ones.

    Payments for seeds that are not fossilized by the end are taken back completely. The return is the fossils'
    contributions minus rent; it never includes what the host learns by itself.

    Known failure: contributions are not J. Of two redundant seeds neither is paid; of two that only work together each
    is paid for the whole gain.
    """
    before, after = sum_contributions(inputs.before, settings), sum_contributions(inputs.after, settings)
    rent = inputs.before.rent[settings.rent_on] - inputs.after.rent[settings.rent_on]
    return {"contribution": after - before, "rent": rent}


# Which environment is paid by which mode

OUTCOME = RewardSettings()
"""The default."""


def _parse_spec(value: Any) -> Any:
    entries = list(cast("list[Any]", value)) if isinstance(value, list | tuple) else [value]
    return tuple({"mode": entry} if isinstance(entry, str) else entry for entry in entries)


RewardSpec = Annotated[tuple[RewardSettings, ...], BeforeValidator(_parse_spec), Field(min_length=1)]
"""Reward modes that environments use in turns: a mode's name, its settings, or a list of either."""


def name_rewards(settings: Sequence[RewardSettings]) -> tuple[str, ...]:
    """A name for each of the settings: its mode and, where several have that mode, the fields in which they differ."""
    modes = [one.mode for one in settings]
    names: list[str] = []
    for one in settings:
        others = [other.model_dump() for other in settings if other.mode == one.mode]
        own = one.model_dump()
        differing = [f"{field}={own[field]}" for field in own if any(other[field] != own[field] for other in others)]
        names.append(" ".join([one.mode, *differing]) if modes.count(one.mode) > 1 else one.mode)
    return tuple(names)


Assigned = TypeVar("Assigned")


def assign_rewards(settings: Sequence[Assigned], environments: int, group: int = 1) -> list[Assigned]:
    """The settings, or names, of each environment: groups of ``group`` neighbours share theirs and take turns."""
    return [settings[environment // group % len(settings)] for environment in range(environments)]


def group_by_settings(settings: Sequence[RewardSettings]) -> dict[RewardSettings, Bools]:
    """The environments, bool ``[E]``, that each of the settings pays; ``settings`` has those of each environment."""
    return {kind: np.array([other == kind for other in settings]) for kind in dict.fromkeys(settings)}


def compute_rewards(inputs: RewardInputs, paid_by: Mapping[RewardSettings, Bools]) -> RewardTerms:
    """The terms of the rewards, ``[E]`` each; ``paid_by`` is the result of `group_by_settings`."""
    rewards: RewardTerms = {}
    for settings, rows in paid_by.items():
        terms = MODES[settings.mode].compute(inputs, settings)
        _require_terms(settings.mode, terms, inputs.finished.shape)
        for name, term in terms.items():
            rewards[name] = np.where(rows, term, rewards.get(name, 0.0))
    return rewards


def _require_terms(mode: str, terms: object, shape: tuple[int, ...]) -> None:
    expected = f"reward mode {mode!r} must give its terms by name, each an array {list(shape)} of real numbers"
    if not isinstance(terms, Mapping):
        raise ConfigError(f"{expected}, but it gives {type(terms).__name__}")
    if not terms:
        raise ConfigError(f"{expected}, but it gives none")
    for name, term in cast("Mapping[str, Any]", terms).items():
        if name == ROLLBACK:
            raise ConfigError(f"reward mode {mode!r}: {ROLLBACK!r} is the governor's penalty, choose another name")
        if not isinstance(term, np.ndarray):
            raise ConfigError(f"{expected}, but {name!r} is {type(term).__name__}")
        values = cast("NDArray[Any]", term)
        if values.shape != shape or values.dtype.kind not in "biuf":
            raise ConfigError(f"{expected}, but {name!r} is {list(values.shape)} of {values.dtype}")


def sum_reward_terms(terms: RewardTerms) -> Floats:
    """The rewards ``[E]``."""
    return np.sum(list(terms.values()), axis=0)


# From a step to the inputs of its reward


class RewardTracker:
    """Records the `RewardInputs` of E episodes, step by step."""

    def __init__(self, suite: Suite, population: Population, instances: Sequence[Instance]) -> None:
        self._suite = suite
        self._population = population
        self._rent: Floats = np.zeros(population.size)
        self._host_flops: Floats = np.ones(population.size)
        self._flops_of_widths: dict[tuple[int, ...], int] = {}
        self._before = RewardState.zeros(*population.table.stage.shape)
        self.restart(np.ones(population.size, np.bool_), instances)

    def restart(self, rows: Bools, instances: Sequence[Instance]) -> None:
        """Begin new episodes in ``rows``, bool ``[E]``; ``instances`` are those of all networks."""
        self._before = replace_where(rows, self._before, RewardState.zeros(*self._before.stage.shape))
        for row in rows.nonzero()[0].tolist():
            instance = instances[row]
            self._rent[row] = instance.rent
            # Hosts of equal widths cost the same, and counting takes milliseconds.
            if instance.widths not in self._flops_of_widths:
                self._flops_of_widths[instance.widths] = self._suite.flops(instance)
            self._host_flops[row] = self._flops_of_widths[instance.widths]

    def record(
        self,
        actions: Ints,
        decided_on: SeedTable,
        evaluation: Evaluation,
        commitment: CommittedEvaluation | None,
        finished: Bools,
    ) -> RewardInputs:
        """The inputs of a step's rewards. The next step begins where this one ended.

        ``actions [E, 8]`` were taken in the state ``decided_on``; ``commitment`` is needed where an episode has
        ``finished``, bool ``[E]``.
        """
        population, table, chance_loss = self._population, self._population.table, self._suite.chance_loss

        # The score: finished episodes are scored by their committed networks.
        accuracy, loss = evaluation.accuracy, evaluation.loss
        if commitment is not None:
            accuracy = np.where(finished, commitment.accuracy, accuracy)
            loss = np.where(finished, commitment.loss, loss)
        score: dict[Family, Floats] = {"accuracy": accuracy, "loss": 1 - loss / chance_loss}

        # Blended seeds contribute and pay rent; in finished episodes fossils alone.
        counted = np.where(finished[:, None], table.stage == Stage.FOSSILIZED, table.blended)
        contribution: dict[Family, Floats] = {
            "accuracy": np.where(counted, np.nan_to_num(evaluation.accuracy_contribution), 0.0),
            "loss": np.where(counted, np.nan_to_num(evaluation.loss_contribution), 0.0) / chance_loss,
        }
        costs = population.specs.costs
        parameters = population.count_seed_parameters(counted)
        flops = (costs.flops.resident(table) * counted).sum(axis=1)
        rent: dict[RentBasis, Floats] = {
            "parameters": compute_rent(parameters, population.host_parameters, self._rent),
            "flops": compute_rent(flops, self._host_flops, self._rent),
        }
        alpha = np.where(table.blended, table.alpha, 0.0).astype(np.float64)
        after = RewardState(score, contribution, rent, table.stage, alpha)

        # What the controller did: whether it acted, and how old the seed was that it pruned.
        op, slot = actions[:, Head.OP], actions[:, Head.SLOT]
        age = decided_on.seed_age[np.arange(len(actions)), slot].astype(np.int64)
        pruned_age = np.where(op == Op.PRUNE, age, -1)
        before, self._before = self._before, after
        return RewardInputs(before, after, finished, acted=op != Op.WAIT, pruned_age=pruned_age)
