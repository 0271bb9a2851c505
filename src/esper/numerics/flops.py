"""FLOPs of a forward pass, as torch counts them; a multiply-add counts two, and what is no product counts nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


class FlopCount(NamedTuple):
    """What a pass took."""

    total: int
    parts: dict[str, int]
    """Of the modules that were asked for, all their calls together."""


@torch.no_grad()
def count_flops(run: Callable[[], object], parts: Mapping[str, nn.Module] = MappingProxyType({})) -> FlopCount | None:
    """Call ``run`` and count what is multiplied meanwhile, in all and by each of ``parts``.

    None: torch cannot count there, as with nested tensors.
    """
    before, taken = dict[str, int](), dict.fromkeys(parts, 0)

    def begin(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda _, __: before.update({name: counter.get_total_flops()})

    def end(name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        return lambda _, __, ___: taken.update({name: taken[name] + counter.get_total_flops() - before[name]})

    hooks = [module.register_forward_pre_hook(begin(name)) for name, module in parts.items()]
    hooks += [module.register_forward_hook(end(name)) for name, module in parts.items()]
    try:
        # Fused attention is opaque to the counter on some devices; the plain formula shows its products.
        eager = torch.compiler.set_stance("force_eager")  # what is compiled is not seen
        with eager, sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            run()
    except RuntimeError:
        return None
    finally:
        for hook in hooks:
            hook.remove()
    return FlopCount(counter.get_total_flops(), taken)
