"""Find the sites of a host: one forward pass tells what features each named submodule yields."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, NamedTuple, cast

import torch
from pydantic import PlainValidator
from torch import Tensor, nn

from esper.config.arguments import Advice
from esper.errors import SlotError, did_you_mean
from esper.growth.blueprints.registry import LayerCall
from esper.growth.depth import copy_block
from esper.growth.positions import (
    CallWitness,
    drop_caches,
    find_declared_reason,
    find_output_tensor,
    is_causal,
    list_argument_names,
    pad_nested,
)
from esper.growth.side_pass import keep_modes
from esper.growth.site import IN_ORDER, Layer, Layout, Site
from esper.numerics.flops import count_flops


def _read_arguments(value: Any) -> Any:
    """A tensor, a tuple, or a mapping from names."""
    if isinstance(value, Tensor | tuple):
        return cast(object, value)
    if isinstance(value, list):
        return tuple(cast("list[Any]", value))
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in cast("Mapping[Any, Any]", value)):
        raise ValueError("no arguments")
    return cast(object, value)


def _require_module(value: Any) -> Any:
    if not isinstance(value, nn.Module) or isinstance(value, torch.jit.ScriptModule):
        raise ValueError("no module")
    return value


Arguments = Annotated[
    Tensor | tuple[Any, ...] | Mapping[str, Any],
    PlainValidator(_read_arguments),
    Advice("give what the model is called with: a tensor, a tuple of arguments, or a dictionary of keyword arguments"),
]
"""What a host takes: its one argument, its positional arguments, or its keyword arguments."""
PlainModule = Annotated[
    nn.Module,
    PlainValidator(_require_module),
    Advice("give an nn.Module, and of scripted or traced ones (torch.jit) the module that they were made of"),
]
"""Any module but those of torch.jit."""
FEWEST_EXAMPLES = 2
"""With one alone the batch axis looks like any axis of size 1, and what is the same for all like what is each one's."""
_LAYOUT_BY_RANK = {2: Layout.FEATURES, 3: Layout.TOKENS, 4: Layout.IMAGE}


@dataclass
class _Seen:
    """One call of a module."""

    output: Any
    keeps_shape: bool
    unaltered: bool
    call: LayerCall


class _LayerWitness:
    """Sees what some modules of a host return, and what it costs, until `release`."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.seen: dict[str, list[_Seen]] = {}
        self._hooks = [
            module.register_forward_hook(partial(self._see, name), with_kwargs=True) for name, module in modules.items()
        ]

    def _see(
        self, name: str, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any
    ) -> None:
        call = LayerCall(arguments, keywords)
        first, keeps = call.first_argument, False
        if first is not None and isinstance(output, Tensor) and not output.is_nested:
            keeps = (first.shape, first.dtype) == (output.shape, output.dtype)
        unaltered = _is_unaltered(module, call, output)
        self.seen.setdefault(name, []).append(_Seen(_pad_if_nested(output), keeps, unaltered, call))

    def release(self) -> None:
        """See no more calls."""
        for hook in self._hooks:
            hook.remove()


class Example:
    """The example input of a host, which files of it do not hold.

    Args:
        arguments: None: it is lost.
    """

    def __init__(self, arguments: Arguments | None = None) -> None:
        self.arguments = arguments

    def __deepcopy__(self, _: object) -> Example:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Example, ()


class ProbeResult(NamedTuple):
    """What a probe forward found."""

    sites: dict[str, Site]
    """Sites by submodule, in the order of calls."""
    outputs: int | None
    """Channels of what the host returns: its classes, if it is a classifier; None if it returns no tensor.

    Axis 1 of images ``[B, C, H, W]``, the last one of anything else.
    """
    flops: int | None
    """Of the host's forward pass for one example; None if torch cannot count them."""


def probe(
    host: nn.Module,
    names: Sequence[str],
    example_input: Arguments,
    *,
    causal: bool | None = None,
    apart: bool | None = None,
    silenced: Collection[str] = (),
) -> ProbeResult:
    """Run the host on ``example_input`` and describe the output of every submodule in ``names``.

    A rank-3 output is read as tokens ``[B, T, D]`` unless a convolution or a normalisation over channels made it, then
    as a sequence ``[B, C, L]``. Whether tokens are ``causal``, so that none may learn of later ones, shows in the
    host's outputs when the last token changes; say it where that cannot tell, as with a single token. Whether positions
    stay ``apart``, so that none may learn of any other, shows in what modules are called with. Of the modules
    ``silenced`` it also finds the `Layer.outputs`.

    Raises:
        SlotError: the example input is no batch of two or more; a name matches no submodule, is listed twice, stands
            for a module that runs more than once in a forward pass or not at all, or yields something that is no
            tensor of rank 2 to 4 with the batch first.
    """
    modules = _resolve(host, names)
    inputs = _require_batch(example_input)
    witness, layers = CallWitness(host), _LayerWitness(modules)
    try:
        with keep_modes(host), torch.no_grad():
            host.eval()
            returned = find_output_tensor(call_host(host, example_input))
            witness.release()
            layers.release()
            counted = count_flops(lambda: call_host(host, example_input), modules)
            if causal is None:
                causal = is_causal(lambda changed: call_host(host, _replace_input(example_input, changed)), inputs)
    finally:
        witness.release()
        layers.release()
    for name in names:
        _check(name, [one.output for one in layers.seen.get(name, [])], len(inputs))
    costs = None if counted is None else {name: flops // len(inputs) for name, flops in counted.parts.items()}
    sites: dict[str, Site] = {}
    for name, (found, *_) in layers.seen.items():
        flops = None if costs is None else costs[name]
        learning = frozenset(path for path, one in modules[name].named_parameters() if one.requires_grad)
        layer = Layer(
            modules[name],
            flops,
            found.keeps_shape,
            found.call.has_single_argument,
            _choose_anchor(host, modules[name], found.output),
            learning,
            unaltered=found.unaltered,
        )
        if name in silenced and layer.keeps_shape and not layer.quantised:
            layer = replace(layer, outputs=find_outputs(layer.module, found.call))
        sites[name] = _describe_site(layer, found.output, inputs, causal)
    if apart is not False:
        reason = _find_reason(host, example_input, witness, sites) or ("you said that they do" if apart else "")
        sites = {name: replace(site, apart=reason) if site.layout in IN_ORDER else site for name, site in sites.items()}
    outputs = None if returned is None else returned.shape[1 if returned.dim() == 4 else -1]
    return ProbeResult(sites, outputs, None if counted is None else counted.total // len(inputs))


def _choose_anchor(host: nn.Module, module: nn.Module, features: Tensor) -> Tensor:
    """A number of the type and on the device of the features, if the host computes in that type, and does not only
    return it as under autocast; else of the module's first parameter, or the host's."""
    floating = [one for part in (module, host) for one in part.parameters() if one.is_floating_point()]
    like = features if any(one.dtype == features.dtype for one in floating) else next(iter(floating), features)
    return torch.zeros((), device=like.device, dtype=like.dtype if like.is_floating_point() else None)


def _find_reason(host: nn.Module, example_input: Arguments, witness: CallWitness, sites: Mapping[str, Site]) -> str:
    """Why positions stay apart; empty if they do not."""
    inputs = first_tensor(example_input)
    keywords = tuple(example_input) if isinstance(example_input, Mapping) else ()
    lengths = {site.extent[0] for site in sites.values() if site.layout in IN_ORDER}
    images = inputs.dim() == 4 and inputs.is_floating_point()
    return find_declared_reason(host, keywords, images=images) or witness.reason(len(inputs), lengths)


def call_host(host: nn.Module, arguments: Arguments) -> Any:
    """What the host returns."""
    if isinstance(arguments, Tensor):
        return host(arguments)
    return host(**arguments) if isinstance(arguments, Mapping) else host(*arguments)


def fit_example(host: nn.Module, arguments: Arguments, like: Tensor) -> Arguments:
    """The arguments where ``host`` is; floating-point tensors in the type that they have, if ``host`` has it still, or
    else in that of ``like``."""
    dtype, types = first_tensor(arguments).dtype, {one.dtype for one in host.parameters()}
    like = next((one for one in host.parameters() if one.dtype == dtype), like)

    def follow(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        other = value.is_floating_point() and value.dtype not in types
        return value.to(like.device, like.dtype if other else value.dtype)

    if isinstance(arguments, Tensor):
        return cast("Tensor", follow(arguments))
    if isinstance(arguments, Mapping):
        return {name: follow(value) for name, value in arguments.items()}
    return tuple(map(follow, arguments))


def _arguments_by_place(arguments: Arguments) -> dict[int | str, Any]:
    """Arguments by index or keyword."""
    if isinstance(arguments, Tensor):
        return {0: arguments}
    return dict(arguments.items() if isinstance(arguments, Mapping) else enumerate(arguments))


def find_input_place(arguments: Arguments) -> int | str:
    """Where the network's input is, the first tensor among the arguments: an index, or the name of a keyword.

    Raises:
        SlotError: there is none.
    """
    for place, argument in _arguments_by_place(arguments).items():
        if isinstance(argument, Tensor):
            return place
    raise SlotError("the example input holds no tensor: give what the model is called with")


def first_tensor(arguments: Arguments) -> Tensor:
    """The network's input."""
    return _arguments_by_place(arguments)[find_input_place(arguments)]


def _require_batch(arguments: Arguments) -> Tensor:
    """The network's input, if it is a batch of `FEWEST_EXAMPLES` or more."""
    inputs = first_tensor(arguments)
    if inputs.dim() < 1 or len(inputs) < FEWEST_EXAMPLES:
        raise SlotError(
            f"the example input has shape {tuple(inputs.shape)}: give a batch of {FEWEST_EXAMPLES} examples or more, "
            "batch first, so that the batch axis can be told from others"
        )
    return inputs


_PLAIN_LAYERS = (nn.Linear.forward, nn.Conv1d.forward, nn.Conv2d.forward)


def _is_unaltered(module: nn.Module, call: LayerCall, output: Any) -> bool:
    """As `Layer.unaltered`, within rounding. A hook that only listens changes nothing."""
    if type(module).forward not in _PLAIN_LAYERS:
        return True
    try:
        own = _pad_if_nested(type(module).forward(module, *call.arguments, **call.keywords))
    except (TypeError, RuntimeError, AttributeError):  # it takes something else, or has its weight elsewhere by now
        return False
    output = _pad_if_nested(output)
    if own.is_meta:
        return True
    if not isinstance(output, Tensor) or (own.shape, own.dtype) != (output.shape, output.dtype):
        return False
    return torch.allclose(own, output, rtol=0.01, atol=0.01 * float(own.abs().max()), equal_nan=True)


def _pad_if_nested(output: Any) -> Any:
    return pad_nested(output) if isinstance(output, Tensor) and output.is_nested else output


def _replace_input(arguments: Arguments, tensor: Tensor) -> Arguments:
    """The same arguments with another first tensor, wherever it is among them."""
    if isinstance(arguments, Tensor):
        return tensor
    first = first_tensor(arguments)
    replaced = {place: tensor if part is first else part for place, part in _arguments_by_place(arguments).items()}
    return cast("Arguments", replaced) if isinstance(arguments, Mapping) else tuple(replaced.values())


def _resolve(host: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    modules_of_host = dict(cast(Iterator[tuple[str, nn.Module]], host.named_modules(remove_duplicate=False)))
    resolved: dict[str, nn.Module] = {}
    for name in names:
        if name in resolved:
            raise SlotError(f"slot {name!r} is listed twice; name each submodule once")
        if not name:
            raise SlotError("a slot needs the name of a submodule, not ''; to grow the whole, wrap it in a module")
        if name not in modules_of_host:
            hint = did_you_mean(name, modules_of_host) or "; print(model) shows the names"
            raise SlotError(f"the host has no submodule {name!r}{hint}")
        if isinstance(modules_of_host[name], torch.jit.ScriptModule):
            raise SlotError(
                f"submodule {name!r} is scripted or traced (torch.jit), so that no slot can sit behind it: put the "
                "module there that it was made of, or name one around it"
            )
        twin = next((other for other, module in resolved.items() if module is modules_of_host[name]), None)
        if twin is not None:
            raise SlotError(f"{name!r} and {twin!r} are the same module; name it once")
        resolved[name] = modules_of_host[name]
    return resolved


def _check(name: str, outputs: Sequence[Any], batch: int) -> None:
    """Whether a slot can sit behind the submodule ``name``, which returned ``outputs``."""
    if not outputs:
        raise SlotError(
            f"submodule {name!r} was never called in the probe forward, which is in eval mode: its parent may not use "
            "it, use its weights alone or call its .forward(); name a module that is called, for instance the parent"
        )
    if len(outputs) > 1:
        raise SlotError(
            f"submodule {name!r} runs {len(outputs)} times in one forward pass; a slot needs a module that runs once"
        )
    output = outputs[0]
    if not isinstance(output, Tensor):
        raise SlotError(
            f"submodule {name!r} returns a {type(output).__name__}; a slot needs a single tensor: name a submodule "
            "inside it or after it that returns one"
        )
    shape = tuple(output.shape)
    if not output.is_floating_point():
        raise SlotError(f"submodule {name!r} returns {output.dtype} values; a slot needs floating-point features")
    if output.dim() not in _LAYOUT_BY_RANK:
        raise SlotError(
            f"submodule {name!r} returns shape {shape}; a slot needs features [B, D], tokens [B, T, D], sequences "
            "[B, C, L] or images [B, C, H, W]"
        )
    if len(output) != batch:
        raise SlotError(
            f"submodule {name!r} returns shape {shape} for a batch of {batch}; a slot needs the batch as first axis: "
            "set batch_first=True where torch offers it, or name a submodule that keeps the examples apart"
        )


def _describe_site(layer: Layer, output: Tensor, inputs: Tensor, causal: bool) -> Site:
    layout = _LAYOUT_BY_RANK[output.dim()]
    if layout is Layout.TOKENS and _is_channel_first(layer.module):
        layout = Layout.SEQUENCE
    shape = tuple(output.shape)
    input_shape = tuple(inputs.shape[1:]) if inputs.is_floating_point() else ()
    if layout in (Layout.SEQUENCE, Layout.IMAGE):
        return Site(layout, shape[1], shape[2:], input_shape, layer=layer)
    return Site(layout, shape[-1], shape[1:-1], input_shape, causal and layout is Layout.TOKENS, layer=layer)


_CHANNEL_FIRST_TYPES = (nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d, nn.GroupNorm, nn.MaxPool1d, nn.AvgPool1d)


def _is_channel_first(module: nn.Module) -> bool:
    return any(isinstance(part, _CHANNEL_FIRST_TYPES) for part in module.modules())


_NOISE = 0.02
"""Standard deviation of what is added to parameters, lest one be zero before it is tried."""


@torch.no_grad()
def find_outputs(block: nn.Module, call: LayerCall) -> tuple[str, ...]:
    """Names of the block's parameters that end its branches; none where it cannot be made the identity so.

    Parameters are tried from the last that is used to the first, and one stays zero if that changes what comes out: so
    of every branch only its last layer does, and gradients still reach it. It takes about as many calls of the block,
    in eval mode, as it has parameters. Caches are left out of them.

    Args:
        block: Any module; stays as it is.
        call: What it was called with; the first argument is what it is to return.
    """
    first = call.first_argument
    if first is None:
        return ()
    copied = copy_block(block).eval()
    call = LayerCall(*drop_caches(list_argument_names(block), *call)).with_first(first.detach().clone())
    generator = torch.Generator(first.device).manual_seed(0)
    for parameter in copied.parameters():
        noise = torch.randn(parameter.shape, generator=generator, device=parameter.device)
        parameter += _NOISE * noise.to(parameter.dtype)
    called: list[nn.Module] = []

    def note(module: nn.Module, *_: Any) -> None:
        called.append(module)

    hooks = [module.register_forward_hook(note) for module in copied.modules()]
    returned = _run(copied, call)
    for hook in hooks:
        hook.remove()
    zeroed: list[str] = []
    for name, parameter in reversed(_order_by_use(copied, called)):
        if torch.equal(returned, first):
            break
        before = parameter.clone()
        parameter.zero_()
        without = _run(copied, call)
        if torch.equal(without, returned):
            parameter.copy_(before)
        else:
            returned = without
            zeroed.append(name)
    return tuple(zeroed) if torch.equal(returned, first) else ()


def _run(block: nn.Module, call: LayerCall) -> Tensor:
    returned: Tensor = block(*call.arguments, **call.keywords)
    return returned


def _order_by_use(block: nn.Module, called: list[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """Parameters in the order in which the modules returned that they are in, or the nearest around that was called."""
    turns = {module: turn for turn, module in enumerate(called)}

    def find_turn(name: str) -> int:
        parts = name.split(".")[:-1]
        around = (block.get_submodule(".".join(parts[:length])) for length in range(len(parts), -1, -1))
        return next(turns[module] for module in around if module in turns)

    return sorted(block.named_parameters(), key=lambda named: find_turn(named[0]))
