"""With what a model is compared where its seeds are judged."""

from __future__ import annotations

import inspect
from enum import StrEnum

import torch

from esper.control.controller import Controller
from esper.control.rules.simple import Never
from esper.errors import ConfigError
from esper.grower.shadow import LEARN_APART_LINE, LOSS_LINE, Loss


class Counterfactual(StrEnum):
    """The model without a seed, from which it follows what the seed contributes."""

    DEPENDENCE = "dependence"
    """The model as it is, with the seed switched off (leave-one-out). A model comes to lean on what it trains with, so
    this says how much it would miss the seed now, which is more than it gains by having it."""
    REFIT = "refit"
    """While a seed is on trial: a fork of the model from when the trial began, which has trained without the seed on
    the same minibatches since. Before and after, as ``dependence``."""


def require_forks(
    evidence: Counterfactual, controller: Controller, loss: Loss | None, optimizer: torch.optim.Optimizer
) -> None:
    """Refuse evidence that nothing is judged by, or for which a fork would have to learn where it cannot.

    Raises:
        ConfigError: the controller judges no seed by it, nobody said how to compute a ``loss``, or the optimizer
            computes losses by itself.
    """
    if evidence is not Counterfactual.REFIT:
        return
    if isinstance(controller, Never):
        raise ConfigError(
            f"evidence refit is what seeds on trial are judged by, but controller {controller.name!r} plants none: "
            "choose another controller, or leave evidence out"
        )
    if loss is None:
        raise ConfigError(
            "under evidence refit a fork without the seed learns from every minibatch as well: say how to compute its "
            f"loss, with {LOSS_LINE}, and call {LEARN_APART_LINE} before each loss.backward()"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"evidence refit cannot step {type(optimizer).__name__}, which computes losses by itself: take an "
            "optimizer whose step needs no closure, or evidence dependence"
        )
