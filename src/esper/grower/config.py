"""Configuration of a grower, the controller that it names, and checks of what `Grower`'s methods are given."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self, cast

import numpy as np
import torch
from pydantic import ConfigDict, InstanceOf, PlainValidator, ValidationError, model_validator
from torch import Tensor

from esper.config.arguments import (
    ARGUMENTS,
    Advice,
    AtLeastTwo,
    Flops,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Seconds,
    describe_argument_error,
)
from esper.config.settings import Settings
from esper.control.controller import Controller, get_promise_settings, is_in_file, load_controller
from esper.control.learned import PolicyOrigin, open_policy, restore_controller
from esper.control.rules import (
    ROUNDING,
    Heuristic,
    HeuristicSettings,
    LookRule,
    LookSettings,
    Never,
    Periodic,
    PeriodicSettings,
    Planting,
    Schedule,
    Uniform,
)
from esper.engine.budget import RentBasis
from esper.engine.engine import GrowthConfig
from esper.engine.governor import GovernorSettings
from esper.errors import CheckpointError, ConfigError, did_you_mean, plural
from esper.extras import require_extra
from esper.grower.scores import ACCURACY, LOSS, ConstraintSet, Metrics, check_number, name_loss, parse_metrics
from esper.growth.blueprints.registry import Blueprint
from esper.growth.promise import PromiseSettings
from esper.growth.slot import require_blends
from esper.lifecycle.actions import Op
from esper.lifecycle.rules import Isolation, Rules
from esper.numerics.arrays import Bools, Ints


def _read_controller(value: Any) -> Any:
    if isinstance(value, type) or not isinstance(value, str | Path | Controller):
        raise ValueError("no controller")
    return cast("object", value)


STATE_VERSION = 13
"""Version of the state that `esper.Grower.state_dict` returns."""
_SIGNATURE = ("classes", "seed")
"""Fields that must be the same where a state is loaded; others may change between decisions."""
_UNRECORDED = ("loss", "scaler")


class GrowerConfig(Settings):
    """How an `esper.Grower` decides. Each field is also a keyword argument of the grower."""

    model_config = ConfigDict(**ARGUMENTS)

    controller: Annotated[
        str | Path | Controller,
        PlainValidator(_read_controller),
        Advice(
            "give the name of a rule, the directory of a run of `esper train`, FILE.py:NAME, or a Controller of "
            "esper.control"
        ),
    ] = "look"
    """A rule (``look``, ``heuristic``, ``periodic``, ``all_at_start``, ``all_at_plateau``, ``random`` or ``none``); the
    directory of a run of `esper train`; ``FILE.py:NAME`` of a class or function that takes the number of decisions and
    returns a controller; or an `esper.control.controller.Controller`."""
    horizon: PositiveInt | None = None
    """Planned number of decisions. Controllers observe the elapsed fraction and stop planting near the end. None:
    open-ended; controllers then assume 100 decisions and observe an elapsed fraction of at most 1/2, so they keep
    planting. `Grower.finish` decides on unfinished modules in either case."""
    rules: InstanceOf[Rules] | None = None
    """Which operations are allowed; None: the rules the controller was trained with, or the defaults."""
    growth: GrowthConfig = GrowthConfig()
    """Rollbacks, budget, intervals of measurements, and the plateau that ends growth. The governor's penalty must keep
    its default, since a grower has no reward."""
    rent: NonNegativeFloat = 0.0
    """Price of growth. ``rent * log1p(added / host)`` is subtracted from the score, and each module's part of it from
    its contribution."""
    rent_on: RentBasis = "parameters"
    """Unit of ``added`` and ``host``: parameters, or FLOPs of a forward pass for one example. Controllers observe all
    costs in this unit. Policies are trained with parameters."""
    train_size: PositiveInt = 1000
    """Number of training examples, which trained policies observe."""
    classes: Annotated[AtLeastTwo, Advice("give the number of classes (classes=2 for one yes/no output)")] | None = None
    """Number of classes, or vocabulary size of a language model. Losses must then be cross-entropies in nats, and are
    scored relative to uniform guessing. None: the number of the model's outputs if ``evaluate`` gives an accuracy;
    otherwise losses are scored relative to the first measured loss."""
    training_flops: Flops | None = None
    """Budget of training FLOPs, as `esper.grower.spending` counts them, instead of or besides ``horizon``. Controllers
    observe the fraction spent; at 1, growth is `Grower.finished`."""
    seconds: Seconds | None = None
    """Budget of seconds since the grower was made, with the same effect."""
    seed: NonNegativeInt = 0
    """Random seed of modules and controllers. Several processes use that of the first one."""
    loss: Annotated[Callable[..., Tensor], Advice("give a function that computes the loss of a minibatch")] | None = (
        None
    )
    """Computes the training loss of a minibatch by calling the model with the arguments of `Grower.isolated_backward`.
    Required by `esper.Refit`."""
    scaler: torch.amp.GradScaler | None = None
    """The training loop's gradient scaler, if any; gradients are then recorded unscaled."""

    @model_validator(mode="after")
    def _require_growth(self) -> Self:
        if self.horizon is not None:
            self.growth.require_measurements(self.horizon)
        governor, default = self.growth.governor, GovernorSettings().penalty
        if governor is not None and governor.penalty != default:
            raise ValueError(
                f"growth.governor.penalty is {governor.penalty}, but it is part of a reward, which a grower does not "
                f"use: leave it at {default}"
            )
        return self

    def override(self, fields: Mapping[str, Any]) -> GrowerConfig:
        """A copy of this configuration with new values for ``fields``."""
        names = type(self).model_fields
        unknown = next((name for name in fields if name not in names), None)
        if unknown is not None:
            hint = did_you_mean(unknown, names) or f"; choose from {', '.join(names)}"
            raise ConfigError(f"a grower has no argument {unknown!r}{hint}")
        values = {name: getattr(self, name) for name in self.model_fields_set} | dict(fields)
        try:
            return type(self).model_validate(values)
        except ValidationError as failure:
            raise ConfigError(describe_argument_error(failure, values, type(self), {})) from None

    def to_dict(self) -> dict[str, Any]:
        """The fields that a run records, by name."""
        return {name: getattr(self, name) for name in type(self).model_fields if name not in _UNRECORDED}

    def signature(self) -> dict[str, Any]:
        """The version, and the fields that must be the same where a state is loaded."""
        return {"version": STATE_VERSION, **{name: getattr(self, name) for name in _SIGNATURE}}


def require_rules(rules: Rules, kinds: Iterable[type[Blueprint]], *, constrained: bool) -> None:
    """Refuse rules that a grower cannot carry out, that do not fit the blueprints, or that break constraints."""
    if rules.isolation is not Isolation.NONE:
        raise ConfigError(
            f"a Grower does not train modules in isolation {rules.isolation}, only `esper train` does: give "
            "rules=esper.Rules(...) with isolation 'none'"
        )
    require_blends(rules.blends, kinds)
    if constrained and Op.PRUNE not in rules.operations:
        raise ConfigError("constraints need pruning: add 'prune' to rules.operations")


def check_step(
    train_loss: object,
    train_accuracy: object,
    val_loss: object,
    accuracy: object,
    metrics: Mapping[str, Any] | None,
    constraints: ConstraintSet,
) -> tuple[float, float, Metrics | None]:
    """Training loss, training accuracy (NaN: not given) and metrics (None: not given) for `Grower.step`."""
    loss = check_number(train_loss, "train_loss")
    fraction = math.nan if train_accuracy is None else check_number(train_accuracy, "train_accuracy")
    if train_accuracy is not None and not 0 <= fraction <= 1 + ROUNDING:
        raise ConfigError(f"train_accuracy is {fraction:g}: give a fraction in [0, 1], or omit it")
    # Without metrics `evaluate` is called; with some of them, all must be given.
    if val_loss is None and accuracy is None and metrics is None:
        return loss, fraction, None
    if val_loss is None:
        raise ConfigError("accuracy and metrics need val_loss: give it too, or none of them")
    supplied: dict[Any, Any] = {LOSS: check_number(val_loss, "val_loss")}
    if accuracy is not None:
        supplied[ACCURACY] = check_number(accuracy, "accuracy")
    others = cast("Mapping[Any, Any]", {} if metrics is None else metrics)
    if not isinstance(others, Mapping) or supplied.keys() & set(others):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError("metrics: give a mapping from names, other than loss and accuracy, to numbers")
    supplied |= others
    missing = next((name for name in map(name_loss, constraints.limits) if name not in supplied), None)
    if missing is not None:
        raise ConfigError(f"metrics lacks {missing!r}, which is constrained: add it, or omit val_loss")
    return loss, fraction, parse_metrics(supplied)


def require_same(state: Mapping[str, Any], signature: Mapping[str, Any], parts: Sequence[str]) -> None:
    """Refuse a saved ``state`` with another ``signature`` than the grower's, or without one of its ``parts``."""
    for key, value in signature.items():
        if key not in state or state[key] != value:
            saved = f"was saved with {key} {state[key]!r}" if key in state else f"has no {key}"
            raise CheckpointError(
                f"the grower's state {saved}, but this grower has {value!r}: load it into a grower with the same "
                f"{key}, or start without the state"
            )
    for part in parts:
        if not isinstance(state.get(part), dict):
            raise CheckpointError(f"the grower's state is damaged ({part} is missing): give what state_dict() returned")


HORIZON = 100
"""Decisions that controllers assume where the number is not planned."""
MAX_UNPLANNED_PROGRESS = 0.5
"""Most progress that controllers see where the number of decisions is not planned: until then every rule plants."""
PROBATIONS_PER_HORIZON = 4
"""The horizon has room for so many probations."""
MIN_LOOKS = 3
"""Looks while modules may be planted, if growth is long enough."""
PLANTING_PART = 3
"""Modules may germinate at least in the first of so many parts of growth."""
_BEFORE_BLENDING = 1
"""Decisions from germination until a module begins to count."""
_BEFORE_END = 1
"""Decisions for which a module should have counted at the end."""


@dataclass(frozen=True)
class Timing:
    """The number of planned decisions, if any, and the settings of rules that fit into them."""

    planned: int | None
    rules: Rules

    @property
    def horizon(self) -> int:
        """Decisions that controllers assume."""
        return HORIZON if self.planned is None else self.planned

    def compute_progress(self, decision: int) -> float:
        """The share of growth that is over at that decision, from 1, as controllers see it."""
        return min(decision / self.horizon, MAX_UNPLANNED_PROGRESS if self.planned is None else 1.0)

    def require_growth(self) -> None:
        """Refuse a plan in which no module could germinate, count and learn."""
        needed = 1 + _BEFORE_BLENDING + _BEFORE_END
        if self.horizon < needed:
            raise ConfigError(
                f"{plural(self.horizon, 'decision')} is too few for anything to grow: a seed germinates, affects the "
                f"output from the next decision on, and must train until another decision; plan at least {needed}, or "
                "use controller 'none'"
            )

    def fit_probation(self, probation: int, stop_after: float, at_a_time: int) -> tuple[int, float]:
        """A rule's probation, and the share of growth after which it plants nothing: less than given in a short growth,
        so that every module can be decided on before the end.
        """
        probation = min(probation, max(self.horizon // PROBATIONS_PER_HORIZON, 1))
        needed = 1 + _BEFORE_BLENDING + min(self.rules.tempos) + probation + at_a_time
        latest = max(self.horizon - needed, self.horizon // PLANTING_PART)
        return probation, min(stop_after, latest / self.horizon)


ALL_AT_START = "all_at_start"
ALL_AT_PLATEAU = "all_at_plateau"
PLATEAU_PATIENCE, PLATEAU_LATEST = 2, 0.5
"""Decisions without progress, or share of growth, after which `ALL_AT_PLATEAU` plants."""

_RULES = (LookRule.name, Heuristic.name, Periodic.name, ALL_AT_START, ALL_AT_PLATEAU, Uniform.name, Never.name)


def choose_controller(
    controller: str | Path | Controller, horizon: int | None, rules: Rules | None, parameters: Ints, compatible: Bools
) -> tuple[Controller, Timing]:
    """The controller that the configuration names, and its timing, with the ``rules`` of a policy's training if None.

    Rules choose by the ``parameters`` of blueprints and by whether they are ``compatible``, ``[S, K]`` each.
    """
    timing = Timing(horizon, rules or Rules())
    if not isinstance(controller, str | Path):
        return controller, timing
    name = str(controller)
    if name in _RULES:
        return _make_rule(name, timing, parameters, compatible), timing
    if is_in_file(name):
        return load_controller(name, timing.horizon), timing
    # Not a rule: the directory of a run.
    run = open_policy(name, _RULES)
    require_extra("train", f"controller {name!r}, which is the run of a training,", "yaml")
    from esper.config.loading import load_settings  # noqa: PLC0415 (needs the extra)

    origin = load_settings(PolicyOrigin, run.config)
    timing = Timing(horizon, rules or origin.rules)
    timing.require_growth()
    return restore_controller(run, origin, partial(_make_look, timing, len(compatible))), timing


def _make_rule(name: str, timing: Timing, parameters: Ints, compatible: Bools) -> Controller:
    if name == Never.name:
        return Never()
    timing.require_growth()
    if name == Uniform.name:
        return Uniform()
    if name == LookRule.name:
        return _make_look(timing, len(compatible), LookSettings())
    if name in (ALL_AT_START, ALL_AT_PLATEAU):
        # In each slot the largest blueprint that it offers; of equal ones the first.
        largest = np.where(compatible, parameters, -1).argmax(axis=1)
        slots = np.flatnonzero(compatible.any(axis=1)).tolist()
        plantings = [Planting(0, slot, int(largest[slot])) for slot in slots]
        if name == ALL_AT_START:
            return Schedule(plantings, timing.horizon, ALL_AT_START)
        # One per decision, and early enough for all of them to count fully at the end.
        needed = _BEFORE_BLENDING + min(timing.rules.tempos) + len(plantings) + _BEFORE_END
        latest = min(PLATEAU_LATEST, max(timing.horizon - needed, 0) / timing.horizon)
        return Schedule(plantings, timing.horizon, ALL_AT_PLATEAU, patience=PLATEAU_PATIENCE, latest=latest)

    # Slot and blueprint in the order of planting: the smallest blueprint first, each from the last slot to the first.
    slots, kinds = compatible.nonzero()
    pairs = zip(slots.tolist(), kinds.tolist(), strict=True)
    offers = tuple(sorted(pairs, key=lambda pair: (int(parameters[pair]), -pair[0])))
    defaults = HeuristicSettings()
    probation, stop_after = timing.fit_probation(defaults.probation, defaults.stop_after, defaults.at_a_time)
    if name == Periodic.name:
        return Periodic(PeriodicSettings(plantings=offers, probation=probation, stop_after=stop_after), timing.horizon)
    return Heuristic(HeuristicSettings(preferences=offers, probation=probation, stop_after=stop_after), timing.horizon)


def _make_look(timing: Timing, slots: int, default: LookSettings) -> LookRule:
    probation, stop_after = timing.fit_probation(default.probation, default.stop_after, 1)
    # It looks earlier and more often than by default, if it has to for a few looks while it may plant.
    latest = max(int(stop_after * timing.horizon + ROUNDING), 1)
    first = min(default.promise.first, latest)
    every = min(default.promise.every, max((latest - first) // (MIN_LOOKS - 1), 1))
    # Decision after decision it plants long enough for every slot, but at most in the first third of growth.
    early = max(default.early, min(first + slots - 1, timing.horizon // PLANTING_PART) / timing.horizon)
    promise = default.promise.model_copy(update={"first": first, "every": every})
    update = {"promise": promise, "early": early, "probation": probation, "stop_after": stop_after}
    return LookRule(default.model_copy(update=update), timing.horizon)


def require_time_to_plant(controller: Controller, plateau: int | None) -> None:
    """Refuse a ``plateau`` that ends growth before the controller reacts to one."""
    if isinstance(controller, Schedule) and plateau is not None and plateau <= controller.patience:
        raise ConfigError(
            f"growth.plateau {plateau} ends growth before controller {controller.name!r} plants, which is after "
            f"{controller.patience:g} decisions without progress: give a larger plateau, or omit it"
        )


def choose_promise_settings(controller: Controller, requested: PromiseSettings | None) -> PromiseSettings | None:
    """How promises are measured for the controller: as ``requested``, or as it asks; None: they are not."""
    settings = get_promise_settings(controller)
    if requested is None:
        return settings
    if settings is None:
        raise ConfigError(
            f"controller {controller.name!r} does not use promises: omit growth.promise, use controller "
            f"{LookRule.name!r}, or give your own controller an attribute `promise`"
        )
    if requested.shown != settings.shown:
        raise ConfigError(
            f"growth.promise.shown is {requested.shown!r}, but controller {controller.name!r} needs {settings.shown!r}"
        )
    return requested
