"""What a step is worth to a controller: from what happened in it to the reward.

`RewardTracker` takes down what a step led to (`RewardInputs`). A *mode* makes of it the terms of the reward, by the
weights of `RewardSettings`. `compute_rewards` pays each environment by the mode of its own.

J is the score less rent of the whole network; at the end, of what was committed. Scores are in accuracy, or, where a
mode allows the family `loss`, in the relative decrease of the loss. All modes but `escrow` pay J over an episode, less
costs for what a controller does; they differ in when they pay it. docs/rewards.md compares them.
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
from esper.lifecycle.stages import Stage
from esper.lifecycle.table import SeedTable
from esper.numerics.arrays import Bools, Floats, Int8s, Ints, replace_where
from esper.population.population import Population
from esper.tasks.instance import Instance
from esper.tasks.suite import Suite

Family = Literal["accuracy", "loss"]
"""Unit of scores and contributions: accuracy, or the relative decrease of the loss."""
RewardTerms = dict[str, Floats]
"""What a reward is the sum of, by name; ``[E]`` each."""


ROLLBACK = "rollback"
"""The term by which the governor's rollbacks are paid."""
_REAL = "biuf"
"""Kinds of numpy's types."""


# What happened


class RewardState(NamedTuple):
    """E networks at one moment, measured on validation data; of what was committed, in finished episodes."""

    score: dict[Family, Floats]
    """How good the whole network is, ``[E]``, 1 being perfection. In loss: 1 - loss / ln(classes), 0 being a guess."""
    contribution: dict[Family, Floats]
    """What the network would lose without the seed in a slot, ``[E, S]``; 0 without a blended seed. In finished
    episodes only fossils have one, measured among all seeds that were there."""
    rent: dict[RentBasis, Floats]
    """`compute_rent` on the seeds that count, ``[E]``."""
    stage: Int8s
    """A `Stage` for each slot, ``[E, S]``."""
    alpha: Floats
    """``[E, S]``; 0 without a blended seed."""

    @classmethod
    def zeros(cls, environments: int, slots: int) -> Self:
        """Before the first step: everything is 0, so that what telescopes adds up to what there is at the end."""
        row, table = np.zeros(environments), np.zeros((environments, slots))
        return cls(
            {"accuracy": row, "loss": row},
            {"accuracy": table, "loss": table},
            {"parameters": row, "flops": row},
            np.full(table.shape, Stage.DORMANT, np.int8),  # which is 0, too
            table,
        )


class RewardInputs(NamedTuple):
    """One step of E networks, as far as anybody is paid for it."""

    before: RewardState
    after: RewardState
    finished: Bools
    """Whether this was the episode's last step, ``[E]``."""
    acted: Bools
    """Whether the controller did anything but wait, ``[E]``."""
    pruned_age: Ints
    """Steps since germination of the seed that the controller had pruned, ``[E]``; -1 if it had none."""


class RewardTracker:
    """Takes down every step of E episodes; keeps what the networks were worth before the present one."""

    def __init__(self, suite: Suite, population: Population, instances: Sequence[Instance]) -> None:
        self._suite = suite
        self._population = population
        self._rent: Floats = np.zeros(population.size)
        self._host_flops: Floats = np.ones(population.size)
        self._flops_of_widths: dict[tuple[int, ...], int] = {}
        self._before = RewardState.zeros(*population.table.stage.shape)
        self.restart(np.ones(population.size, np.bool_), instances)

    def restart(self, rows: Bools, instances: Sequence[Instance]) -> None:
        """New episodes begin in ``rows``, bool ``[E]``; ``instances`` are those of all networks."""
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
        """The inputs of a step's rewards; the next step begins where this one ended.

        ``actions [E, 8]`` were taken in the state ``decided_on``; ``commitment`` is needed where an episode has
        ``finished``, bool ``[E]``.
        """
        before, after = self._before, self._measure(evaluation, commitment, finished)
        op, row = actions[:, Head.OP], np.arange(len(actions))
        ages = decided_on.seed_age[row, actions[:, Head.SLOT]].astype(np.int64)
        self._before = after
        return RewardInputs(before, after, finished, op != Op.WAIT, np.where(op == Op.PRUNE, ages, -1))

    def _measure(self, evaluation: Evaluation, commitment: CommittedEvaluation | None, finished: Bools) -> RewardState:
        population, table = self._population, self._population.table
        costs, hosts = population.specs.costs, population.host_parameters
        counted = np.where(finished[:, None], table.stage == Stage.FOSSILIZED, table.blended)
        chance = self._suite.chance_loss
        accuracy, loss = evaluation.accuracy, evaluation.loss
        if commitment is not None:
            accuracy = np.where(finished, commitment.accuracy, accuracy)
            loss = np.where(finished, commitment.loss, loss)

        def contribution(measured: Floats) -> Floats:
            return np.where(counted, np.nan_to_num(measured), 0.0)

        def rent(added: NDArray[np.integer], host: NDArray[np.number]) -> Floats:
            return compute_rent((added * counted).sum(axis=1), host, self._rent)

        return RewardState(
            {"accuracy": accuracy, "loss": 1 - loss / chance},
            {
                "accuracy": contribution(evaluation.accuracy_contribution),
                "loss": contribution(evaluation.loss_contribution) / chance,
            },
            {
                "parameters": rent(costs.parameters.resident(table), hosts),
                "flops": rent(costs.flops.resident(table), self._host_flops),
            },
            table.stage,
            np.where(table.blended, table.alpha, 0.0).astype(np.float64),
        )


def compute_rent(added: NDArray[np.number], host: NDArray[np.number], rent: Floats) -> Floats:
    """``rent * log1p(added / host)``; all ``[E]``, added and host in parameters or in FLOPs."""
    return rent * np.log1p(added.astype(float) / host.astype(float))


# Settings


class RewardSettings(Settings):
    """How a controller is paid.

    Weights are in units of the score, that is, 0.01 is worth a point of accuracy. A mode reads those of its own terms,
    and others are refused beside it.
    """

    rent_on: RentBasis = "parameters"
    """What rent is paid on."""
    progress: float = Field(default=0.02, ge=0, allow_inf_nan=False)
    """Advanced for each slot on its way from germination to holding, and taken back in the end."""
    attribution: float = Field(default=0.5, ge=0, allow_inf_nan=False)
    """Share of the seeds' contributions that is advanced, and taken back in the end."""
    intervention: float = Field(default=0.001, ge=0, allow_inf_nan=False)
    """Cost of every operation but wait."""
    intervention_after: float = Field(default=0.0, ge=0, lt=1)
    """Share of the training after which that cost sets in. It then grows evenly, and is whole halfway from there to the
    end: charged from the start, it can teach never to act before acting has ever paid."""
    shock: float = Field(default=0.002, ge=0, allow_inf_nan=False)
    """Cost of a seed's alpha moving by 1 in one step; it grows with the square of the change."""
    early_prune: float = Field(default=0.01, ge=0, allow_inf_nan=False)
    """Cost of pruning a seed before its time."""
    early_age: int = Field(default=5, ge=1, le=1000)
    """Steps since germination up to which pruning is before its time."""
    mode: str = "outcome"
    """Name of a reward mode."""
    family: Family = "accuracy"
    """Unit of scores and contributions: accuracy, or the relative decrease of the loss."""

    @field_validator("mode")
    @classmethod
    def _mode_exists(cls, name: str) -> str:
        if name not in MODES:
            hint = did_you_mean(name, MODES, limit=1, separator=",")
            raise ValueError(
                f"unknown reward mode '{name}'{hint} (known: {', '.join(MODES)}; one of your own: name the file that "
                "registers it, as ESPER_SUITES=FILE.py)"
            )
        return name

    @model_validator(mode="after")
    def _family_suits(self) -> Self:
        families = MODES[self.mode].families
        if self.family not in families:
            able = [name for name, mode in MODES.items() if self.family in mode.families]
            raise ValueError(
                f"reward mode '{self.mode}' pays in {' or '.join(families)}, not in {self.family}; "
                f"modes for {self.family} are {', '.join(able)}"
            )
        return self

    @model_validator(mode="after")
    def _weights_are_read(self) -> Self:
        for name in WEIGHTS:
            if name not in MODES[self.mode].weights and getattr(self, name) != type(self).model_fields[name].default:
                able = [mode for mode in MODES if name in MODES[mode].weights]
                raise ValueError(
                    f"reward mode '{self.mode}' does not read {name}: leave it out, or choose {' or '.join(able)}"
                )
        return self

    def at(self, progress: float) -> RewardSettings:
        """The settings at that share of the training, 0 to 1: the cost of interventions may not be whole yet."""
        if self.intervention_after == 0:
            return self
        whole_after = (1 - self.intervention_after) / 2
        share = min(max((progress - self.intervention_after) / whole_after, 0.0), 1.0)
        return self.model_copy(update={"intervention": self.intervention * share})


WEIGHTS = tuple(name for name in RewardSettings.model_fields if name not in ("rent_on", "mode", "family"))
"""The fields that only some modes read."""


# What a step pays: pure functions of it, ``[E]`` each, in units of the score

PROGRESS: dict[Stage, float] = {
    Stage.GERMINATED: 0.25,
    Stage.TRAINING: 0.5,
    Stage.BLENDING: 0.75,
    Stage.HOLDING: 1.0,
    Stage.FOSSILIZED: 1.0,
}
"""How far a slot has come; 0 in all other stages."""

_PROGRESS = np.array([PROGRESS.get(stage, 0.0) for stage in Stage])


def compute_objective(state: RewardState, settings: RewardSettings) -> Floats:
    """J: ``score - rent`` of the whole network."""
    return state.score[settings.family] - state.rent[settings.rent_on]


def shape_by_potential(before: Floats, after: Floats, finished: Bools) -> Floats:
    """``after - before``, where ``after`` is 0 at the end: whatever was advanced has been taken back by then.

    Potential-based shaping with discount 1 (Ng, Harada and Russell 1999): over an episode it adds up to 0, so it
    changes no order of returns.
    """
    return np.where(finished, 0.0, after) - before


def shape_by_progress(inputs: RewardInputs, settings: RewardSettings) -> Floats:
    """Shaping by how far *all* slots have come, the sum of `PROGRESS`."""
    before, after = (_PROGRESS[state.stage].sum(axis=1) for state in (inputs.before, inputs.after))
    return settings.progress * shape_by_potential(before, after, inputs.finished)


def charge_interventions(inputs: RewardInputs, settings: RewardSettings) -> Floats:
    """The cost of doing anything but wait."""
    return -settings.intervention * inputs.acted.astype(np.float64)


def charge_shocks(inputs: RewardInputs, settings: RewardSettings) -> Floats:
    """The cost of squared changes of alpha, summed over slots: 1 for a jump from nothing, 1/3 for a ramp of 3 steps."""
    return -settings.shock * np.square(inputs.after.alpha - inputs.before.alpha).sum(axis=1)


def charge_early_prune(inputs: RewardInputs, settings: RewardSettings) -> Floats:
    """The cost of pruning a seed before its time."""
    early = (inputs.pruned_age >= 0) & (inputs.pruned_age <= settings.early_age)
    return -settings.early_prune * early.astype(np.float64)


def pay_outcome(inputs: RewardInputs, settings: RewardSettings) -> RewardTerms:
    """``J' - J``: telescopes to J of the committed network, exactly.

    Known failure: noise of single evaluations enters every step's reward, though not their sum. In loss, a controller
    that moves alpha to and fro is not told apart from an honest one (docs/rewards.md).
    """
    return {"objective": compute_objective(inputs.after, settings) - compute_objective(inputs.before, settings)}


def pay_sparse(inputs: RewardInputs, settings: RewardSettings) -> RewardTerms:
    """J of the committed network at the last step, 0 before.

    Known failure: gives no hint which of the episode's decisions mattered.
    """
    return {"objective": np.where(inputs.finished, compute_objective(inputs.after, settings), 0.0)}


def pay_minimal(inputs: RewardInputs, settings: RewardSettings) -> RewardTerms:
    """`pay_sparse` less the cost of pruning before its time.

    Known failure: that of `pay_sparse`; and a seed that measurably harms is kept up to `early_age` all the same.
    """
    return {**pay_sparse(inputs, settings), "early_prune": charge_early_prune(inputs, settings)}


def pay_simplified(inputs: RewardInputs, settings: RewardSettings) -> RewardTerms:
    """`pay_sparse`, plus shaping by the progress of all slots, less the cost of interventions.

    Known failure: progress says that a seed is there, not that it is any good; what it advances is pure noise to learn
    from where most seeds are pruned. The cost of interventions can teach never to act before anything else is learned.
    """
    return {
        **pay_sparse(inputs, settings),
        "progress": shape_by_progress(inputs, settings),
        "intervention": charge_interventions(inputs, settings),
    }


def pay_shaped(inputs: RewardInputs, settings: RewardSettings) -> RewardTerms:
    """`pay_outcome`, plus shaping by the sum of contributions and by progress, less all costs.

    Known failure: every ramp of alpha costs, so growth that gains less than its shock (a third of the weight for three
    steps) does not pay; and six terms with weights are six ways to be wrong.
    """
    before, after = _sum_contributions(inputs, settings)
    return {
        **pay_outcome(inputs, settings),
        "attribution": settings.attribution * shape_by_potential(before, after, inputs.finished),
        "progress": shape_by_progress(inputs, settings),
        "intervention": charge_interventions(inputs, settings),
        "shock": charge_shocks(inputs, settings),
        "early_prune": charge_early_prune(inputs, settings),
    }


def pay_escrow(inputs: RewardInputs, settings: RewardSettings) -> RewardTerms:
    """The change of what seeds contribute, less the change of rent.

    Contributions are paid as they come and clawed back as they go; what is not fossilized by the end is taken back
    whole. Adds up to the fossils' contributions less rent, and never pays for what the host learns by itself.

    Known failure: contributions are not J. Of two seeds that do the same job neither contributes, so neither is paid;
    two that only work together are both paid for all of it, which makes complements worth twice their gain.
    """
    before, after = _sum_contributions(inputs, settings)
    rent = inputs.before.rent[settings.rent_on] - inputs.after.rent[settings.rent_on]
    return {"contribution": after - before, "rent": rent}


def _sum_contributions(inputs: RewardInputs, settings: RewardSettings) -> tuple[Floats, Floats]:
    """All seeds' together before the step and after it."""
    return (
        inputs.before.contribution[settings.family].sum(axis=1),
        inputs.after.contribution[settings.family].sum(axis=1),
    )


@dataclass(frozen=True)
class RewardMode:
    """A way to pay, the families of scores it can pay in, and the weights that it reads."""

    compute: Callable[[RewardInputs, RewardSettings], RewardTerms]
    families: tuple[str, ...]
    weights: tuple[str, ...] = ()


_Pay = TypeVar("_Pay", bound=Callable[[RewardInputs, RewardSettings], RewardTerms])
_INTERVENTION = ("intervention", "intervention_after")
_EARLY_PRUNE = ("early_prune", "early_age")
MODES: dict[str, RewardMode] = {
    "outcome": RewardMode(pay_outcome, ("accuracy", "loss")),
    "sparse": RewardMode(pay_sparse, ("accuracy",)),
    "minimal": RewardMode(pay_minimal, ("accuracy",), _EARLY_PRUNE),
    "simplified": RewardMode(pay_simplified, ("accuracy",), ("progress", *_INTERVENTION)),
    "shaped": RewardMode(
        pay_shaped, ("accuracy", "loss"), ("attribution", "progress", *_INTERVENTION, "shock", *_EARLY_PRUNE)
    ),
    "escrow": RewardMode(pay_escrow, ("accuracy", "loss")),
}
"""Reward modes by name."""


def register_reward(
    name: str, *, families: Sequence[str] = ("accuracy",), weights: Sequence[str] = ()
) -> Callable[[_Pay], _Pay]:
    """Decorator that makes a way to pay known as the reward mode ``name``, wherever rewards are named.

    ```python
    @register_reward("late")
    def pay_late(inputs: RewardInputs, settings: RewardSettings) -> dict[str, np.ndarray]:
        return {"objective": np.where(inputs.finished, inputs.after.score["accuracy"], 0.0)}
    ```

    The function gives the terms of which a step's reward is the sum, by name, ``[E]`` each, in units of the
    score; ``rollback`` is the governor's. It pays each network by that network alone. ``families`` are those of scores
    that it can pay in, ``weights`` the fields of `RewardSettings` that it reads; others are refused beside it. Running
    the same definition once more, as in a notebook, replaces it.

    Raises:
        ConfigError: the name is none, what pays is no function, another mode has that name, there is no such family or
            weight, or no family at all.
    """
    if not isinstance(name, str) or not name:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"a reward mode needs a name, as in @register_reward('mine'), not {describe_value(name)}")
    if not (isinstance(families, list | tuple) and isinstance(weights, list | tuple) and families):
        raise ConfigError(f"reward mode {name!r}: give families and weights as lists, such as ['accuracy']")
    for kind, given, known in (("family", families, get_args(Family)), ("weight", weights, WEIGHTS)):
        if unknown := [one for one in given if one not in known]:
            raise ConfigError(
                f"reward mode {name!r}: there is no {kind} {unknown[0]!r}; choose from {', '.join(known)}"
            )

    def registered(pay: _Pay) -> _Pay:
        if not isinstance(cast("object", pay), FunctionType):
            raise ConfigError(f"reward mode {name!r} is paid by {describe_value(pay)}: decorate a function")
        holder = MODES[name].compute if name in MODES else pay
        if _name(holder) != _name(pay) or (pay.__name__ == LAMBDA and holder is not pay):
            raise ConfigError(f"reward mode {name!r} is taken by {_name(holder)[1]}: choose another name")
        MODES[name] = RewardMode(pay, tuple(families), tuple(weights))
        return pay

    return registered


LAMBDA = "<lambda>"
"""What functions without a name are called, which so cannot be told apart."""


def _name(function: Callable[..., Any]) -> tuple[str, str]:
    """The same for a definition that is run again."""
    assert isinstance(function, FunctionType)
    return function.__module__, function.__qualname__


# Who is paid by which mode

OUTCOME = RewardSettings()
"""The default."""


def _parse_spec(value: Any) -> Any:
    """One mode by its name, the settings of one, or a list of either."""
    entries = list(cast("list[Any]", value)) if isinstance(value, list | tuple) else [value]
    return tuple({"mode": entry} if isinstance(entry, str) else entry for entry in entries)


RewardSpec = Annotated[tuple[RewardSettings, ...], BeforeValidator(_parse_spec), Field(min_length=1)]
"""Modes that the environments are paid by, in turns; a name or one mode's settings stand for a single one."""


def assign_rewards(settings: Sequence[RewardSettings], environments: int, group: int = 1) -> list[RewardSettings]:
    """The settings of each environment: neighbours in groups of ``group`` share theirs, and groups take turns."""
    return [settings[environment // group % len(settings)] for environment in range(environments)]


def group_by_settings(settings: Sequence[RewardSettings]) -> dict[RewardSettings, Bools]:
    """Which environments, bool ``[E]``, are paid by which settings; ``settings`` are those of each environment."""
    return {kind: np.array([one == kind for one in settings]) for kind in dict.fromkeys(settings)}


def compute_rewards(inputs: RewardInputs, paid_by: Mapping[RewardSettings, Bools]) -> RewardTerms:
    """What the rewards are the sum of, ``[E]`` each: every environment is paid by settings of its own.

    ``paid_by`` is as from `group_by_settings`.

    Raises:
        ConfigError: a mode that somebody registered gives something else than terms.
    """
    paid: RewardTerms = {}
    for settings, theirs in paid_by.items():
        terms = MODES[settings.mode].compute(inputs, settings)
        _require_terms(settings.mode, terms, inputs.finished.shape)
        for name, term in terms.items():
            paid[name] = np.where(theirs, term, paid.get(name, 0.0))
    return paid


def _require_terms(mode: str, terms: object, shape: tuple[int, ...]) -> None:
    expected = f"reward mode {mode!r} must give its terms by name, each an array {list(shape)}"
    kind = type(terms).__name__
    if not isinstance(terms, Mapping):
        raise ConfigError(f"{expected}, but it gives {kind}")
    if not terms:
        raise ConfigError(f"{expected}, but it gives none")
    for name, term in cast("Mapping[str, object]", terms).items():
        if name == ROLLBACK:
            raise ConfigError(f"reward mode {mode!r}: {ROLLBACK!r} is the governor's penalty, choose another name")
        shape_text = str(list(np.shape(cast("Any", term)))) if isinstance(term, np.ndarray) else type(term).__name__
        if shape_text != str(list(shape)):
            raise ConfigError(f"{expected}, but {name!r} is {shape_text}")
        values = cast("NDArray[Any]", term)
        if values.dtype.kind not in _REAL:
            raise ConfigError(f"{expected}, of real numbers, but {name!r} is of {values.dtype}")


def sum_reward_terms(terms: RewardTerms) -> Floats:
    """The rewards ``[E]``."""
    return np.sum(list(terms.values()), axis=0)
