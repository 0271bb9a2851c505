"""Two ways to run a population forward: as one stacked program, or network by network. The results are the same."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from esper.growth.model import GrowingModel
from esper.growth.slot import Occupant
from esper.stacking import Stackable, call_stacked
from esper.training.grafts import Graft

Parameters = Mapping[str, Tensor]
"""Stacked parameters or buffers by name, each ``[E, *shape]``."""


class _LeaveVmap(torch.autograd.Function):
    """Hands a graft the physical ``[E, N, ...]`` features of all networks from inside a vmap over networks.

    What the graft does there is recorded by the outer autograd, so neither `forward` nor `backward` ever runs.
    """

    generate_vmap_rule = False

    @staticmethod
    def forward(features: Tensor, inputs: Tensor, graft: Graft) -> Tensor:
        raise RuntimeError("a population's slot was called outside its vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def vmap(  # pyright: ignore[reportIncompatibleMethodOverride] - the base class leaves the arguments open
        info: Any, in_dims: tuple[int | None, ...], features: Tensor, inputs: Tensor, graft: Graft
    ) -> tuple[Tensor, int]:
        features = _networks_first(features, in_dims[0], info.batch_size)
        return graft(features, _networks_first(inputs, in_dims[1], info.batch_size)), 0


def _networks_first(tensor: Tensor, axis: int | None, networks: int) -> Tensor:
    return tensor.expand(networks, *tensor.shape) if axis is None else tensor.movedim(axis, 0)


class _MappedOccupant:
    def __init__(self, graft: Graft) -> None:
        self._graft = graft

    def __call__(self, features: Tensor, inputs: Tensor) -> Tensor:
        return cast(Tensor, _LeaveVmap.apply(features, inputs, self._graft))


class _SingleOccupant:
    def __init__(self, graft: Graft) -> None:
        self._graft = graft

    def __call__(self, features: Tensor, inputs: Tensor) -> Tensor:
        return self._graft(features.unsqueeze(0), inputs.unsqueeze(0)).squeeze(0)


class Execution:
    """Runs the hosts of a cohort, whose slots do what the grafts say."""

    def __init__(self, template: nn.Module, slots: Sequence[str], example_input: Tensor) -> None:
        self._model = GrowingModel(copy.deepcopy(template), slots, example_input)
        self._slots = [self._model.slots[name] for name in slots]
        self.sites = [slot.site for slot in self._slots]

    def stacked(
        self, parameters: Parameters, buffers: Parameters, inputs: Tensor, grafts: Sequence[Graft | None]
    ) -> Tensor:
        """Outputs ``[E, N', ...]`` of all networks on ``inputs`` ``[E, N, ...]``, as one program."""
        host = self._model.host
        mapped = not isinstance(host, Stackable)
        self._occupy([_MappedOccupant(graft) if graft and mapped else graft for graft in grafts])
        return call_stacked(host, parameters, buffers, inputs)

    def looped(
        self, parameters: Parameters, buffers: Parameters, inputs: Tensor, grafts: Sequence[Sequence[Graft | None]]
    ) -> Tensor:
        """The same, one network after the other; ``grafts[e]`` are those of network ``e`` alone, as of E = 1."""
        outputs: list[Tensor] = []
        for network, own_grafts in enumerate(grafts):
            self._occupy([_SingleOccupant(graft) if graft else None for graft in own_grafts])
            own_parameters = {name: tensor[network] for name, tensor in parameters.items()}
            own_buffers = {name: tensor[network] for name, tensor in buffers.items()}
            outputs.append(self._call(own_parameters, own_buffers, inputs[network]))
        return torch.stack(outputs)

    def shares_prefixes(self, example_input: Tensor) -> bool:
        """Whether every slot may append variants to the batch: not so if a connection bypasses a slot.

        Every slot appends a copy of the first examples; the host must then return copies of its output, and a tensor
        from before the slot no longer fits one from behind it. The slots must also be passed in their order.
        """
        inputs = example_input[:1].repeat(2, *[1] * (example_input.dim() - 1))
        passed: list[int] = []

        def appending(slot: int) -> Occupant:
            def occupant(features: Tensor, inputs: Tensor) -> Tensor:
                passed.append(slot)
                return torch.cat([features, features[: len(inputs)]])

            return occupant

        was_training = self._model.training
        self._model.eval()
        with torch.no_grad():
            self._occupy([None] * len(self._slots))
            expected = self._model(inputs)
            self._occupy([appending(slot) for slot in range(len(self._slots))])
            try:
                outputs = self._model(inputs)
            except RuntimeError:
                return False
            finally:
                self._model.train(was_training)
        if passed != sorted(passed):
            return False
        copies = expected.repeat(1 + len(self._slots), *[1] * (expected.dim() - 1))
        return outputs.shape == copies.shape and torch.allclose(outputs, copies)

    def train(self, mode: bool) -> None:
        """Put the hosts into training or evaluation mode."""
        self._model.host.train(mode)

    def _call(self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], inputs: Tensor) -> Tensor:
        return functional_call(self._model.host, (parameters, buffers), (inputs,))

    def _occupy(self, occupants: Sequence[Occupant | None]) -> None:
        for slot, occupant in zip(self._slots, occupants, strict=True):
            slot.occupant = occupant
