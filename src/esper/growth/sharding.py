"""Sharded hosts and seeds: each process has a part of every parameter (FSDP2's `fully_shard`).

Seeds on a sharded host are sharded as well, each by its own `fully_shard`. So their gradients are averaged, and
clipping, optimizers and `torch.distributed.checkpoint` treat them like other parameters. Torch cannot copy sharded
modules, so blocks are copied without values before they are sharded.
"""

from __future__ import annotations

import copy
import inspect
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed, nn

from esper.config.arguments import describe_value
from esper.errors import SlotError
from esper.growth.depth import copy_block
from esper.growth.site import Layer

RESHARD = "reshard_after_forward"
"""Option of `fully_shard`."""


def is_sharded(tensor: Tensor) -> bool:
    """Whether this process has only a part of ``tensor``."""
    module = sys.modules.get("torch.distributed.tensor")  # slow to import, and imported wherever there is a DTensor
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """This process's part of ``tensor``, sharing memory; the whole tensor if it is not sharded."""
    values: Any = tensor
    return values.to_local() if is_sharded(tensor) else tensor


def reshard(module: nn.Module) -> None:
    """Free parameters that were gathered by forward passes without a backward pass."""
    if not distributed.is_available() or not distributed.is_initialized():
        return
    from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415 (there is none in builds without torch.distributed)

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def count_copies(tensor: Tensor) -> int:
    """Number of processes that have each value of ``tensor``; all processes if it is not sharded."""
    world = distributed.get_world_size()
    if not is_sharded(tensor):
        return world
    values: Any = tensor
    # Replicated dimensions of the mesh have equal parts.
    mesh, placements = values.device_mesh, values.placements
    replicas = math.prod(mesh.size(at) for at, placement in enumerate(placements) if placement.is_replicate())
    return replicas * world // mesh.size()  # other meshes hold the same, or they would learn differently


def combine_norms(norms: Tensor) -> Tensor:
    """L2 norms over all processes, from the norms of the parts in each process."""
    # Squared norms of disjoint parts add up.
    squares = norms.square()
    distributed.all_reduce(squares)
    return squares.sqrt()


def holds_in_all_processes(holds: bool) -> bool:
    """Whether a condition holds in all processes, which wait for each other."""
    gathered: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, holds)
    return all(gathered)


def require_whole(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Reject sharded parameters.

    Raises:
        SlotError: parameters are sharded, as by `torch.distributed.fsdp.fully_shard`.
    """
    sharded = next((name for name, parameter in parameters if is_sharded(parameter)), None)
    if sharded is not None:
        raise SlotError(
            f"parameter {sharded!r} is a DTensor, of which this process holds a part (FSDP2, tensor parallelism), and "
            "this takes whole parameters: load a checkpoint of torch.distributed in one process, or use "
            "DistributedDataParallel. To grow while the model is sharded call model.shard_growth(mesh=...) before "
            "fully_shard"
        )


def require_sharded_host(parameters: Iterable[nn.Parameter]) -> None:
    """Reject a host that is not sharded although `shard_growth` was called.

    Raises:
        SlotError: no parameter is sharded.
    """
    if not any(map(is_sharded, parameters)):
        raise SlotError(
            "shard_growth was called, but the host is whole: shard it by fully_shard before you plant seeds"
        )


def check_options(options: Mapping[str, Any]) -> None:
    """Reject options that `fully_shard` does not accept for a seed.

    Raises:
        SlotError: an option is unknown or set by Esper; the mesh is invalid; or there is no process group.
    """
    from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415 (as above)
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 (as above)

    # Options that Esper does not set itself.
    allowed = [name for name in inspect.signature(fully_shard).parameters if name not in ("module", RESHARD)]
    unknown = next((name for name in options if name not in allowed), None)
    if unknown is not None:
        raise SlotError(f"shard_growth takes no {unknown!r}: give options of fully_shard, of {', '.join(allowed)}")
    mesh = options.get("mesh")
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise SlotError(f"mesh is {describe_value(mesh)}: give what init_device_mesh returns")
    if not distributed.is_initialized():
        raise SlotError("there is no process group: call torch.distributed.init_process_group first")


def shard(seed: nn.Module, options: dict[str, Any]) -> None:
    """Shard a seed with these ``options`` of `fully_shard`."""
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 (as above)

    # Without resharding, gathered parameters, which are not the optimizer's, would stay after a forward pass.
    fully_shard(seed, **{RESHARD: True}, **options)


def add_blank_copy(layer: Layer) -> Layer:
    """The layer with a copy of its module without values, made while the module is whole."""
    without_values = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        for parameter in layer.module.parameters()
    }
    return replace(layer, blank=copy_block(layer.module, without_values))


@torch.no_grad()
def copy_whole(layer: Layer) -> nn.Module:
    """A copy of a layer's module with its current values, which all processes gather if the module is sharded."""
    if layer.blank is None:
        return copy_block(layer.module)
    # Fill the blank copy: each parameter once, as several names may share one.
    copied, gathered = copy.deepcopy(layer.blank), dict[nn.Parameter, nn.Parameter]()
    for name, parameter in layer.module.named_parameters(remove_duplicate=False):
        if parameter not in gathered:
            values: Any = parameter
            full: Tensor = values.full_tensor() if is_sharded(parameter) else values
            gathered[parameter] = nn.Parameter(full.clone(), requires_grad=parameter.requires_grad)
        owner, _, last = name.rpartition(".")
        copied.get_submodule(owner).register_parameter(last, gathered[parameter])
    # Buffers, among them those that were registered since the blank copy was made.
    buffer_names = {name for name, _ in copied.named_buffers()}
    for name, buffer in layer.module.named_buffers():
        owner, _, last = name.rpartition(".")
        if name in buffer_names:
            setattr(copied.get_submodule(owner), last, buffer.clone())
        else:
            copied.get_submodule(owner).register_buffer(last, buffer.clone())
    return copied
