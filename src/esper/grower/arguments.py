"""What a grower is told, checked; what its run says of it, and what must be the same where its state is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast, get_args

import torch
from torch import Tensor

from esper.config.arguments import (
    LARGEST,
    amount,
    callable_,
    describe,
    file_path,
    instance,
    name_of,
    one_of,
    optional,
    positive,
    truth,
    whole,
)
from esper.control.controller import Controller
from esper.errors import CheckpointError, ConfigError
from esper.grower.apart import Counterfactual
from esper.grower.constraints import LIMITS, ConstraintSet, name_loss
from esper.grower.listening import Listener
from esper.grower.scores import ACCURACY, EXPECTED, LOSS, ROUNDING, Figures, check_figures, check_number
from esper.growth.blueprints.registry import OF_LAYER, Blueprint
from esper.growth.look import Look
from esper.lifecycle.actions import Blend, Op
from esper.lifecycle.rules import Rules
from esper.population.budget import RentBasis
from esper.population.governor.detectors import GovernorSettings
from esper.rl.episode_config import EpisodeConfig

OPTIONS: Final = {
    "evaluate": callable_(f"give a function that takes the model and returns {EXPECTED}"),
    "metric": optional(name_of("a figure that evaluate returns")),
    "higher_is_better": optional(truth()),
    "classes": optional(
        whole(2, "give how many there are to choose from (say classes=2 for one output that tells yes from no)")
    ),
    "horizon": optional(whole(1, "give the number of decisions that are planned, at least 1")),
    "rules": optional(instance(Rules, advice="give an esper.lifecycle.rules.Rules")),
    "conduct": instance(EpisodeConfig, advice="give an esper.EpisodeConfig"),
    "rent": amount("give a number from 0 on"),
    "rent_on": one_of(get_args(RentBasis)),
    "train_size": whole(1, "give the number of training examples, at least 1"),
    "seed": whole(0, f"give a whole number from 0 to {LARGEST}"),
    "loss": optional(callable_("give a function that computes the loss of a minibatch")),
    "scaler": optional(instance(torch.amp.GradScaler, advice="give the torch.amp.GradScaler of the loop")),
    "run": optional(file_path("give the path of a new folder")),
    "verbose": truth(),
    "training_flops": optional(positive("give a number of FLOPs above 0")),
    "seconds": optional(positive("give a number of seconds above 0")),
    "objective": optional(name_of("a set of data that evaluate measures")),
    "constraints": optional(LIMITS),
    "evidence": one_of(Counterfactual),
}
"""What a grower is told by name."""
CONTROLLER = instance(
    str,
    Path,
    Controller,
    but=(type,),
    advice="give a rule's name, 'esper', the directory of a run of `esper train`, or a Controller of esper.control",
)
MINIBATCH_LOSS = instance(Tensor, advice="give the loss of the minibatch, a tensor")
STATE = instance(Mapping, advice="give what Grower.state_dict() returned")


def require_conduct(conduct: EpisodeConfig, horizon: int | None) -> None:
    """Refuse what could not act in so many decisions; None: as many as anybody wants.

    Raises:
        ConfigError: the governor's penalty was changed, or some slots would never be measured.
    """
    if horizon is not None:
        try:
            conduct.require_measurements(horizon)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    usual = GovernorSettings().penalty
    if conduct.governor is not None and conduct.governor.penalty != usual:
        raise ConfigError(
            f"conduct.governor.penalty is {conduct.governor.penalty}: it is a price in reward, which nobody is paid "
            f"where one model grows; leave it at {usual}"
        )


def require_rules(rules: Rules, kinds: Iterable[type[Blueprint]], *, constrained: bool) -> None:
    """Refuse rules that some of the blueprints, or constraints, cannot do with.

    Raises:
        ConfigError: they have other blends than to add for a blueprint that takes no other; or seeds cannot be pruned.
    """
    only_adding = next((kind.name for kind in kinds if kind.reads in OF_LAYER), None)
    if only_adding is not None and tuple(rules.blends) != (Blend.ADD,):
        raise ConfigError(f"rules.blends: blueprint {only_adding!r} only adds to the features; leave 'add' alone")
    if constrained and Op.PRUNE not in rules.operations:
        raise ConfigError("constraints: a seed that breaks one is pruned, but rules.operations lack 'prune'")


@dataclass(frozen=True)
class StepInputs:
    """What a grower hears at each step, checked."""

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
    """What the arguments of a step mean.

    Raises:
        ConfigError: one is no number, an accuracy no fraction, or figures are given without the validation loss.
    """
    loss = check_number(train_loss, "train_loss")
    known = None if train_accuracy is None else check_number(train_accuracy, "train_accuracy")
    if known is not None and not 0 <= known <= 1 + ROUNDING:
        raise ConfigError(f"train_accuracy is {known:g}: give a fraction in [0, 1], or leave it out")
    if val_loss is None and accuracy is None and metrics is None:
        return StepInputs(loss, known, None)
    if val_loss is None:
        raise ConfigError("accuracy and metrics belong to a val_loss: give that too, or none of them")
    given = {LOSS: val_loss} if accuracy is None else {LOSS: val_loss, ACCURACY: accuracy}
    others = cast(object, {} if metrics is None else metrics)
    if not isinstance(others, Mapping) or given.keys() & set(cast("Mapping[Any, Any]", others)):
        raise ConfigError("metrics: give a mapping of the names of figures other than loss and accuracy to numbers")
    named = {**given, **cast("Mapping[Any, Any]", others)}
    lacking = next((name for name in map(name_loss, constraints.limits) if name not in named), None)
    if lacking is not None:
        raise ConfigError(f"metrics: give {lacking!r}, too, which is constrained, or no val_loss at all")
    return StepInputs(loss, known, check_figures(named))


def check_look(look: object, listener: Listener | None) -> None:
    """Refuse what is not of `GrowingModel.look`, or what nobody goes by.

    Raises:
        ConfigError: it is such.
    """
    if look is None:
        return
    if not isinstance(look, Look):
        raise ConfigError(f"look is {describe(look)}: give what model.look(loss, batches) returned")
    if listener is None:
        raise ConfigError("the controller does not go by what blueprints promise: leave look out")


STATE_VERSION = 5
"""Version of what `esper.Grower.state_dict` returns."""
_SAME = ("metric", "higher_is_better", "objective", "constraints", "classes", "seed", "evidence")
"""Terms to which all that a grower remembers belongs; any other may be changed between decisions."""


@dataclass(frozen=True)
class Terms:
    """The arguments of `esper.Grower` that are plain values or settings."""

    controller: str
    """A rule by name, or the directory of a run as it was given."""
    horizon: int | None
    rules: Rules
    """Those in use."""
    conduct: EpisodeConfig
    rent: float
    rent_on: RentBasis
    train_size: int
    classes: int | None
    metric: str | None
    higher_is_better: bool | None
    objective: str | None
    constraints: Mapping[str, float]
    training_flops: float | None
    seconds: float | None
    evidence: Counterfactual
    seed: int
    """That of the first process, in all of them."""

    def to_dict(self) -> dict[str, Any]:
        """All by name; evidence as text."""
        return {**vars(self), "evidence": self.evidence.value}

    def signature(self) -> dict[str, Any]:
        """What must be the same where a state is saved and where it is loaded; plain values."""
        terms = self.to_dict()
        return {"version": STATE_VERSION, **{name: terms[name] for name in _SAME}}


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
