"""Forks of a model for `esper.Refit`, each of which trains without one module on the same minibatches as the model.

`esper.Grower.isolated_backward` computes the gradients of forks at once, and adds them in the backward pass of the
model's loss, times the factor by which that scales the loss.
"""

import copy
import inspect
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from esper.control.controller import Controller
from esper.control.rules import Never
from esper.errors import ConfigError
from esper.grower.governor import place_moments
from esper.growth.model import GrowingModel
from esper.growth.slot import Seed, Slot, side_pass
from esper.lifecycle.table import SeedMeasurements, SeedTable, Stage
from esper.serialization import from_plain, to_plain

T = TypeVar("T")
Loss = Callable[..., Tensor]
"""Computes the loss of a minibatch, a scalar that can be differentiated, from the arguments of `isolated_backward`."""

REFIT_DECISIONS = 2
"""Decisions after which a fork has recovered from the loss of its module."""
SAME = 1e-2
"""Relative difference of two losses of one minibatch, such as those computed in different precisions."""
_CALLER = 4
"""Calls between a warning and the loop that called `esper.Grower.isolated_backward`."""
_CALL = "call grower.isolated_backward(loss, inputs, labels) before each loss.backward()"


def require_loss(controller: Controller, loss: Loss | None, optimizer: torch.optim.Optimizer) -> None:
    """Refuse `esper.Refit` where forks cannot be trained, or nothing uses them."""
    if isinstance(controller, Never):
        raise ConfigError(
            f"esper.Refit compares seeds on probation, but controller {controller.name!r} has none: choose another "
            "controller, or remove esper.Refit"
        )
    if loss is None:
        raise ConfigError(
            "with esper.Refit, a fork without the seed also trains on every minibatch: give the loss function, "
            f"Grower(..., loss=lambda inputs, labels: F.cross_entropy(model(inputs), labels)), and {_CALL}"
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

    It copies parameters, buffers and the optimizer's state of all that counts in the forward pass. It shares the
    rest: modules that do not count yet, alphas, and what lies outside of the model.
    """

    def __init__(self, model: GrowingModel, optimizer: torch.optim.Optimizer, slot: Slot) -> None:
        assert slot.seed is not None
        self.seed = slot.seed  # left out here
        self.comparable = False
        """Whether it is old enough to be compared with."""
        self._call = _FunctionCall(model)
        self._slot = slot
        self._model_optimizer = optimizer
        self._parameters: dict[Tensor, nn.Parameter] = {}
        """By those of the model."""
        self._buffers: dict[str, Tensor] = {}
        # Copied without state and groups, which come with the parameters and at each step.
        memo: dict[int, Any] = {id(optimizer.state): defaultdict(dict), id(optimizer.param_groups): []}
        self.optimizer = copy.deepcopy(optimizer, memo)

    @torch.no_grad()
    def update(self, modules: Sequence[nn.Module]) -> None:
        """Copy what is new in the ``modules`` that count in the model now, and drop what is gone."""
        previous, self._parameters = self._parameters, {}
        state = self.optimizer.state
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

    def run(self, compute: Callable[[], T]) -> T:
        """The result of ``compute``, in which calls of the model run the fork instead."""
        with self._slot.disabled():
            result, buffers = functional_call(self._call, {**self._name_parameters(), **self._buffers}, (compute,))
        self._buffers = {name: buffers[name].detach() for name in self._buffers}
        return result

    def compute_gradients(self, loss: Callable[[], Tensor]) -> dict[nn.Parameter, Tensor]:
        """Gradients of ``loss``, which calls the model, by the fork's parameters."""
        for parameter, duplicate in self._parameters.items():
            duplicate.requires_grad_(parameter.requires_grad)
        learning = [duplicate for duplicate in self._parameters.values() if duplicate.requires_grad]
        of_model = cast("list[nn.Parameter]", [key for key in self._parameters if key.requires_grad])

        # Differentiated within `run`, since a backward pass may compute parts of the forward pass once more.
        def differentiate() -> dict[nn.Parameter, Tensor]:
            value, parameters = loss(), [*learning, *of_model]
            if not value.requires_grad:
                return {}
            found = cast("Sequence[Tensor | None]", torch.autograd.grad(value, parameters, allow_unused=True))
            return {key: gradient for key, gradient in zip(parameters, found, strict=True) if gradient is not None}

        gradients = self.run(differentiate)
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

    @property
    def learned(self) -> list[nn.Parameter]:
        """Parameters with a gradient."""
        return [parameter for parameter in self._parameters.values() if parameter.grad is not None]

    def sync_optimizer(self) -> None:
        self.optimizer.param_groups[:] = [
            {**group, "params": [self._parameters[key] for key in group["params"] if key in self._parameters]}
            for group in self._model_optimizer.param_groups
        ]

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values."""
        parameters, state = self._name_parameters(), self.optimizer.state
        return to_plain(
            {
                "values": {**parameters, **self._buffers},
                "moments": {name: state[parameter] for name, parameter in parameters.items() if parameter in state},
                "optimizer": type(self.optimizer).__name__,
            }
        )

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was called, with a model of the same structure."""
        parameters = self._name_parameters()
        values = {**parameters, **self._buffers}
        for name, saved in from_plain(values, state["values"], "the state of a fork").items():
            values[name].copy_(saved)
        # Moments of another optimizer mean nothing to this one.
        is_same = state["optimizer"] == type(self.optimizer).__name__
        moments: Mapping[str, Any] = state["moments"] if is_same else {}
        present = dict(self.optimizer.state)
        self.optimizer.state.clear()
        for name, kept in moments.items():
            parameter = parameters[name]
            self.optimizer.state[parameter] = place_moments(kept, parameter, present.get(parameter, {}))

    def _name_parameters(self) -> dict[str, nn.Parameter]:
        named = cast("Iterable[tuple[str, nn.Parameter]]", self._call.named_parameters())
        return {name: self._parameters[parameter] for name, parameter in named if parameter in self._parameters}


class ForkTrainer:
    """Trains forks whenever the model trains; none without a ``loss``. ``average`` is over all processes."""

    def __init__(
        self,
        model: GrowingModel,
        optimizer: torch.optim.Optimizer,
        loss: Loss | None,
        scaler: torch.amp.GradScaler | None,
        average: Callable[[Tensor], None],
    ) -> None:
        self._model, self._optimizer, self._loss, self._average = model, optimizer, loss, average
        self._scaler = scaler
        self._forks: dict[str, SeedlessFork] = {}
        self._minibatches = 0
        """From which forks have learned since the last decision."""
        self._slots_with_gradient: set[str] = set()
        """Slots whose fork got a gradient since the last step."""
        # Groups before a step, in which some optimizers count; the step after it, in which some compute gradients.
        optimizer.register_step_pre_hook(self._sync_forks)
        optimizer.register_step_post_hook(self._step_forks)

    @property
    def forks(self) -> dict[str, SeedlessFork]:
        """Forks by the slots whose modules are on probation."""
        mine = ((name, fork, self._model.seeds.get(name)) for name, fork in self._forks.items())
        return {name: fork for name, fork, seed in mine if fork.seed is seed and not fork.seed.fossilized}

    def get_comparable(self) -> dict[str, SeedlessFork | None]:
        """`forks`, with None for one that is too young to be compared with."""
        forks = self.forks
        if forks and not self._minibatches:
            raise ConfigError(
                f"with esper.Refit, the seed in slot {next(iter(forks))!r} is compared with a fork of the model, but "
                f"the fork has not trained since the last decision: {_CALL}"
            )
        return {name: fork if fork.comparable else None for name, fork in forks.items()}

    def update(self, table: SeedTable, measurements: SeedMeasurements) -> SeedMeasurements:
        """After a decision, fork the model for modules that are held now, and drop all other forks.

        Returns the measurements without those of modules that have a new fork.
        """
        self._minibatches = 0
        if self._loss is None:
            return measurements
        slots, counts = self._model.slots.values(), table.blended[0]
        previous, self._forks = self.forks, {}
        forked = np.zeros(table.stage.shape, np.bool_)
        for place in np.flatnonzero(table.stage[0] == Stage.HOLDING).tolist():
            slot = slots[place]
            forked[0, place] = slot.name not in previous
            fork = self._forks[slot.name] = previous.get(slot.name) or SeedlessFork(self._model, self._optimizer, slot)
            others = [slots[other].seed for other in np.flatnonzero(counts).tolist() if other != place]
            fork.update([self._model.host, *(seed for seed in others if seed is not None)])
            fork.comparable = bool(table.stage_age[0, place] >= REFIT_DECISIONS)
        return measurements.without(forked)

    def add_gradients(self, loss: Tensor, minibatch: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Add the gradients of forks on this minibatch in the backward pass of ``loss``."""
        forks = self.forks
        if self._loss is None or not forks or not loss.requires_grad:
            return
        compute = partial(self._loss, *minibatch, **named)
        if not self._minibatches:
            self._check_minibatch(float(loss.detach()), compute)
        fork_gradients: list[dict[nn.Parameter, Tensor]] = []
        for fork in forks.values():
            with side_pass(self._model), torch.enable_grad():
                fork_gradients.append(fork.compute_gradients(lambda: self._scale(compute())))
        scale = self._scale(torch.ones_like(loss.detach()))

        @torch.no_grad()
        def add_to_forks(weight: Tensor) -> None:
            model_gradients = [parameter.grad for parameter in self._model.parameters()]
            zeroed = not any(grad is not None and (grad.is_sparse or grad.any()) for grad in model_gradients)
            for fork, gradients in zip(forks.values(), fork_gradients, strict=True):
                if zeroed:
                    for parameter in fork.learned:
                        parameter.grad = None
                for parameter, gradient in gradients.items():
                    # Gradient and weight each contain the loss scale once; a fork's optimizer sees unscaled gradients.
                    added = (gradient * (weight / scale / scale)).to(parameter.dtype)
                    parameter.grad = added if parameter.grad is None else parameter.grad + added
            self._slots_with_gradient |= forks.keys()
            self._minibatches += 1

        loss.register_hook(add_to_forks)

    def _scale(self, loss: Tensor) -> Tensor:
        return loss if self._scaler is None else self._scaler.scale(loss)

    def _check_minibatch(self, loss: float, compute: Callable[[], Tensor]) -> None:
        """Warn if ``loss`` is not that of the minibatch, which two passes of the model show if nothing is random."""
        with side_pass(self._model), torch.no_grad():
            value, again = float(compute()), float(compute())
        if value == again and not math.isclose(loss, value, rel_tol=SAME, abs_tol=SAME):
            warnings.warn(
                f"isolated_backward was given a loss of {loss:.6g}, but the grower's loss function computes "
                f"{value:.6g} for the minibatch, and forks learn from that: give both the same inputs and labels, and "
                "the loss before it is divided or scaled",
                stacklevel=_CALLER,
            )

    def _sync_forks(self, *_: Any) -> None:
        for fork in self.forks.values():
            fork.sync_optimizer()

    @torch.no_grad()
    def _step_forks(self, *_: Any) -> None:
        forks = self.forks
        trained, self._slots_with_gradient = self._slots_with_gradient, set()
        if forks and trained.isdisjoint(forks):
            raise ConfigError(
                f"the optimizer made a step without a gradient for the fork without the seed in slot "
                f"{next(iter(forks))!r}, which esper.Refit needs: {_CALL}"
            )
        for fork in forks.values():
            for parameter in fork.learned:
                self._average(parameter)
            # A gradient scaler skips steps with gradients that are not finite.
            gradients = [parameter.grad for parameter in fork.learned if parameter.grad is not None]
            if self._scaler is None or all(bool(gradient.isfinite().all()) for gradient in gradients):
                fork.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """All forks: each as large as the model and its optimizer's state."""
        forks = {name: fork.state_dict() for name, fork in self.forks.items()}
        return {"forks": forks, "minibatches": self._minibatches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was called, after `update` with the table of then."""
        for name, fork in self.forks.items():
            fork.load_state_dict(state["forks"][name])
        self._minibatches = state["minibatches"]
