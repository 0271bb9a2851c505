"""What learns apart from the loop, in passes of its own: seeds in isolation ``shadow``, and forks without a seed.

The loop hands over each minibatch and its loss. Gradients for whoever learns apart are computed at once, and arrive
with the backward pass of that loss, weighed as it weighs the loss; nothing else about the model is any different.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from esper.control.controller import Controller
from esper.control.rules.simple import Never
from esper.errors import ConfigError
from esper.grower.fork import SeedlessFork, add_gradient, compute_gradients
from esper.growth.model import GrowingModel
from esper.growth.seed import Seed
from esper.growth.side_pass import side_pass
from esper.lifecycle.rules import Isolation, Rules
from esper.lifecycle.stages import Stage
from esper.lifecycle.table import Evidence, SeedTable

Loss = Callable[..., Tensor]
"""The loss of a minibatch, from whatever stands for one: a scalar that can be differentiated."""

REFIT = 2
"""Decisions after which a fork has got over the loss of its seed."""
_LOSS_LINE = "Grower(..., loss=lambda inputs, labels: F.cross_entropy(model(inputs), labels))"
_LEARN_APART_LINE = "grower.learn_apart(loss, inputs, labels)"


class Counterfactual(StrEnum):
    """The model without a seed, from which it follows what the seed contributes."""

    DEPENDENCE = "dependence"
    """The model as it is, with the seed switched off (leave-one-out). A model comes to lean on what it trains with, so
    this says how much it would miss the seed now, which is more than it gains by having it."""
    REFIT = "refit"
    """While a seed is on trial: a fork of the model from when the trial began, which has trained without the seed on
    the same minibatches since. Before and after, as ``dependence``."""


def require_loss(
    rules: Rules,
    evidence: Counterfactual,
    controller: Controller,
    loss: Loss | None,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Refuse rules or evidence for which something must learn apart where it cannot, or for nobody's use.

    Raises:
        ConfigError: nobody said how to compute a ``loss``, the controller judges no seed by the evidence, or the
            optimizer computes losses by itself, which a fork's cannot.
    """
    if rules.isolation is Isolation.SHADOW and loss is None:
        raise ConfigError(
            "under isolation shadow a seed learns from a pass of its own over every minibatch: say how to compute its "
            f"loss, with {_LOSS_LINE}, and call {_LEARN_APART_LINE} before each loss.backward()"
        )
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
            f"loss, with {_LOSS_LINE}, and call {_LEARN_APART_LINE} before each loss.backward()"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"evidence refit cannot step {type(optimizer).__name__}, which computes losses by itself: take an "
            "optimizer whose step needs no closure, or evidence dependence"
        )


class ApartLearner:
    """Lets isolated seeds and forks learn whenever the model does.

    Args:
        model: Whose seeds they are.
        optimizer: Of the model; after each of its steps it is checked that all had a gradient, and forks step.
        evidence: Under ``dependence`` there are no forks.
        loss: Calls ``model``; None where nothing learns apart.
        scaler: Of the loop, if it has one; it multiplies losses before they are differentiated, against underflow.
        observe: Told of every parameter of an isolated seed whose gradient has grown.
        average: Makes a parameter's gradient that of all processes.
    """

    def __init__(
        self,
        model: GrowingModel,
        optimizer: torch.optim.Optimizer,
        evidence: Counterfactual,
        loss: Loss | None,
        scaler: torch.amp.GradScaler | None,
        observe: Callable[[Tensor], None],
        average: Callable[[Tensor], None],
    ) -> None:
        self._model, self._optimizer, self._loss, self._scaler = model, optimizer, loss, scaler
        self._observe, self._average = observe, average
        self._forking = evidence is Counterfactual.REFIT
        self._forks: dict[str, SeedlessFork] = {}
        self._ripe: set[str] = set()
        """Slots whose forks are old enough to be compared with at the next decision."""
        self._arrived: set[str] = set()
        """Slots whose isolated seed or whose fork has had a gradient since the optimizer's last step."""
        self._minibatches = 0
        """From which forks have learned since the last decision."""
        optimizer.register_step_pre_hook(self._arrange)
        optimizer.register_step_post_hook(self._step)

    @property
    def forks(self) -> dict[str, SeedlessFork]:
        """By the slots whose seeds are on trial."""
        trials = {name: seed for name, seed in self._model.seeds.items() if not seed.fossilized}
        return {name: fork for name, fork in self._forks.items() if fork.seed is trials.get(name)}

    def ripe_forks(self) -> dict[str, SeedlessFork | None]:
        """For the seeds on trial: their forks, None until these are old enough to be compared with.

        Raises:
            ConfigError: no fork has learned since the last decision.
        """
        forks = self.forks
        if forks and not self._minibatches:
            raise ConfigError(
                f"under evidence refit the seed in slot {next(iter(forks))!r} is compared with a fork of the model, "
                f"which has learned nothing since the last decision: call {_LEARN_APART_LINE} before each "
                "loss.backward()"
            )
        return {name: fork if name in self._ripe else None for name, fork in forks.items()}

    def update_forks(self, table: SeedTable, evidence: Evidence) -> Evidence:
        """After a decision that led to ``table``: fork the model for seeds that are held from now on.

        Returns the evidence without what was known of those seeds. Forks of seeds that are not held any more are gone.
        """
        begun = np.zeros(table.stage.shape, np.bool_)
        self._minibatches = 0
        if not self._forking:
            return evidence
        slots = self._model.slots.values()
        seeds = [slot.seed for slot, counts in zip(slots, table.blended[0].tolist(), strict=True) if counts]
        present, self._forks = self.forks, {}
        held = np.flatnonzero(table.stage[0] == Stage.HOLDING).tolist()
        for place in held:
            slot = slots[place]
            counting = [self._model.host, *(seed for seed in seeds if seed is not None and seed is not slot.seed)]
            fork = present.get(slot.name)
            if fork is None:
                fork = SeedlessFork(self._model, self._optimizer, slot, counting)
                begun[0, place] = True
            else:
                fork.take_in(counting)
            self._forks[slot.name] = fork
        self._ripe = {slots[place].name for place in held if table.stage_age[0, place] >= REFIT}
        return evidence.without(begun)

    def follow(self, loss: Tensor, minibatch: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Let the backward pass of ``loss`` bring isolated seeds and forks what they learn from this minibatch.

        Raises:
            ConfigError: the loss that was given does not depend on such a seed, or on a fork alone.
        """
        compute, forks, isolated = self._loss, self.forks, self._find_isolated()
        if compute is None or not (forks or isolated) or not loss.requires_grad:
            return

        def compute_loss() -> Tensor:
            return self._scale(compute(*minibatch, **named))

        for_forks: list[dict[nn.Parameter, Tensor]] = []
        for fork in forks.values():
            with side_pass(self._model, ()), torch.enable_grad():
                for_forks.append(fork.gradients(compute_loss))
        for_seeds = self._compute_seed_gradients(isolated, compute_loss) if isolated else {}
        usual = self._scale(torch.ones_like(loss.detach()))

        @torch.no_grad()
        def add_gradients(weight: Tensor) -> None:
            # The one factor is in the gradients, the other in the weight; a fork's optimizer sees neither.
            anew = bool(forks) and self._are_zeroed()
            for fork, gradients in zip(forks.values(), for_forks, strict=True):
                fork.add(gradients, weight / usual / usual, anew=anew)
            for parameter, gradient in for_seeds.items():
                add_gradient(parameter, gradient * (weight / usual))
                self._observe(parameter)
                self._average(parameter)
            self._arrived |= forks.keys() | isolated.keys()
            self._minibatches += bool(forks)

        loss.register_hook(add_gradients)

    def _compute_seed_gradients(
        self, isolated: Mapping[str, Seed], compute_loss: Callable[[], Tensor]
    ) -> dict[nn.Parameter, Tensor]:
        learning = [parameter for seed in isolated.values() for parameter in seed.parameters()]
        learning = [parameter for parameter in learning if parameter.requires_grad]
        with side_pass(self._model, isolated.values()), torch.enable_grad():
            gradients = compute_gradients(compute_loss(), learning)
        for name, seed in isolated.items():
            if gradients.keys().isdisjoint(seed.parameters()):
                raise ConfigError(
                    f"the loss that the grower was given does not depend on the seed in slot {name!r}: it must call "
                    "the growing model itself and return a loss that can be differentiated"
                )
        return gradients

    def state_dict(self) -> dict[str, Any]:
        """All forks, as plain values: each as large as the model and its optimizer's state."""
        forks = {name: fork.state_dict() for name, fork in self.forks.items()}
        return {"forks": forks, "minibatches": self._minibatches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let forks be what `state_dict` told, after `update_forks` by the table that there was.

        Raises:
            CheckpointError: it is of another model.
        """
        for name, fork in self.forks.items():
            fork.load_state_dict(state["forks"][name])
        self._minibatches = state["minibatches"]

    def _scale(self, loss: Tensor) -> Tensor:
        return loss if self._scaler is None else self._scaler.scale(loss)

    def _find_isolated(self) -> dict[str, Seed]:
        return {name: seed for name, seed in self._model.seeds.items() if seed.isolation is Isolation.SHADOW}

    def _are_zeroed(self) -> bool:
        """Whether the model's gradients were zeroed since they were last added to."""
        gradients = [parameter.grad for parameter in self._model.parameters()]
        return not any(gradient is not None and (gradient.is_sparse or gradient.any()) for gradient in gradients)

    def _arrange(self, *_: Any) -> None:
        # Before the step, as some optimizers count in their groups.
        for fork in self.forks.values():
            fork.arrange()

    @torch.no_grad()
    def _step(self, *_: Any) -> None:
        isolated, forks = self._find_isolated(), self.forks
        arrived, self._arrived = self._arrived, set()
        if isolated and arrived.isdisjoint(isolated):
            raise ConfigError(
                f"the optimizer made a step without a gradient for the seed in slot {next(iter(isolated))!r}, which "
                f"learns in isolation shadow: call {_LEARN_APART_LINE} before each loss.backward()"
            )
        if forks and arrived.isdisjoint(forks):
            raise ConfigError(
                f"the optimizer made a step without a gradient for the fork without the seed in slot "
                f"{next(iter(forks))!r}, which evidence refit needs: call {_LEARN_APART_LINE} before each "
                "loss.backward()"
            )
        for fork in forks.values():
            fork.step(self._average, only_finite=self._scaler is not None)
