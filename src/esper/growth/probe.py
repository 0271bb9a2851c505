"""Find the sites of a host: one forward pass tells what features each named submodule yields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn

from esper.errors import SlotError
from esper.growth.causality import is_causal, output_tensor
from esper.growth.names import did_you_mean
from esper.growth.site import Layout, Site

Arguments: TypeAlias = Tensor | tuple[Any, ...] | Mapping[str, Any]
"""What a host takes: its one argument, its positional arguments, or its keyword arguments."""

_LAYOUT_BY_RANK = {2: Layout.FEATURES, 3: Layout.TOKENS, 4: Layout.IMAGE}


class Probed(NamedTuple):
    """What a probe forward found."""

    sites: dict[str, Site]
    """By submodule, in the order of calls."""
    outputs: int | None
    """Last axis of what the host returns: its classes, if it is a classifier; None if it returns no tensor."""


def probe(host: nn.Module, names: Sequence[str], example_input: Arguments, *, causal: bool | None = None) -> Probed:
    """Run the host on ``example_input`` and describe the output of every submodule in ``names``.

    A rank-3 output is read as tokens ``[B, T, D]`` unless a convolution or a normalisation over channels made it, then
    as a sequence ``[B, C, L]``. Whether tokens are ``causal``, so that none may learn of later ones, shows in the
    host's outputs when the last token changes; say it where that cannot tell, as with a single token.

    Raises:
        SlotError: a name matches no submodule, is listed twice, stands for a module that runs more than once in a
            forward pass or not at all, or yields something that is no tensor of rank 2 to 4 with the batch first.
    """
    modules = _resolve(host, names)
    inputs = first_tensor(example_input)
    outputs: dict[str, list[Any]] = {}
    handles = [
        module.register_forward_hook(
            lambda _module, _args, output, name=name: outputs.setdefault(name, []).append(output)
        )
        for name, module in modules.items()
    ]
    was_training = host.training
    try:
        host.eval()
        with torch.no_grad():
            returned = output_tensor(call(host, example_input))
            kept = {name: list(found) for name, found in outputs.items()}
            if causal is None:
                causal = is_causal(lambda changed: call(host, _with_first(example_input, changed)), inputs)
    finally:
        host.train(was_training)
        for handle in handles:
            handle.remove()
    for name in names:
        _check(name, kept.get(name, []), len(inputs))
    sites = {name: _site(modules[name], found[0], inputs, causal) for name, found in kept.items()}
    return Probed(sites, None if returned is None else returned.shape[-1])


def call(host: nn.Module, arguments: Arguments) -> Any:
    """What the host returns."""
    if isinstance(arguments, Tensor):
        return host(arguments)
    return host(**arguments) if isinstance(arguments, Mapping) else host(*arguments)


def first_tensor(arguments: Arguments) -> Tensor:
    """The network's input: the first tensor among the arguments.

    Raises:
        SlotError: there is none.
    """
    if isinstance(arguments, Tensor):
        return arguments
    parts = arguments.values() if isinstance(arguments, Mapping) else arguments
    for part in parts:
        if isinstance(part, Tensor):
            return part
    raise SlotError("the example input holds no tensor: give what the model is called with")


def _with_first(arguments: Arguments, tensor: Tensor) -> Arguments:
    """The same arguments with another first tensor."""
    first = first_tensor(arguments)
    if isinstance(arguments, Tensor):
        return tensor
    if isinstance(arguments, Mapping):
        return {name: tensor if part is first else part for name, part in arguments.items()}
    return tuple(tensor if part is first else part for part in arguments)


def _resolve(host: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    known = dict(cast(Iterator[tuple[str, nn.Module]], host.named_modules(remove_duplicate=False)))
    resolved: dict[str, nn.Module] = {}
    for name in names:
        if name in resolved:
            raise SlotError(f"slot {name!r} is listed twice; name each submodule once")
        if not name or name not in known:
            raise SlotError(f"the host has no submodule {name!r}{did_you_mean(name, known)}")
        twin = next((other for other, module in resolved.items() if module is known[name]), None)
        if twin is not None:
            raise SlotError(f"{name!r} and {twin!r} are the same module; one slot would serve two places")
        resolved[name] = known[name]
    return resolved


def _check(name: str, outputs: Sequence[Any], batch: int) -> None:
    if not outputs:
        raise SlotError(
            f"submodule {name!r} was never called in the probe forward: its parent may use its weights directly "
            "or call .forward(); attach to a module that is called"
        )
    if len(outputs) > 1:
        raise SlotError(f"submodule {name!r} runs {len(outputs)} times in one forward pass; a slot needs one place")
    output = outputs[0]
    if not isinstance(output, Tensor) or output.dim() not in _LAYOUT_BY_RANK or not output.is_floating_point():
        shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise SlotError(
            f"submodule {name!r} yields {shape}; a slot needs one floating-point tensor of 2 to 4 axes with the batch "
            "first: attach to a submodule that yields that"
        )
    if len(output) != batch:
        raise SlotError(
            f"submodule {name!r} yields {tuple(output.shape)} from a batch of {batch}; a slot needs the batch first"
        )


def _site(module: nn.Module, output: Tensor, inputs: Tensor, causal: bool) -> Site:
    layout = _LAYOUT_BY_RANK[output.dim()]
    if layout is Layout.TOKENS and _is_channel_first(module):
        layout = Layout.SEQUENCE
    shape = tuple(output.shape)
    input_shape = tuple(inputs.shape[1:]) if inputs.is_floating_point() else ()
    if layout in (Layout.SEQUENCE, Layout.IMAGE):
        return Site(layout, shape[1], shape[2:], input_shape)
    return Site(layout, shape[-1], shape[1:-1], input_shape, causal and layout is Layout.TOKENS)


_CHANNEL_FIRST_TYPES = (nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d, nn.GroupNorm, nn.MaxPool1d, nn.AvgPool1d)


def _is_channel_first(module: nn.Module) -> bool:
    return any(isinstance(part, _CHANNEL_FIRST_TYPES) for part in module.modules())
