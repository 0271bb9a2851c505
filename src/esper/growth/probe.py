"""Find the sites of a host: layout and size of the features of each named submodule, from one forward pass."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from esper.errors import SlotError
from esper.growth import hooks
from esper.growth.blueprints.blocks import find_branch_outputs
from esper.growth.blueprints.registry import LayerCall
from esper.growth.blueprints.units import find_hidden, is_unaltered
from esper.growth.inputs import (
    FEWEST_EXAMPLES,
    NESTED_ADVICE,
    Arguments,
    call_host,
    describe_failure,
    find_mask_or_cache,
    first_tensor,
    list_argument_names,
    map_arguments,
)
from esper.growth.site import CHANNELS_LAST, Layer, Layout, Site
from esper.numerics.flops import count_flops
from esper.numerics.modules import keep_modes

_LAYOUT_BY_RANK = {2: Layout.FEATURES, 3: Layout.TOKENS, 4: Layout.IMAGE}
_PLAIN_LAYERS = (nn.Linear.forward, nn.Conv1d.forward, nn.Conv2d.forward)
_CHANNEL_FIRST_TYPES = (nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d, nn.GroupNorm, nn.MaxPool1d, nn.AvgPool1d)


class ProbeResult(NamedTuple):
    """Results of a probe forward pass."""

    sites: dict[str, Site]
    """Sites by submodule, in the order of the calls."""
    output_shape: tuple[int, ...]
    """Shape of the host's output; empty if it returns no tensor."""
    flops: int
    """FLOPs of the host's forward pass for one example, of all operations that could be counted."""
    uncounted: str
    """Operations of the host that could not be counted, and where; empty if there are none."""
    mask_or_cache: str
    """Name of a mask, lengths or a cache among the arguments of the host's modules; empty if there is none."""


def probe(
    host: nn.Module,
    names: Sequence[str],
    example_input: Arguments,
    *,
    causal: bool | None = None,
    with_branch_outputs: Collection[str] = (),
    chains: Collection[tuple[str, ...]] = (),
    frozen: Collection[str] = (),
) -> ProbeResult:
    """Run the host on ``example_input`` and describe the output of every submodule in ``names``.

    If a submodule returns a tuple, as recurrent layers do, its first element is described. An output of rank 3 is
    treated as tokens ``[B, T, D]``, or as a sequence ``[B, C, L]`` if a convolution or a normalisation over channels
    computed it.

    Args:
        host: Any module.
        names: Names of submodules, each once.
        example_input: A batch of arguments of the host.
        causal: Whether no token may depend on later ones; None: found out by changing the last of two or more tokens.
        with_branch_outputs: Names of the submodules for which to find the `Layer.branch_outputs`, too.
        chains: Names of modules between which hidden units may grow, to find the `Site.hidden` of the last one, too.
        frozen: Names of the submodules that will stay in evaluation mode; ``""`` is the host itself.
    """
    modules = _resolve_modules(host, names)
    inputs = first_tensor(example_input)
    if inputs.dim() < 1 or len(inputs) < FEWEST_EXAMPLES:
        raise SlotError(
            f"the example input has shape {tuple(inputs.shape)}: give a batch of {FEWEST_EXAMPLES} examples or more, "
            "batch first, so that the batch axis can be identified"
        )
    # Run the host in evaluation mode, and record the calls of the submodules and the first mask of any module.
    recorded: dict[str, list[tuple[LayerCall, Any, bool]]] = {}
    """Arguments, what was returned, and whether no hook changed that."""
    padded = (part for part in host.modules() if isinstance(part, nn.Embedding) and part.padding_idx is not None)
    mask_or_cache = "padding_idx" if any(padded) else ""

    def record(
        name: str, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], returned: Any
    ) -> None:
        call = LayerCall(arguments, keywords)
        unaltered = type(module).forward not in _PLAIN_LAYERS or is_unaltered(module, call, returned)
        recorded.setdefault(name, []).append((call, returned, unaltered))

    def record_mask(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        nonlocal mask_or_cache
        if not mask_or_cache and not torch.compiler.is_compiling():  # within a submodule that the user compiled
            mask_or_cache = find_mask_or_cache(list_argument_names(module), arguments, keywords, len(inputs))

    handles = [
        part.register_forward_pre_hook(record_mask, with_kwargs=True)
        for part in host.modules()
        if not isinstance(part, torch.jit.ScriptModule)  # which takes no hooks
    ]
    handles += [part.register_forward_hook(partial(record, name), with_kwargs=True) for name, part in modules.items()]
    with keep_modes(host), torch.no_grad():
        host.eval()
        try:
            returned = hooks.find_output_tensor(call_host(host, example_input))
        except Exception as error:  # whatever a host raises
            raise SlotError(describe_failure(host, example_input, error)) from error
        finally:
            for handle in handles:
                handle.remove()
        # Count FLOPs and detect causality, which run the host again.
        counted = count_flops(host, lambda: call_host(host, example_input), modules, frozen=frozen)
        if causal is None:

            def call_with(tensor: Tensor) -> Any:
                return call_host(host, map_arguments(example_input, lambda value: tensor if value is inputs else value))

            causal = is_causal(call_with, inputs)
    # Describe the layers and their features.
    hidden = {chain[-1]: find_hidden(host, chain, lambda: call_host(host, example_input)) for chain in chains}
    for name in names:
        returns = [output for _, output, _ in recorded.get(name, [])]
        outputs = [hooks.find_features(output) for output in returns]
        problem = _find_problem(name, outputs, len(inputs))
        if not problem and hooks.holds_features(returns[0]) and not _reads_features(host, example_input, modules[name]):
            problem = (
                f"submodule {name!r} returns a tuple, and the model's output does not depend on its first element, "
                "where a slot would be (of a recurrent layer, the outputs at all positions)"
            )
        if problem:
            advice = (
                "name a submodule around it or within it, or add an identity to the model (self.grow = nn.Identity()), "
                "pass a tensor through it in forward (x = self.grow(x)), and name 'grow'"
            )
            if inputs.dim() == 1 and outputs and isinstance(outputs[0], Tensor) and outputs[0].dim() == 1:
                advice = (
                    f"the example input has shape {tuple(inputs.shape)}: if that is one example, give a batch of "
                    f"{FEWEST_EXAMPLES} or more, [B, ...]"
                )
            raise SlotError(f"{problem}; {advice}")
    sites: dict[str, Site] = {}
    for name, ((call, output, unaltered), *_) in recorded.items():
        module, features = modules[name], cast("Tensor", hooks.find_features(output))
        # Seeds get the dtype and device of the features if a parameter has this dtype (under autocast none has), or
        # else those of the first parameter of the module or the host.
        floating = [part for owner in (module, host) for part in owner.parameters() if part.is_floating_point()]
        like = features
        if all(part.dtype != like.dtype for part in floating):
            like = next(iter(floating), like)
        shapes = [(part.shape, part.dtype) for part in (call.first_argument, output) if isinstance(part, Tensor)]
        layer = Layer(
            module=module,
            flops=counted.parts[name] // len(inputs),
            # A copy of a block can follow it if its output can be its input.
            keeps_shape=len(shapes) == 2 and shapes[0] == shapes[1],
            like=torch.zeros((), device=like.device, dtype=like.dtype if like.is_floating_point() else None),
            trainable=frozenset(path for path, values in module.named_parameters() if values.requires_grad),
            unaltered=unaltered,
            in_tuple=hooks.holds_features(output),
        )
        if name in with_branch_outputs and layer.keeps_shape and not layer.quantised:
            layer = replace(layer, branch_outputs=find_branch_outputs(module, call))
        layout, shape = _LAYOUT_BY_RANK[features.dim()], tuple(features.shape)
        if layout is Layout.TOKENS and any(isinstance(part, _CHANNEL_FIRST_TYPES) for part in module.modules()):
            layout = Layout.SEQUENCE
        # Axis 1 has the channels of sequences and images, the last axis those of features and tokens.
        last = layout in CHANNELS_LAST
        width, extent = (shape[-1], shape[1:-1]) if last else (shape[1], shape[2:])
        # Blueprints cannot use indices as an input.
        input_shape = tuple(inputs.shape[1:]) if inputs.is_floating_point() else ()
        is_causal_site = causal and layout is Layout.TOKENS
        sites[name] = Site(layout, width, extent, input_shape, is_causal_site, layer, hidden.get(name))
    output_shape = () if returned is None else tuple(returned.shape)
    return ProbeResult(sites, output_shape, counted.total // len(inputs), counted.uncounted, mask_or_cache)


def _resolve_modules(host: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """Submodules of ``host`` by name, each module once, and only those that take hooks."""
    resolved: dict[str, nn.Module] = {}
    for name in names:
        if not name:
            raise SlotError(
                "a slot needs the name of a submodule, not ''; to put a slot behind the host, wrap it in a module"
            )
        module = hooks.find_submodule(host, name)
        if isinstance(module, torch.jit.ScriptModule):
            raise SlotError(
                f"submodule {name!r} is scripted or traced (torch.jit), which takes no slot: replace it by "
                "the module that it was made of, or name one around it"
            )
        same = next((other for other, taken in resolved.items() if taken is module), None)
        if same is not None:
            raise SlotError(f"{name!r} and {same!r} are the same module; name it once")
        resolved[name] = module
    return resolved


def _find_problem(name: str, outputs: Sequence[Any], batch: int) -> str:
    """Why there can be no slot after the submodule ``name``; empty if its ``outputs`` are the features of one call."""
    if not outputs:
        return (
            f"submodule {name!r} was never called in the probe forward, which is in eval mode: its parent may not use "
            "it, use its weights alone or call its .forward()"
        )
    if len(outputs) > 1:
        return (
            f"submodule {name!r} runs {len(outputs)} times in one forward pass; a slot needs a module that runs once: "
            "if a part of the model is applied to several inputs, attach to that part alone, and call it in your loop"
        )
    output, returns = outputs[0], f"submodule {name!r} returns"
    if not isinstance(output, Tensor):
        kind = f"a {type(output).__name__}"
        packed = isinstance(output, PackedSequence)
        if type(output) is tuple and output and isinstance(output[0], PackedSequence):
            kind, packed = "a tuple that begins with a PackedSequence", True
        unpack = ": use the padded tensor that pad_packed_sequence returns" if packed else ""
        return f"{returns} {kind}; a slot needs a tensor, or a tuple that begins with one{unpack}"
    if output.is_nested:
        return f"{returns} nested tensors: {NESTED_ADVICE}"
    if not output.is_floating_point():
        return f"{returns} {output.dtype} values; a slot needs floating-point features"
    if output.dim() not in _LAYOUT_BY_RANK:
        return (
            f"{returns} shape {tuple(output.shape)}; a slot needs features [B, D], tokens [B, T, D], sequences "
            "[B, C, L] or images [B, C, H, W]"
        )
    if len(output) != batch:
        return (
            f"{returns} shape {tuple(output.shape)} for a batch of {batch}; a slot needs the batch as first axis, "
            "which keeps the examples apart: set batch_first=True where torch offers it, and name no part that gets "
            "another number of rows, such as an expert or a stack of two inputs"
        )
    return ""


def _reads_features(host: nn.Module, example_input: Arguments, module: nn.Module) -> bool:
    """Whether the host's output depends on the first element of the tuple that ``module`` returns."""

    def spoil_features(_: nn.Module, __: Any, output: Any) -> Any:
        return hooks.replace_features(output, torch.full_like(hooks.find_features(output), torch.nan))

    # NaN spreads to everything that is computed from it, even where weights are still zero.
    handle = module.register_forward_hook(spoil_features)
    try:
        with keep_modes(host), torch.no_grad():
            host.eval()
            tensors = [part for part in hooks.find_tensors(call_host(host, example_input)) if part.is_floating_point()]
    except (RuntimeError, ValueError, ArithmeticError):  # a host that checks for NaN
        return True
    finally:
        handle.remove()
    return not tensors or any(part.is_meta or bool(part.isnan().any()) for part in tensors)


def is_causal(network: Callable[[Tensor], Any], inputs: Tensor) -> bool:
    """Whether the outputs at all earlier positions stay equal when the last position of ``inputs [B, T, ...]`` changes.

    False if the output does not have the same T positions along axis 1, or if T is 1. Also True for a network that
    mixes no positions, and for one whose outputs do not change at all, as both may be language models.
    """
    if inputs.dim() < 2 or inputs.shape[1] < 2:
        return False
    before = hooks.find_output_tensor(network(inputs))
    if before is None or before.dim() != 3 or before.shape[1] != inputs.shape[1]:
        return False
    last, changed = inputs[:, -1], inputs.clone()
    if inputs.is_floating_point():
        changed[:, -1] = torch.randn(last.shape, generator=torch.Generator().manual_seed(0)).to(inputs)
    else:  # an index that occurs elsewhere, if any: others may be invalid
        candidates = inputs[inputs != last.unsqueeze(1)]
        changed[:, -1] = candidates[0] if len(candidates) else (last == 0).to(inputs.dtype)
    after = hooks.find_output_tensor(network(changed))
    assert after is not None
    return torch.allclose(before[:, :-1], after[:, :-1])
