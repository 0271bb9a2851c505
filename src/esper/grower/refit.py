"""Forks of a model for `esper.Refit`, each of which trains without one module on the same minibatches as the model.

The loop passes each minibatch and its loss to `esper.Grower.isolated_backward`. The gradients of forks are computed at
once. They are added when the backward pass of that loss comes, with the factor by which it scales the loss. The model's
own gradients, buffers and random numbers are the same as without.
"""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from esper.control.controller import Controller
from esper.control.rules import Never
from esper.errors import ConfigError
from esper.growth.model import GrowingModel
from esper.growth.seed import Seed
from esper.growth.slot import Slot, side_pass
from esper.lifecycle.table import SeedMeasurements, SeedTable, Stage
from esper.serialization import from_plain, to_plain

T = TypeVar("T")
Loss = Callable[..., Tensor]
"""Computes the loss of a minibatch, a scalar that can be differentiated, from the arguments of `isolated_backward`."""

REFIT_DECISIONS = 2
"""Decisions after which a fork has recovered from the loss of its module."""
_LOSS_LINE = "Grower(..., loss=lambda inputs, labels: F.cross_entropy(model(inputs), labels))"
_BACKWARD_LINE = "grower.isolated_backward(loss, inputs, labels)"

SAME = 1e-4
"""Relative difference of two losses that were computed alike."""
SIMILAR = 1e-2
"""Relative difference of two losses that were computed in other precisions."""
_CALLER = 4
"""Calls between a warning and the loop that called `esper.Grower.isolated_backward`."""


class Counterfactual(StrEnum):
    """The model without a module, which contributions compare with."""

    DEPENDENCE = "dependence"
    """The model as it is, with the module switched off (leave-one-out). A model adapts to what it trains with, so this
    measures how much it depends on the module now, which is more than it gains by having it."""
    REFIT = "refit"
    """For a module on probation: a fork of the model from the start of its probation, which has trained without the
    module on the same minibatches since. Before and after the probation as ``dependence``."""


def require_loss(
    counterfactual: Counterfactual, controller: Controller, loss: Loss | None, optimizer: torch.optim.Optimizer
) -> None:
    """Refuse forks that cannot be trained, or that nothing uses."""
    if counterfactual is not Counterfactual.REFIT:
        return
    if isinstance(controller, Never):
        raise ConfigError(
            f"esper.Refit judges seeds on probation, but controller {controller.name!r} has none: choose another "
            "controller, or remove esper.Refit"
        )
    if loss is None:
        raise ConfigError(
            "with esper.Refit, a fork without the seed also trains on every minibatch: give the loss function, "
            f"{_LOSS_LINE}, and call {_BACKWARD_LINE} before each loss.backward()"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"esper.Refit cannot step {type(optimizer).__name__}, whose step needs a closure: use another optimizer, "
            "or remove esper.Refit"
        )


class _FunctionCall(nn.Module):
    """Calls a function of ``model`` under `functional_call`, and returns the model's buffers afterwards too."""

    def __init__(self, model: GrowingModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], T]) -> tuple[T, dict[str, Tensor]]:
        return compute(), dict(self.named_buffers())


class SeedlessFork:
    """A copy of a model without the module in one slot, which trains on beside it.

    Switching a module off overstates its gain, because the host has adapted to it. Where the model and its fork both
    train on for a while, the host recovers, and the difference between the two approaches what the module brings.

    The fork has parameters, buffers and an optimizer of its own, copied from those of the model, for all that counts in
    the forward pass of the model. The rest is shared with the model: modules that do not count yet, the alphas of the
    others, and whatever lies outside of the model.
    """

    def __init__(
        self, model: GrowingModel, optimizer: torch.optim.Optimizer, slot: Slot, counting: Iterable[nn.Module]
    ) -> None:
        assert slot.seed is not None
        self.seed = slot.seed
        """The module that is left out."""
        self._call = _FunctionCall(model)
        self._slot = slot
        self._model_optimizer = optimizer
        self._parameters: dict[Tensor, nn.Parameter] = {}
        """The fork's parameters, by those of the model."""
        self._buffers: dict[str, Tensor] = {}
        # Copied without groups and state, which are added with the parameters.
        memo: dict[int, Any] = {id(optimizer.state): defaultdict(dict), id(optimizer.param_groups): []}
        self._optimizer = copy.deepcopy(optimizer, memo)
        self.sync_modules(counting)

    @torch.no_grad()
    def sync_modules(self, counting: Iterable[nn.Module]) -> None:
        """Copy what has begun to count in the model since the last call, and drop what is gone."""
        modules = list(counting)
        previous, self._parameters = self._parameters, {}
        state = self._optimizer.state
        for parameter in (parameter for module in modules for parameter in module.parameters()):
            if parameter in previous:
                self._parameters[parameter] = previous[parameter]
            elif parameter not in self._parameters:
                duplicate = self._parameters[parameter] = nn.Parameter(parameter.clone(), parameter.requires_grad)
                if parameter in self._model_optimizer.state:
                    state[duplicate] = copy.deepcopy(self._model_optimizer.state[parameter])
        for parameter in previous.keys() - self._parameters.keys():
            state.pop(previous[parameter], None)
        # Alphas stay those of the model: they are a matter of the lifecycle.
        alphas = {part.alpha for module in modules for part in module.modules() if isinstance(part, Seed)}
        counting_buffers = {buffer for module in modules for buffer in module.buffers()} - alphas
        self._buffers = {
            name: self._buffers[name] if name in self._buffers else buffer.clone()
            for name, buffer in self._call.named_buffers()
            if buffer in counting_buffers
        }
        self.sync_optimizer()

    def sync_optimizer(self) -> None:
        """Copy groups and hyperparameters of the model's optimizer."""
        self._optimizer.param_groups[:] = [
            {**group, "params": [self._parameters[key] for key in group["params"] if key in self._parameters]}
            for group in self._model_optimizer.param_groups
        ]

    def run(self, compute: Callable[[], T]) -> T:
        """The result of ``compute``, in which calls of the model run the fork instead."""
        parameters = self._name_parameters()
        with self._slot.disabled():
            result, buffers = functional_call(self._call, {**parameters, **self._buffers}, (compute,))
        self._buffers = {name: buffers[name].detach() for name in self._buffers}
        return result

    def compute_gradients(self, loss: Callable[[], Tensor]) -> dict[nn.Parameter, Tensor]:
        """Gradients of ``loss``, which calls the model, with respect to the fork's parameters."""
        for parameter, duplicate in self._parameters.items():
            duplicate.requires_grad_(parameter.requires_grad)
        learning = [duplicate for duplicate in self._parameters.values() if duplicate.requires_grad]
        of_model = cast("list[nn.Parameter]", [key for key in self._parameters if key.requires_grad])

        # Differentiated within `run`, since a backward pass may compute parts of the forward pass once more.
        def differentiate() -> Sequence[Tensor | None]:
            value = loss()
            parameters = [*learning, *of_model]
            if not value.requires_grad:
                return [None] * len(parameters)
            return torch.autograd.grad(value, parameters, allow_unused=True)

        pairs = zip([*learning, *of_model], self.run(differentiate), strict=True)
        gradients = {parameter: gradient for parameter, gradient in pairs if gradient is not None}
        if not gradients.keys().isdisjoint(of_model):
            raise ConfigError(
                "the grower's loss function uses parameters that were taken from the growing model earlier: it must "
                "take them from the model at each call"
            )
        if not gradients:
            raise ConfigError(
                f"the grower's loss function does not depend on the model without the seed in slot "
                f"{self._slot.name!r}: it must call the growing model itself and return a loss that can be "
                "differentiated"
            )
        return gradients

    @torch.no_grad()
    def add_gradients(self, gradients: Mapping[nn.Parameter, Tensor], weight: Tensor, *, zero_first: bool) -> None:
        """Add ``gradients`` times ``weight`` to those since the last step, or to zero with ``zero_first``."""
        if zero_first:
            self._optimizer.zero_grad()
        for parameter, gradient in gradients.items():
            added = (gradient * weight).to(parameter.dtype)
            parameter.grad = added if parameter.grad is None else parameter.grad + added

    def step(self, average: Callable[[Tensor], None], *, only_finite: bool) -> None:
        """Average gradients over processes and step the optimizer, if ``only_finite`` only with finite gradients."""
        learned = [parameter for parameter in self._parameters.values() if parameter.grad is not None]
        for parameter in learned:
            average(parameter)
        gradients = [parameter.grad for parameter in learned if parameter.grad is not None]
        if not only_finite or all(bool(gradient.isfinite().all()) for gradient in gradients):
            self._optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Parameters, buffers and moments of the fork, as plain values."""
        parameters, state = self._name_parameters(), self._optimizer.state
        moments = {name: state[parameter] for name, parameter in parameters.items() if parameter in state}
        optimizer = type(self._model_optimizer).__name__
        return to_plain(
            {"parameters": parameters, "buffers": self._buffers, "moments": moments, "optimizer": optimizer}
        )

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was called; the model has the structure that it had then."""
        parameters = self._name_parameters()
        like = {"parameters": parameters, "buffers": self._buffers}
        values = from_plain(like, {name: state[name] for name in like}, "the state of a fork")
        for name, parameter in parameters.items():
            parameter.copy_(values["parameters"][name])
        self._buffers = values["buffers"]
        names = {parameter: name for name, parameter in parameters.items()}
        order = [names[parameter] for group in self._optimizer.param_groups for parameter in group["params"]]
        # Moments of another optimizer mean nothing to this one.
        is_same = state["optimizer"] == type(self._model_optimizer).__name__
        moments: Mapping[str, Any] = state["moments"] if is_same else {}
        indexed = {index: moments[name] for index, name in enumerate(order) if name in moments}
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": indexed})
        self.sync_optimizer()

    def _name_parameters(self) -> dict[str, nn.Parameter]:
        """The fork's parameters by the names of the model's."""
        named = cast("Sequence[tuple[str, nn.Parameter]]", list(self._call.named_parameters()))
        return {name: self._parameters[parameter] for name, parameter in named if parameter in self._parameters}


class ForkTrainer:
    """Trains forks whenever the model trains; there are none unless the counterfactual is ``refit``.

    ``loss`` computes the loss of a minibatch by calling the model, and ``average`` averages a parameter's gradient over
    all processes.
    """

    def __init__(
        self,
        model: GrowingModel,
        optimizer: torch.optim.Optimizer,
        counterfactual: Counterfactual,
        loss: Loss | None,
        scaler: torch.amp.GradScaler | None,
        average: Callable[[Tensor], None],
    ) -> None:
        self._model, self._optimizer, self._loss, self._scaler = model, optimizer, loss, scaler
        self._average = average
        self._makes_forks = counterfactual is Counterfactual.REFIT
        self._forks: dict[str, SeedlessFork] = {}
        self._comparable: set[str] = set()
        """Slots whose forks are old enough to be compared with at the next decision."""
        self._slots_with_gradient: set[str] = set()
        """Slots whose fork has had a gradient since the optimizer's last step."""
        self._minibatches = 0
        """Minibatches from which forks have learned since the last decision."""
        self._check_due = True
        """Whether the next minibatch is compared with its loss: the first one after each decision is."""
        # Before a step too, since some optimizers count steps in their groups.
        optimizer.register_step_pre_hook(self._sync_fork_optimizers)
        optimizer.register_step_post_hook(self._step_forks)

    @property
    def forks(self) -> dict[str, SeedlessFork]:
        """Forks by the slots whose modules are on probation."""
        trials = {name: seed for name, seed in self._model.seeds.items() if not seed.fossilized}
        return {name: fork for name, fork in self._forks.items() if fork.seed is trials.get(name)}

    def get_comparable(self) -> dict[str, SeedlessFork | None]:
        """The forks of modules on probation, by slot; None for one that is too young to be compared with."""
        forks = self.forks
        if forks and not self._minibatches:
            raise ConfigError(
                f"with esper.Refit, the seed in slot {next(iter(forks))!r} is compared with a fork of the model, but "
                f"the fork has not trained since the last decision: call {_BACKWARD_LINE} before each "
                "loss.backward()"
            )
        return {name: fork if name in self._comparable else None for name, fork in forks.items()}

    def update(self, table: SeedTable, measurements: SeedMeasurements) -> SeedMeasurements:
        """Fork the model for modules that are held from now on, and drop the forks of those that are not any more.

        The ``table`` is the one after the decision. Returns the measurements without those of modules whose probation
        begins, since they were made by ``dependence``.
        """
        self._minibatches, self._check_due = 0, True
        if not self._makes_forks:
            return measurements
        slots = self._model.slots.values()
        counting_seeds = [slot.seed for slot, counts in zip(slots, table.blended[0].tolist(), strict=True) if counts]
        previous, self._forks = self.forks, {}
        forked = np.zeros(table.stage.shape, np.bool_)
        held = np.flatnonzero(table.stage[0] == Stage.HOLDING).tolist()
        for index in held:
            slot = slots[index]
            others = [seed for seed in counting_seeds if seed is not None and seed is not slot.seed]
            counting = [self._model.host, *others]
            fork = previous.get(slot.name)
            if fork is None:
                fork = SeedlessFork(self._model, self._optimizer, slot, counting)
                forked[0, index] = True
            else:
                fork.sync_modules(counting)
            self._forks[slot.name] = fork
        self._comparable = {slots[index].name for index in held if table.stage_age[0, index] >= REFIT_DECISIONS}
        return measurements.without(forked)

    def add_gradients(self, loss: Tensor, minibatch: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Add the gradients of forks on this minibatch in the backward pass of ``loss``."""
        compute, forks = self._loss, self.forks
        if compute is None or not forks or not loss.requires_grad:
            return
        if self._check_due:
            self._check_due = False
            self._require_same_minibatch(loss, lambda: compute(*minibatch, **named))
        fork_gradients: list[dict[nn.Parameter, Tensor]] = []
        for fork in forks.values():
            with side_pass(self._model, ()), torch.enable_grad():
                fork_gradients.append(fork.compute_gradients(lambda: self._scale(compute(*minibatch, **named))))
        scale = self._scale(torch.ones_like(loss.detach()))

        @torch.no_grad()
        def add_to_forks(weight: Tensor) -> None:
            # Gradients and weight each contain the loss scale once; a fork's optimizer sees unscaled gradients.
            model_gradients = [parameter.grad for parameter in self._model.parameters()]
            zeroed = not any(grad is not None and (grad.is_sparse or grad.any()) for grad in model_gradients)
            for fork, gradients in zip(forks.values(), fork_gradients, strict=True):
                fork.add_gradients(gradients, weight / scale / scale, zero_first=zeroed)
            self._slots_with_gradient |= forks.keys()
            self._minibatches += 1

        loss.register_hook(add_to_forks)

    def _require_same_minibatch(self, loss: Tensor, compute: Callable[[], Tensor]) -> None:
        """Refuse a ``loss`` of another minibatch than ``compute`` computes it of.

        Two passes of the model as it is show what the loss of the minibatch is, and whether it draws random numbers.
        """
        hook = self._model.input_hook
        inputs, value = None if hook.inputs is None else hook.inputs.detach(), float(loss.detach())
        with side_pass(self._model, ()), torch.no_grad():
            first, first_inputs = float(compute()), hook.inputs
            second, second_inputs = float(compute()), hook.inputs
        if math.isclose(value, first, rel_tol=SAME, abs_tol=SAME):
            return
        if inputs is None or first_inputs is None or second_inputs is None:  # only parts of the host are called
            return
        # Inputs that are drawn at random, such as noisy images, differ between the two passes as well.
        repeats = _are_equal(first_inputs, second_inputs)
        if repeats and not _are_equal(inputs, first_inputs):
            raise ConfigError(
                f"isolated_backward was given a loss of {value:.6g}, and a minibatch whose loss is {first:.6g}: the "
                "model was called with other inputs for that loss; give the minibatch that the loss is of, right after "
                "it is computed"
            )
        if repeats and first == second and not math.isclose(value, first, rel_tol=SIMILAR, abs_tol=SIMILAR):
            warnings.warn(
                f"isolated_backward was given a loss of {value:.6g}, and a minibatch of which the grower's loss "
                f"function computes {first:.6g}: forks learn from the latter; give the same "
                "labels to both, and the loss before it is divided or scaled",
                stacklevel=_CALLER,
            )

    def state_dict(self) -> dict[str, Any]:
        """All forks, as plain values: each as large as the model and its optimizer's state."""
        forks = {name: fork.state_dict() for name, fork in self.forks.items()}
        return {"forks": forks, "minibatches": self._minibatches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was called, after `update` with the table of then."""
        for name, fork in self.forks.items():
            fork.load_state_dict(state["forks"][name])
        self._minibatches = state["minibatches"]

    def _scale(self, loss: Tensor) -> Tensor:
        return loss if self._scaler is None else self._scaler.scale(loss)

    def _sync_fork_optimizers(self, *_: Any) -> None:
        for fork in self.forks.values():
            fork.sync_optimizer()

    @torch.no_grad()
    def _step_forks(self, *_: Any) -> None:
        forks = self.forks
        trained, self._slots_with_gradient = self._slots_with_gradient, set()
        if forks and trained.isdisjoint(forks):
            raise ConfigError(
                f"the optimizer made a step without a gradient for the fork without the seed in slot "
                f"{next(iter(forks))!r}, which esper.Refit needs: call {_BACKWARD_LINE} before each "
                "loss.backward()"
            )
        for fork in forks.values():
            fork.step(self._average, only_finite=self._scaler is not None)


def _are_equal(inputs: Tensor, others: Tensor) -> bool:
    """Whether two inputs are the same, where NaN equals NaN."""
    kinds = [(each.shape, each.dtype, each.device) for each in (inputs, others)]
    return kinds[0] == kinds[1] and torch.allclose(inputs, others, rtol=0, atol=0, equal_nan=True)
