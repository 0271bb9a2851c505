"""FLOPs of a forward pass, as torch counts them: two for a multiply-add, none for operations without products."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


class FlopCount(NamedTuple):
    """FLOPs of a pass, in total and by module."""

    total: int
    parts: dict[str, int]
    """FLOPs of each named module, summed over its calls."""


@torch.no_grad()
def count_flops(run: Callable[[], object], parts: Mapping[str, nn.Module] = MappingProxyType({})) -> FlopCount | None:
    """Call ``run`` and count the FLOPs meanwhile, in total and of each module in ``parts``.

    Returns:
        The counts, or None where torch cannot count, as with nested tensors.
    """
    before, flops = dict[str, int](), dict.fromkeys(parts, 0)

    def make_pre_hook(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda _, __: before.update({name: counter.get_total_flops()})

    def make_hook(name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        return lambda _, __, ___: flops.update({name: flops[name] + counter.get_total_flops() - before[name]})

    hooks = [module.register_forward_pre_hook(make_pre_hook(name)) for name, module in parts.items()]
    hooks += [module.register_forward_hook(make_hook(name)) for name, module in parts.items()]
    try:
        # The counter does not see into compiled code, nor on some devices into fused attention.
        eager = torch.compiler.set_stance("force_eager")
        with eager, sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            run()
    except RuntimeError:
        return None
    finally:
        for hook in hooks:
            hook.remove()
    return FlopCount(counter.get_total_flops(), flops)
