"""Configuration of a grower, and checks of the arguments of `Grower.step` and of saved states."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self, cast

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
from esper.control.controller import Controller
from esper.engine.budget import RentBasis
from esper.engine.config import EpisodeConfig
from esper.engine.governor import GovernorSettings
from esper.errors import CheckpointError, ConfigError, did_you_mean
from esper.grower.scores import (
    ACCURACY,
    LOSS,
    ROUNDING,
    ConstraintSet,
    Metrics,
    check_number,
    name_loss,
    parse_metrics,
)
from esper.growth.blueprints.registry import Blueprint
from esper.growth.seed import require_blends
from esper.lifecycle.actions import Op
from esper.lifecycle.rules import Isolation, Rules


def _read_controller(value: Any) -> Any:
    if isinstance(value, type) or not isinstance(value, str | Path | Controller):
        raise ValueError("no controller")
    return cast("object", value)


_CLASSES_ADVICE = Advice("give the number of classes (classes=2 for one yes/no output)")
STATE_VERSION = 9
"""Version of the state that `esper.Grower.state_dict` returns."""
_SIGNATURE = ("classes", "seed")
"""Fields that must be the same where a state is saved and where it is loaded; others may change between decisions."""
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
    planting. `Grower.finish` judges unfinished modules in either case."""
    rules: InstanceOf[Rules] | None = None
    """Which operations are allowed; None: the rules the controller was trained with, or the defaults."""
    conduct: EpisodeConfig = EpisodeConfig()
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
    classes: Annotated[AtLeastTwo, _CLASSES_ADVICE] | None = None
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
    def _require_conduct(self) -> Self:
        if self.horizon is not None:
            self.conduct.require_measurements(self.horizon)
        governor, default = self.conduct.governor, GovernorSettings().penalty
        if governor is not None and governor.penalty != default:
            raise ValueError(
                f"conduct.governor.penalty is {governor.penalty}, but it is part of a reward, which a grower does not "
                f"use: leave it at {default}"
            )
        return self

    def override(self, fields: Mapping[str, Any]) -> GrowerConfig:
        """A copy of this configuration with new values for ``fields``.

        Raises:
            ConfigError: a field does not exist, or a value is invalid.
        """
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
        """The values that must be the same where a state is saved and where it is loaded."""
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
    """The checked arguments of `Grower.step`: training loss, training accuracy, and metrics of the model as it is.

    The accuracy is NaN, and the metrics are None, where they are not given.
    """
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
