"""Two ways to run a population forward: as one stacked program, or network by network. The results are the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from esper.growth.model import GrowingModel
from esper.growth.slot import Occupant
from esper.stacking import Stackable
from esper.training.functional import Functional
from esper.training.grafts import Graft
from esper.training.merging import can_merge, enable_merging, merged, separated

Parameters = Mapping[str, Tensor]
"""Stacked parameters or buffers by name, each ``[E, *shape]``."""


Call = Callable[[Parameters, Parameters, Tensor], Tensor]


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


class _MergedOccupant:
    def __init__(self, graft: Graft, networks: int) -> None:
        self._graft = graft
        self._networks = networks

    def __call__(self, features: Tensor, inputs: Tensor) -> Tensor:
        return merged(self._graft(separated(features, self._networks), separated(inputs, self._networks)))


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
        self._stacks = isinstance(template, Stackable)
        self._merges = not self._stacks and can_merge(template, example_input)
        if self._merges:
            enable_merging(self._model.host)
        host = self._model.host
        self._call: Call = Functional(host) if self._stacks or self._merges else partial(_call, host)

    def stacked(
        self, parameters: Parameters, buffers: Parameters, inputs: Tensor, grafts: Sequence[Graft | None]
    ) -> Tensor:
        """Outputs ``[E, N', ...]`` of all networks on ``inputs`` ``[E, N, ...]``, as one program.

        A `Stackable` host computes all of them by itself; others run on one merged batch where they can, or else under
        a vmap over networks.
        """
        if self._stacks:
            self._occupy(grafts)
            return self._call(parameters, buffers, inputs)
        if self._merges:
            networks = len(inputs)
            self._occupy([_MergedOccupant(graft, networks) if graft else None for graft in grafts])
            return separated(self._call(parameters, buffers, merged(inputs)), networks)
        self._occupy([_MappedOccupant(graft) if graft else None for graft in grafts])
        return vmap(self._call)(dict(parameters), dict(buffers), inputs)

    def looped(
        self, parameters: Parameters, buffers: Parameters, inputs: Tensor, grafts: Sequence[Sequence[Graft | None]]
    ) -> Tensor:
        """The same, one network after the other; ``grafts[e]`` are those of network ``e`` alone, as of E = 1."""
        outputs: list[Tensor] = []
        # Not by an index, whose backward pass would fill a gradient of all networks for each of them.
        rows = {name: tensor.unbind() for name, tensor in parameters.items()}
        for network, own_grafts in enumerate(grafts):
            self._occupy([_SingleOccupant(graft) if graft else None for graft in own_grafts])
            own_parameters = {name: tensors[network] for name, tensors in rows.items()}
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

    def _occupy(self, occupants: Sequence[Occupant | None]) -> None:
        for slot, occupant in zip(self._slots, occupants, strict=True):
            slot.occupant = occupant


def _call(host: nn.Module, parameters: Parameters, buffers: Parameters, inputs: Tensor) -> Tensor:
    return functional_call(host, (dict(parameters), dict(buffers)), (inputs,))
