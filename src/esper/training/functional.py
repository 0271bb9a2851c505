"""A module that is called with parameters from outside, many times."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.func import functional_call, vmap

from esper.stacking import Stackable


class Functional:
    """What `torch.func.functional_call` does with one module, with all names looked up once.

    A small host would wait for the look-up in every call as long as it computes; here it costs nothing while the same
    tensors come again. The module loses its own parameters and buffers and keeps what it was last called with: its
    forward reads them as attributes, and must not ask for ``parameters()``.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        places: dict[Tensor, list[tuple[nn.Module, str]]] = {}
        for owner in module.modules():
            for attribute, tensor in _own(owner, recurse=False):
                places.setdefault(tensor, []).append((owner, attribute))
        self._places = {name: places[tensor] for name, tensor in _own(module, recurse=True)}
        self._held: dict[str, Tensor] = {}
        for tensor, shared in places.items():
            for owner, attribute in shared:
                delattr(owner, attribute)
                setattr(owner, attribute, tensor.detach())

    def __call__(self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], *inputs: Tensor) -> Tensor:
        """What the module returns with these parameters and buffers, stacked or of one network."""
        for name, tensor in (*parameters.items(), *buffers.items()):
            if self._held.get(name) is not tensor:
                self._held[name] = tensor
                for owner, attribute in self._places[name]:
                    setattr(owner, attribute, tensor)
        return self._module(*inputs)


def _own(module: nn.Module, *, recurse: bool) -> list[tuple[str, Tensor]]:
    parameters = module.named_parameters(recurse=recurse, remove_duplicate=False)
    return [*parameters, *module.named_buffers(recurse=recurse, remove_duplicate=False)]


def stacked_call(module: nn.Module) -> Callable[..., Tensor]:
    """A function of parameters, buffers and inputs that computes R modules of the shape of ``module`` at once.

    All tensors are stacked: parameters and buffers by name, each ``[R, *shape]``, inputs and the result ``[R, ...]``.
    """
    if isinstance(module, Stackable):
        return Functional(copy.deepcopy(module))

    def one(parameters: dict[str, Tensor], buffers: dict[str, Tensor], *inputs: Tensor) -> Tensor:
        return functional_call(module, (parameters, buffers), inputs)

    def all_of_them(parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], *inputs: Tensor) -> Tensor:
        return vmap(one)(dict(parameters), dict(buffers), *inputs)

    return all_of_them
