"""Find the sites of a host: one forward pass tells what features each named submodule yields."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from esper.errors import SlotError
from esper.growth.site import Layout, Site

_LAYOUT_BY_RANK = {2: Layout.FEATURES, 3: Layout.TOKENS, 4: Layout.IMAGE}


def probe_sites(host: nn.Module, names: Sequence[str], example_input: Tensor) -> dict[str, Site]:
    """Run ``host(example_input)`` once and describe the output of every submodule in ``names``.

    A rank-3 output is read as tokens ``[B, T, D]`` unless a convolution or a normalisation over channels made it, then
    as a sequence ``[B, C, L]``.

    Raises:
        SlotError: a name matches no submodule, is listed twice, stands for a module that runs more than once in a
            forward pass or not at all, or yields something that is no tensor of rank 2 to 4.
    """
    modules = _resolve(host, names)
    outputs: dict[str, list[Any]] = {name: [] for name in names}
    handles = [
        module.register_forward_hook(lambda _module, _args, output, name=name: outputs[name].append(output))
        for name, module in modules.items()
    ]
    was_training = host.training
    try:
        host.eval()
        with torch.no_grad():
            host(example_input)
    finally:
        host.train(was_training)
        for handle in handles:
            handle.remove()
    input_shape = tuple(example_input.shape[1:])
    return {name: _site(name, modules[name], outputs[name], input_shape) for name in names}


def _resolve(host: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    known = dict(cast(Iterator[tuple[str, nn.Module]], host.named_modules(remove_duplicate=False)))
    resolved: dict[str, nn.Module] = {}
    for name in names:
        if name in resolved:
            raise SlotError(f"slot {name!r} is listed twice; name each submodule once")
        if not name or name not in known:
            near = difflib.get_close_matches(name, [known_name for known_name in known if known_name], n=3)
            hint = f"; did you mean {' or '.join(repr(match) for match in near)}?" if near else ""
            raise SlotError(f"the host has no submodule {name!r}{hint}")
        twin = next((other for other, module in resolved.items() if module is known[name]), None)
        if twin is not None:
            raise SlotError(f"{name!r} and {twin!r} are the same module; one slot would serve two places")
        resolved[name] = known[name]
    return resolved


def _site(name: str, module: nn.Module, outputs: list[Any], input_shape: tuple[int, ...]) -> Site:
    if not outputs:
        raise SlotError(
            f"submodule {name!r} was never called in the probe forward: its parent may use its weights directly "
            "or call .forward(); attach to a module that is called"
        )
    if len(outputs) > 1:
        raise SlotError(f"submodule {name!r} runs {len(outputs)} times in one forward pass; a slot needs one place")
    output = outputs[0]
    if not isinstance(output, Tensor) or output.dim() not in _LAYOUT_BY_RANK:
        shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise SlotError(f"submodule {name!r} yields {shape}; a slot needs a tensor of 2 to 4 axes with the batch first")
    layout = _LAYOUT_BY_RANK[output.dim()]
    if layout is Layout.TOKENS and _is_channel_first(module):
        layout = Layout.SEQUENCE
    shape = tuple(output.shape)
    if layout in (Layout.SEQUENCE, Layout.IMAGE):
        return Site(layout, shape[1], shape[2:], input_shape)
    return Site(layout, shape[-1], shape[1:-1], input_shape)


_CHANNEL_FIRST_TYPES = (nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d, nn.GroupNorm, nn.MaxPool1d, nn.AvgPool1d)


def _is_channel_first(module: nn.Module) -> bool:
    return any(isinstance(part, _CHANNEL_FIRST_TYPES) for part in module.modules())
