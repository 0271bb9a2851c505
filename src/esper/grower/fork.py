"""A model without one of its seeds, which trains on beside the model: what a seed on trial is compared with.

What a model loses when a seed is switched off is not what it has gained by it: host and seed have trained together, so
the host has come to lean on the seed. Where both the model and a fork without the seed train on for a little while, the
host gets over that, and the difference between the two is close to what the seed brings in the end.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from esper.errors import ConfigError
from esper.growth.model import GrowingModel
from esper.growth.seed import Seed
from esper.growth.slot import Slot
from esper.serialization.state import from_plain, to_plain

T = TypeVar("T")


class _Whole(nn.Module):
    """Calls a function of a model which has other values meanwhile, and tells what its buffers are afterwards."""

    def __init__(self, model: GrowingModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], T]) -> tuple[T, dict[str, Tensor]]:
        return compute(), dict(self.named_buffers())


class SeedlessFork:
    """What ``model`` would be had the seed in ``slot`` been removed when the fork was made.

    It has parameters, buffers and an optimizer of its own, copied from those of the model, for all that counts in the
    model's forward pass. All else is the model's: seeds that do not count yet, the weights of the others, and whatever
    lies outside of the model.

    Args:
        model: In training.
        optimizer: The one that trains it.
        slot: Of ``model``, with a seed.
        counting: The host and the seeds that count, without this one.
    """

    def __init__(
        self, model: GrowingModel, optimizer: torch.optim.Optimizer, slot: Slot, counting: Iterable[nn.Module]
    ) -> None:
        assert slot.seed is not None
        self.seed = slot.seed
        """That is left out."""
        self._whole = _Whole(model)
        self._slot = slot
        self._theirs = optimizer
        self._parameters: dict[Tensor, nn.Parameter] = {}
        """The fork's, by the model's."""
        self._buffers: dict[str, Tensor] = {}
        # Its groups and state follow with the parameters.
        apart: dict[int, Any] = {id(optimizer.state): defaultdict(dict), id(optimizer.param_groups): []}
        self._optimizer = copy.deepcopy(optimizer, apart)
        self.take_in(counting)

    @torch.no_grad()
    def take_in(self, counting: Iterable[nn.Module]) -> None:
        """Copy what has begun to count in the model since, and let go of what is no more."""
        modules = list(counting)
        before, self._parameters = self._parameters, {}
        state = self._optimizer.state
        for theirs in (parameter for module in modules for parameter in module.parameters()):
            if theirs in before:
                self._parameters[theirs] = before[theirs]
            elif theirs not in self._parameters:
                own = self._parameters[theirs] = nn.Parameter(theirs.clone(), theirs.requires_grad)
                if theirs in self._theirs.state:
                    state[own] = copy.deepcopy(self._theirs.state[theirs])
        for gone in before.keys() - self._parameters.keys():
            state.pop(before[gone], None)
        alphas = {part.alpha for module in modules for part in module.modules() if isinstance(part, Seed)}
        counted = {buffer for module in modules for buffer in module.buffers()} - alphas
        named = {name: buffer for name, buffer in self._whole.named_buffers() if buffer in counted}
        kept = self._buffers
        self._buffers = {name: kept[name] if name in kept else buffer.clone() for name, buffer in named.items()}
        self.arrange()

    def arrange(self) -> None:
        """Give the optimizer the groups and hyperparameters that the model's has now."""
        self._optimizer.param_groups[:] = [
            {**group, "params": [self._parameters[one] for one in group["params"] if one in self._parameters]}
            for group in self._theirs.param_groups
        ]

    def run(self, compute: Callable[[], T]) -> T:
        """What ``compute`` returns, which calls the model, where the model is this fork."""
        named = dict(self._whole.named_parameters())
        mine = {name: self._parameters[theirs] for name, theirs in named.items() if theirs in self._parameters}
        with self._slot.vacate():
            result, buffers = functional_call(self._whole, {**mine, **self._buffers}, (compute,))
        self._buffers = {name: buffers[name].detach() for name in self._buffers}
        return result

    def gradients(self, loss: Callable[[], Tensor]) -> dict[nn.Parameter, Tensor]:
        """Gradients of ``loss``, which calls the model, by the fork's parameters.

        Raises:
            ConfigError: it does not depend on the fork, or on the model as well.
        """
        for theirs, own in self._parameters.items():
            own.requires_grad_(theirs.requires_grad)
        mine = [own for own in self._parameters.values() if own.requires_grad]
        learning = cast("list[nn.Parameter]", [theirs for theirs in self._parameters if theirs.requires_grad])
        # Within, as a backward pass may compute parts of the forward pass once more.
        found = self.run(lambda: compute_gradients(loss(), [*mine, *learning]))
        if not found.keys().isdisjoint(learning):
            raise ConfigError(
                "the loss that the grower was given uses parameters of the growing model that were taken from it "
                "before: it must take them from the model whenever it is called"
            )
        if not found:
            raise ConfigError(
                f"the loss that the grower was given does not depend on the model without the seed in slot "
                f"{self._slot.name!r}: it must call the growing model itself and return a loss that can be "
                "differentiated"
            )
        return found

    @torch.no_grad()
    def add(self, gradients: Mapping[nn.Parameter, Tensor], weight: Tensor, *, anew: bool) -> None:
        """Add ``gradients`` times ``weight`` to those since the last step, or begin ``anew`` with them."""
        if anew:
            self._optimizer.zero_grad()
        for own, gradient in gradients.items():
            add_gradient(own, gradient * weight)

    def step(self, average: Callable[[Tensor], None], *, only_finite: bool) -> None:
        """Let the optimizer make a step with gradients that ``average`` has averaged, unless they must be finite."""
        learned = [own for own in self._parameters.values() if own.grad is not None]
        for parameter in learned:
            average(parameter)
        if not only_finite or all(bool(own.grad.isfinite().all()) for own in learned if own.grad is not None):
            self._optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """All that is the fork's own, as plain values."""
        own, state = self._name_parameters(), self._optimizer.state
        moments = {name: state[parameter] for name, parameter in own.items() if parameter in state}
        kind = type(self._theirs).__name__
        return to_plain({"parameters": own, "buffers": self._buffers, "moments": moments, "optimizer": kind})

    @torch.no_grad()
    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Be what `state_dict` told; the model has the structure that it had then.

        Raises:
            CheckpointError: it has not.
        """
        own = self._name_parameters()
        like = {"parameters": own, "buffers": self._buffers}
        found = from_plain(like, {name: saved[name] for name in like}, "the state of a fork")
        for name, parameter in own.items():
            parameter.copy_(found["parameters"][name])
        self._buffers = found["buffers"]
        names = {parameter: name for name, parameter in own.items()}
        order = [names[parameter] for group in self._optimizer.param_groups for parameter in group["params"]]
        # Another optimizer may have taken the former's place: it begins anew.
        moments: Mapping[str, Any] = saved["moments"] if saved["optimizer"] == type(self._theirs).__name__ else {}
        state = {place: moments[name] for place, name in enumerate(order) if name in moments}
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": state})
        self.arrange()

    def _name_parameters(self) -> dict[str, nn.Parameter]:
        """The fork's parameters by the names of the model's."""
        named = cast("Sequence[tuple[str, nn.Parameter]]", list(self._whole.named_parameters()))
        return {name: self._parameters[theirs] for name, theirs in named if theirs in self._parameters}


def compute_gradients(loss: Tensor, parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """The gradients of those ``parameters`` on which ``loss`` depends."""
    if not loss.requires_grad:
        return {}
    found = cast("Sequence[Tensor | None]", torch.autograd.grad(loss, parameters, allow_unused=True))
    return {parameter: gradient for parameter, gradient in zip(parameters, found, strict=True) if gradient is not None}


def add_gradient(parameter: Tensor, part: Tensor) -> None:
    """Add to the gradient of ``parameter``, in its own type."""
    part = part.to(parameter.dtype)
    parameter.grad = part if parameter.grad is None else parameter.grad + part
