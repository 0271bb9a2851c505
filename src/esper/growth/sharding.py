"""Parameters of which each process holds a part (FSDP2, `torch.distributed.fsdp.fully_shard`), of hosts and of seeds.

What grows on such a host is sharded as well, by a `fully_shard` of its own: then its gradients are averaged, and
clipping, optimizers and `torch.distributed.checkpoint` treat it like the rest. Torch cannot copy sharded modules, so
blocks that are to be copied leave behind what they look like while they are whole.
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
    """Whether this process holds a part of it."""
    module = sys.modules.get("torch.distributed.tensor")  # dear to import, and imported wherever there is one
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of it, sharing memory; all of what is whole."""
    values: Any = tensor
    return values.to_local() if is_sharded(tensor) else tensor


def reshard(module: nn.Module) -> None:
    """Let go of parameters that forward passes without a backward one have gathered and kept."""
    if not distributed.is_available() or not distributed.is_initialized():
        return
    from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415 (there is none in builds without torch.distributed)

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def count_copies(tensor: Tensor) -> int:
    """In how many processes each value of it is, of a model that they share: all of them have what is whole."""
    world = distributed.get_world_size()
    if not is_sharded(tensor):
        return world
    values: Any = tensor
    mesh, placements = values.device_mesh, values.placements
    replicas = math.prod(mesh.size(at) for at, placement in enumerate(placements) if placement.is_replicate())
    return replicas * world // mesh.size()  # what other meshes have is the same, or they would not learn alike


def combine_norms(norms: Tensor) -> Tensor:
    """L2 norms of all parts together, from those of the parts that each process has, of the same shape."""
    squares = norms.square()
    distributed.all_reduce(squares)
    return squares.sqrt()


def holds_in_all_processes(holds: bool) -> bool:
    """Whether it holds in all processes, which wait for each other."""
    answers: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(answers, holds)
    return all(answers)


def require_whole(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse parameters of which this process has a part.

    Raises:
        SlotError: they are sharded, as by `torch.distributed.fsdp.fully_shard`.
    """
    sharded = next((name for name, parameter in parameters if is_sharded(parameter)), None)
    if sharded is not None:
        raise SlotError(
            f"parameter {sharded!r} is a DTensor, of which this process holds a part (FSDP2, tensor parallelism), and "
            "this takes whole parameters: load a checkpoint of torch.distributed in one process, or use "
            "DistributedDataParallel. To grow while the model is sharded call model.shard_growth(mesh=...) before "
            "fully_shard"
        )


def require_shared(parameters: Iterable[nn.Parameter]) -> None:
    """Refuse a host that is not sharded, although what grows in it is to be.

    Raises:
        SlotError: it is not.
    """
    if not any(map(is_sharded, parameters)):
        raise SlotError(
            "shard_growth was called, but the host is whole: shard it by fully_shard before you plant seeds"
        )


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse options that `fully_shard` would not take for a seed.

    Raises:
        SlotError: one is unknown, or Esper's own; the mesh is none; or there is no process group.
    """
    from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415 (as above)
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 (as above)

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
    """Shard a seed by ``options`` of `fully_shard`."""
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 (as above)

    # Else what a forward pass gathered would stay, and other parameters than the optimizer's would be the seed's.
    fully_shard(seed, **{RESHARD: True}, **options)


def blank(layer: Layer) -> Layer:
    """The same, which remembers what its module looks like while that is whole."""
    without_values = {
        id(one): nn.Parameter(torch.empty_like(one, device="meta"), requires_grad=one.requires_grad)
        for one in layer.module.parameters()
    }
    return replace(layer, blank=copy_block(layer.module, without_values))


@torch.no_grad()
def copy_whole(layer: Layer) -> nn.Module:
    """A copy of a layer's module with the values it has by now; all processes gather those of a sharded one."""
    if layer.blank is None:
        return copy_block(layer.module)
    copied, gathered = copy.deepcopy(layer.blank), dict[nn.Parameter, nn.Parameter]()
    for name, parameter in layer.module.named_parameters(remove_duplicate=False):
        if parameter not in gathered:
            values: Any = parameter
            full: Tensor = values.full_tensor() if is_sharded(parameter) else values
            gathered[parameter] = nn.Parameter(full.clone(), requires_grad=parameter.requires_grad)
        owner, _, last = name.rpartition(".")
        copied.get_submodule(owner).register_parameter(last, gathered[parameter])
    buffer_names = {name for name, _ in copied.named_buffers()}
    for name, buffer in layer.module.named_buffers():
        owner, _, last = name.rpartition(".")
        if name in buffer_names:
            setattr(copied.get_submodule(owner), last, buffer.clone())
        else:
            copied.get_submodule(owner).register_buffer(last, buffer.clone())
    return copied
