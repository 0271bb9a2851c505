"""Hooks on the gradients of modules, and seeds planted in a model that several processes train.

`torch.nn.parallel.DistributedDataParallel` synchronises the values and averages the gradients of the parameters that
exist when it is constructed. This module does the same for seeds that are planted later, by hand or by a grower.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed, nn
from torch.utils.hooks import RemovableHandle

from esper.errors import DistributedError

if TYPE_CHECKING:
    from esper.growth.seed import Seed

_averaging: WeakKeyDictionary[nn.Module, list[RemovableHandle]] = WeakKeyDictionary()
"""The hooks that average the gradients of a module."""
_groups: WeakKeyDictionary[nn.Module, distributed.ProcessGroup] = WeakKeyDictionary()
"""For each wrapper, a separate process group for the communication of seeds."""


def register_gradient_hooks(module: nn.Module, callback: Callable[[Tensor], None]) -> list[RemovableHandle]:
    """Call ``callback`` with every parameter in ``module`` whenever a backward pass has added to its gradient.

    Callbacks run in registration order. Returns the handles that remove the hooks.
    """
    handles: list[RemovableHandle] = []
    for parameter in module.parameters():
        if not (parameter.is_floating_point() or parameter.is_complex()):
            continue  # quantised: it cannot learn
        learns = parameter.requires_grad
        parameter.requires_grad_(True)  # only then torch takes a hook
        handles.append(cast(RemovableHandle, parameter.register_post_accumulate_grad_hook(callback)))
        parameter.requires_grad_(learns)
    return handles


def average_gradients(modules: Iterable[nn.Module], group: distributed.ProcessGroup) -> None:
    """Average all gradients in ``modules`` over the processes of ``group`` in every backward pass that follows.

    Averaging runs after all hooks registered so far and before gradients are clipped. It replaces earlier averaging.
    """

    def average(parameter: Tensor) -> None:
        average_gradient(parameter, group)

    for module in modules:
        for handle in _averaging.pop(module, []):
            handle.remove()
        _averaging[module] = register_gradient_hooks(module, average)


@torch.no_grad()
def average_gradient(parameter: Tensor, group: distributed.ProcessGroup) -> None:
    """Replace the gradient of ``parameter`` by its average over the processes of ``group``."""
    assert parameter.grad is not None
    parameter.grad /= distributed.get_world_size(group)
    distributed.all_reduce(parameter.grad, group=group)


@torch.no_grad()
def synchronize_seed(seed: Seed, slot: str, layer: nn.Module) -> None:
    """If ``layer`` is in a `DistributedDataParallel`, keep a seed planted after it identical in all processes.

    The seed gets its values in the first process, and its gradients are averaged. Seeds that are planted before the
    model is wrapped do not need this.

    Raises:
        DistributedError: the processes plant different seeds.
    """
    wrapper = find_wrapper(layer)
    if wrapper is None:
        return
    ranks: list[int] = distributed.get_process_group_ranks(cast("distributed.ProcessGroup", wrapper.process_group))
    if wrapper not in _groups:
        _groups[wrapper] = cast(
            "distributed.ProcessGroup", distributed.new_group(ranks, use_local_synchronization=True)
        )
    group = _groups[wrapper]

    # All must plant the same, or they would wait for each other during training.
    tensors = {**dict(seed.named_parameters()), **dict(seed.named_buffers())}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    planted: list[Any] = [None] * len(ranks)
    distributed.all_gather_object(planted, (slot, seed.blueprint.name, seed.blend.name, shapes), group=group)
    for rank, (other_slot, blueprint, blend, other_shapes) in zip(ranks, planted, strict=True):
        if (other_slot, blueprint, blend, other_shapes) != planted[0]:
            raise DistributedError(
                f"process {ranks[0]} plants a {planted[0][1]} in slot {planted[0][0]!r}, but process {rank} a "
                f"{blueprint} in slot {other_slot!r}: under DistributedDataParallel plant the same, in the same order, "
                "in all processes, or let an esper.Grower in each of them decide"
            )

    # The same values, and averages of all gradients.
    for tensor in tensors.values():
        distributed.broadcast(tensor, src=ranks[0], group=group)
    average_gradients([seed], group)


def find_wrapper(layer: nn.Module) -> nn.parallel.DistributedDataParallel | None:
    """The `DistributedDataParallel` that contains ``layer``; None if there is none, or only one process."""
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return None
    # A module has no reference to its parents, and torch keeps no list of wrappers. A wrapper that is no longer used
    # may not have been collected yet.
    if next(_find_wrappers(layer), None) is not None:
        gc.collect()
    return next(_find_wrappers(layer), None)


def _find_wrappers(layer: nn.Module) -> Iterator[nn.parallel.DistributedDataParallel]:
    for candidate in gc.get_objects():
        # Check the type, because `isinstance` may run arbitrary code of proxies from other libraries.
        if issubclass(type(candidate), nn.parallel.DistributedDataParallel) and any(
            part is layer for part in candidate.modules()
        ):
            yield candidate
