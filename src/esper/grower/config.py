"""What a grower is constructed with, checked: what a run records of it, and what a saved state must have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self, cast

import torch
from pydantic import ConfigDict, Field, InstanceOf, PlainValidator, model_validator
from torch import Tensor

from esper.config.arguments import (
    ARGUMENTS,
    Advice,
    AtLeastTwo,
    FilePath,
    Flops,
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Seconds,
)
from esper.config.settings import Settings
from esper.control.controller import Controller
from esper.engine.budget import RentBasis
from esper.engine.config import EpisodeConfig
from esper.engine.governor import GovernorSettings
from esper.errors import CheckpointError, ConfigError
from esper.grower.constraints import ConstraintSet, Limits, name_loss
from esper.grower.isolated import Counterfactual
from esper.grower.scores import ACCURACY, LOSS, ROUNDING, Figures, check_figures, check_number
from esper.growth.blueprints.registry import LAYER_CONTEXTS, Blueprint
from esper.lifecycle.actions import Blend, Op
from esper.lifecycle.rules import Rules


def _read_controller(value: Any) -> Any:
    if isinstance(value, type) or not isinstance(value, str | Path | Controller):
        raise ValueError("no controller")
    return cast("object", value)


_CLASSES_ADVICE = Advice("give how many there are to choose from (say classes=2 for one output that tells yes from no)")
STATE_VERSION = 5
"""Version of what `esper.Grower.state_dict` returns."""
_SIGNATURE = ("metric", "higher_is_better", "objective", "constraints", "classes", "seed", "evidence")
"""Fields to which all that a grower remembers belongs; any other may be changed between decisions."""
_UNRECORDED = ("loss", "scaler", "run", "verbose")


class GrowerConfig(Settings):
    """The keyword arguments of `esper.Grower`, except for `evaluate`, which describes them."""

    model_config = ConfigDict(**ARGUMENTS)

    controller: Annotated[
        str | Path | Controller,
        PlainValidator(_read_controller),
        Advice(
            "give a rule's name, 'esper', the directory of a run of `esper train`, or a Controller of esper.control"
        ),
    ] = "look"
    """A rule by name, the directory of a run, or a controller."""
    horizon: PositiveInt | None = None
    """Decisions that are planned."""
    rules: InstanceOf[Rules] | None = None
    """What may happen to seeds; None: the controller's rules, or the default ones."""
    conduct: EpisodeConfig = EpisodeConfig()
    """Rollbacks, budget, how often seeds are measured, and when nothing more is decided."""
    rent: NonNegativeFloat = 0.0
    """What growth costs, in units of the score."""
    rent_on: RentBasis = "parameters"
    """What rent is paid on."""
    train_size: PositiveInt = 1000
    """Number of training examples."""
    classes: Annotated[AtLeastTwo, _CLASSES_ADVICE] | None = None
    """Number of classes."""
    metric: Annotated[Name, Advice("give the name of a figure that evaluate returns")] | None = None
    """The figure that growth is about."""
    higher_is_better: bool | None = None
    """Whether the metric is better the higher it is."""
    objective: Annotated[Name, Advice("give the name of a set of data that evaluate measures")] | None = None
    """The set of validation data that growth is about."""
    constraints: Limits | None = None
    """By which share the losses of other sets may rise."""
    training_flops: Flops | None = None
    """FLOPs that growth and training may take."""
    seconds: Seconds | None = None
    """Seconds that growth and training may take."""
    evidence: Annotated[Counterfactual, Field(strict=False)] = Counterfactual.DEPENDENCE
    """What seeds on trial are judged by."""
    seed: NonNegativeInt = 0
    """All that is random follows from it; that of the first process, in all of them."""
    loss: Annotated[Callable[..., Tensor], Advice("give a function that computes the loss of a minibatch")] | None = (
        None
    )
    """The training loss of a minibatch."""
    scaler: torch.amp.GradScaler | None = None
    """Scales the losses of the loop."""
    run: Annotated[FilePath, Advice("give the path of a new folder")] | None = None
    """A new folder for the run's store."""
    verbose: bool = False
    """Whether decisions are printed."""

    @model_validator(mode="after")
    def _require_conduct(self) -> Self:
        if self.horizon is not None:
            self.conduct.require_measurements(self.horizon)
        governor, default = self.conduct.governor, GovernorSettings().penalty
        if governor is not None and governor.penalty != default:
            raise ValueError(
                f"conduct.governor.penalty is {governor.penalty}: it is a price in reward, which nobody is paid where "
                f"one model grows; leave it at {default}"
            )
        return self

    def to_dict(self) -> dict[str, Any]:
        """The fields that a run records, by name; evidence as text."""
        values = {name: getattr(self, name) for name in type(self).model_fields if name not in _UNRECORDED}
        return {**values, "evidence": self.evidence.value}

    def signature(self) -> dict[str, Any]:
        """The values that must be the same where a state is saved and where it is loaded."""
        values = self.to_dict()
        return {"version": STATE_VERSION, **{name: values[name] for name in _SIGNATURE}}


def require_rules(rules: Rules, kinds: Iterable[type[Blueprint]], *, constrained: bool) -> None:
    """Refuse rules that some of the blueprints, or constraints, cannot do with.

    Raises:
        ConfigError: they have other blends than to add for a blueprint that takes no other; or seeds cannot be pruned.
    """
    only_adding = next((kind.name for kind in kinds if kind.context in LAYER_CONTEXTS), None)
    if only_adding is not None and tuple(rules.blends) != (Blend.ADD,):
        raise ConfigError(f"rules.blends: blueprint {only_adding!r} only adds to the features; leave 'add' alone")
    if constrained and Op.PRUNE not in rules.operations:
        raise ConfigError("constraints: a seed that breaks one is pruned, but rules.operations lack 'prune'")


@dataclass(frozen=True)
class StepInputs:
    """The arguments of `Grower.step`, checked."""

    train_loss: float
    train_accuracy: float | None
    whole: Figures | None
    """Figures of the model as it is, if they are known already."""


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
    if val_loss is None and accuracy is None and metrics is None:
        return StepInputs(loss, fraction, None)
    if val_loss is None:
        raise ConfigError("accuracy and metrics belong to a val_loss: give that too, or none of them")
    figures = {LOSS: val_loss} if accuracy is None else {LOSS: val_loss, ACCURACY: accuracy}
    other_figures = cast(object, {} if metrics is None else metrics)
    if not isinstance(other_figures, Mapping) or figures.keys() & set(cast("Mapping[Any, Any]", other_figures)):
        raise ConfigError("metrics: give a mapping of the names of figures other than loss and accuracy to numbers")
    all_figures = {**figures, **cast("Mapping[Any, Any]", other_figures)}
    missing = next((name for name in map(name_loss, constraints.limits) if name not in all_figures), None)
    if missing is not None:
        raise ConfigError(f"metrics: give {missing!r}, too, which is constrained, or no val_loss at all")
    return StepInputs(loss, fraction, check_figures(all_figures))


def require_same(state: Mapping[str, Any], signature: Mapping[str, Any], parts: Sequence[str]) -> None:
    """Refuse a saved ``state`` with another ``signature`` than the grower's, or without one of its ``parts``.

    Raises:
        CheckpointError: it is one.
    """
    for key, here in signature.items():
        if key not in state or state[key] != here:
            saved = f"was saved with {key} {state[key]!r}" if key in state else f"says nothing of its {key}"
            raise CheckpointError(
                f"the grower's state {saved}, but here it is {here!r}: load it into a grower that is told the same, or "
                "begin anew without it"
            )
    for part in parts:
        if not isinstance(state.get(part), dict):
            raise CheckpointError(f"the grower's state is damaged (it has no {part}): give what state_dict() returned")
