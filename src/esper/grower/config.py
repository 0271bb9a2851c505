"""Configuration of a grower, and checks of the arguments of `Grower.step` and of saved states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
from esper.lifecycle.rules import Rules


def _read_controller(value: Any) -> Any:
    if isinstance(value, type) or not isinstance(value, str | Path | Controller):
        raise ValueError("no controller")
    return cast("object", value)


_CLASSES_ADVICE = Advice("give how many there are to choose from (say classes=2 for one output that tells yes from no)")
STATE_VERSION = 8
"""Version of the state that `esper.Grower.state_dict` returns."""
_SIGNATURE = ("classes", "seed")
"""Fields that must be the same where a state is saved and where it is loaded; others may change between decisions."""
_UNRECORDED = ("loss", "scaler")


class GrowerConfig(Settings):
    """How an `esper.Grower` decides. Each field may also be given to the grower as a keyword argument."""

    model_config = ConfigDict(**ARGUMENTS)

    controller: Annotated[
        str | Path | Controller,
        PlainValidator(_read_controller),
        Advice(
            "give a rule's name, the directory of a run of `esper train`, FILE.py:NAME, or a Controller of "
            "esper.control"
        ),
    ] = "look"
    """``look``, ``heuristic``, ``periodic``, ``all_at_start``, ``all_at_plateau``, ``random``, ``none``, the directory
    of a run of `esper train`, ``FILE.py:NAME`` of a class or function that makes a controller for a number of
    decisions, or an `esper.control.controller.Controller`."""
    horizon: PositiveInt | None = None
    """Number of planned decisions. Controllers see the fraction of them that is over, and plant nothing towards the
    end. None: until you stop; controllers then reckon with 100, and see at most half of them over, so that they go on
    planting. In any case `Grower.finish` judges what is unfinished at the end."""
    rules: InstanceOf[Rules] | None = None
    """What may happen to modules; None: the rules that the controller was trained with, or the default ones."""
    conduct: EpisodeConfig = EpisodeConfig()
    """When training that blows up is rolled back, what growth may cost, how often modules are measured, and when growth
    ends. The governor's penalty stays as it is: no reward is paid here."""
    rent: NonNegativeFloat = 0.0
    """Price of growth: ``rent * log1p(added / host)`` is taken off the score, and what each module adds to it off its
    contribution."""
    rent_on: RentBasis = "parameters"
    """Unit of ``added`` and ``host``: parameters, or FLOPs of a forward pass for one example. Controllers see all costs
    in it; policies were trained with parameters."""
    train_size: PositiveInt = 1000
    """Number of training examples; policies see it."""
    classes: Annotated[AtLeastTwo, _CLASSES_ADVICE] | None = None
    """Number of classes (the vocabulary of a language model). Losses are then cross-entropies in nats, and controllers
    see them relative to that of guessing. None: the number of the model's outputs, if ``evaluate`` gives an accuracy;
    otherwise losses are relative to the first that is measured."""
    training_flops: Flops | None = None
    """Budget of FLOPs for growth and training, as `esper.Spending` counts them, instead of a number of decisions or
    besides: controllers see the fraction that is spent, and when all is, growth is `Grower.finished`."""
    seconds: Seconds | None = None
    """Budget of seconds since the grower was made, with the same effect."""
    seed: NonNegativeInt = 0
    """Random seed of modules and controllers; all of several processes use that of the first one."""
    loss: Annotated[Callable[..., Tensor], Advice("give a function that computes the loss of a minibatch")] | None = (
        None
    )
    """Computes the training loss of a minibatch by calling the model, from the arguments of
    `Grower.isolated_backward`; isolation ``shadow`` and `esper.Refit` need it."""
    scaler: torch.amp.GradScaler | None = None
    """Gradient scaler of the loop, if it scales losses; gradients are then recorded without the scale."""

    @model_validator(mode="after")
    def _require_conduct(self) -> Self:
        if self.horizon is not None:
            self.conduct.require_measurements(self.horizon)
        governor, default = self.conduct.governor, GovernorSettings().penalty
        if governor is not None and governor.penalty != default:
            raise ValueError(
                f"conduct.governor.penalty is {governor.penalty}: it is a price in reward, and no reward is paid where "
                f"one model grows; leave it at {default}"
            )
        return self

    def override(self, fields: Mapping[str, Any]) -> GrowerConfig:
        """This configuration with other values in some ``fields``, checked.

        Raises:
            ConfigError: there is no such field, or the value does not fit.
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
    """Refuse rules that do not fit the blueprints, or under which constraints cannot be kept.

    Raises:
        ConfigError: they allow another blend than ``add``, and a blueprint takes no other; or they forbid pruning.
    """
    require_blends(rules.blends, kinds)
    if constrained and Op.PRUNE not in rules.operations:
        raise ConfigError("constraints: a seed that breaks one is pruned, but rules.operations lack 'prune'")


@dataclass(frozen=True)
class StepInputs:
    """The arguments of `Grower.step`, checked."""

    train_loss: float
    train_accuracy: float | None
    metrics: Metrics | None
    """Metrics of the model as it is, if they are known already."""


def check_step(
    train_loss: object,
    train_accuracy: object,
    val_loss: object,
    accuracy: object,
    metrics: Mapping[str, Any] | None,
    constraints: ConstraintSet,
) -> StepInputs:
    """Check the arguments of `Grower.step`.

    Raises:
        ConfigError: one is no number, an accuracy no fraction, or figures are given without the validation loss.
    """
    loss = check_number(train_loss, "train_loss")
    fraction = None if train_accuracy is None else check_number(train_accuracy, "train_accuracy")
    if fraction is not None and not 0 <= fraction <= 1 + ROUNDING:
        raise ConfigError(f"train_accuracy is {fraction:g}: give a fraction in [0, 1], or leave it out")
    # Without metrics `evaluate` is called; with some of them, all must be given.
    if val_loss is None and accuracy is None and metrics is None:
        return StepInputs(loss, fraction, None)
    if val_loss is None:
        raise ConfigError("accuracy and metrics belong to a val_loss: give that too, or none of them")
    supplied: dict[Any, Any] = {LOSS: check_number(val_loss, "val_loss")}
    if accuracy is not None:
        supplied[ACCURACY] = check_number(accuracy, "accuracy")
    others = cast("Mapping[Any, Any]", {} if metrics is None else metrics)
    if not isinstance(others, Mapping) or supplied.keys() & set(others):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError("metrics: give a mapping of the names of figures other than loss and accuracy to numbers")
    supplied |= others
    missing = next((name for name in map(name_loss, constraints.limits) if name not in supplied), None)
    if missing is not None:
        raise ConfigError(f"metrics: give {missing!r}, too, which is constrained, or no val_loss at all")
    return StepInputs(loss, fraction, parse_metrics(supplied))


def require_same(state: Mapping[str, Any], signature: Mapping[str, Any], parts: Sequence[str]) -> None:
    """Refuse a saved ``state`` with another ``signature`` than the grower's, or without one of its ``parts``.

    Raises:
        CheckpointError: the state does not fit.
    """
    for key, value in signature.items():
        if key not in state or state[key] != value:
            saved = f"was saved with {key} {state[key]!r}" if key in state else f"has no {key}"
            raise CheckpointError(
                f"the grower's state {saved}, but here it is {value!r}: load it into a grower with the same {key}, or "
                "begin anew without it"
            )
    for part in parts:
        if not isinstance(state.get(part), dict):
            raise CheckpointError(f"the grower's state is damaged (it has no {part}): give what state_dict() returned")
