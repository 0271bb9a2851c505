"""Checks of a host on random examples: random numbers, state between passes, and whether vmap can handle it.

All networks of a population are computed by one template, from their parameters, buffers and inputs. So a host must
keep no state except buffers, and its random numbers must come from torch's global generators, which are seeded for each
network separately.
"""

import copy
import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from esper.errors import ConfigError, TaskError
from esper.growth.hooks import list_named_modules
from esper.numerics.modules import global_generators
from esper.numerics.random_streams import seed_globally

_EXAMPLES = 3
_NETWORKS = 2


@dataclass
class _Call:
    """One call of a module, with flattened arguments and output; None where these cannot be compared."""

    layer: str
    """A description of the module for error messages."""
    arguments: list[Any] | None
    output: list[Any] | None
    draws: bool
    """Whether the call used torch's global generators."""
    draws_elsewhere: bool
    """Whether the call used the global generator of numpy or of Python."""


def draws_in_training(host: nn.Module, example_input: Tensor) -> bool:
    """Whether ``host`` draws random numbers in training mode, as dropout does; nothing changes by it.

    Raises TaskError for a host that no population can run, with the layer at fault.
    """
    host = copy.deepcopy(host)
    buffers = dict(host.named_buffers())
    values = {name: buffer.clone() for name, buffer in buffers.items()}
    inputs = torch.randn(_EXAMPLES, *example_input.shape[1:], generator=torch.Generator().manual_seed(0))
    inputs = inputs.to(example_input, non_blocking=True)

    def run_twice(modules: Sequence[tuple[str, nn.Module]]) -> list[list[_Call]]:
        """The calls of ``modules`` in two passes from the same state."""
        passes: list[list[_Call]] = []
        for _ in range(2):
            for name, buffer in buffers.items():
                buffer.copy_(values[name])
            try:
                with torch.no_grad(), seed_globally(0, global_generators(host)):
                    passes.append(_record_calls(host, inputs, modules))
            except Exception as error:  # a user's host may raise anything
                mode = "training" if host.training else "evaluation"
                raise TaskError(
                    f"the host fails in {mode} mode on {_EXAMPLES} random examples: {type(error).__name__}: {error}"
                ) from error
            replaced = next((name for name, buffer in host.named_buffers() if buffers.get(name) is not buffer), None)
            if replaced is not None:
                raise TaskError(
                    f"the host puts another tensor in the place of its buffer {replaced!r}, which would be lost: write "
                    "into the buffer, as by copy_() or add_()"
                )
        return passes

    draws = False
    for training in (False, True):
        host.train(training)
        first, second = run_twice([("", host)])
        draws |= first[0].draws
        problem = _find_problem(first, second, training=training)
        if problem:
            # Run again with all calls recorded, to name the layer.
            first, second = run_twice(list_named_modules(host))
            raise TaskError(_find_problem(first, second, training=training) or problem)
    return draws


def _find_problem(first: Sequence[_Call], second: Sequence[_Call], *, training: bool) -> str:
    """The problem of the innermost faulty call, from the calls in two passes; an empty string if there is none."""
    for call in first:
        if call.draws_elsewhere:
            return (
                f"{call.layer} draws from a global generator of numpy or Python, so that a network would depend on how "
                "many others there are: draw by torch, and without a generator"
            )
        if call.draws and not training:
            return (
                f"{call.layer} draws random numbers in evaluation mode, so that networks have no definite score: draw "
                "in training mode only, as torch's dropout does"
            )
    # Equal calls must have equal outputs. If calls differ in number or order, compare at least the last, the host's.
    pairs = list(zip(first, second, strict=False))
    if [call.layer for call in first] != [call.layer for call in second]:
        pairs = [(first[-1], second[-1])]
    for one, other in pairs:
        if _are_close(one.arguments, other.arguments) and not _are_close(one.output, other.output):
            return (
                f"{one.layer} computes something else in a second pass from the same parameters, buffers and random "
                "state: keep what changes in buffers, and draw by torch, without a generator"
            )
    return ""


def _record_calls(host: nn.Module, inputs: Tensor, modules: Sequence[tuple[str, nn.Module]]) -> list[_Call]:
    """The calls of ``modules`` in a forward pass of the host, inner ones first."""
    calls: list[_Call] = []
    begun: list[tuple[list[Any] | None, list[Tensor], tuple[Any, ...]]] = []
    generators = global_generators(host)

    def begin_call(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        begun.append((_copy_leaves((arguments, keywords)), [each.get_state() for each in generators], _read_others()))

    def end_call(layer: str, _: nn.Module, __: Any, output: Any) -> None:
        arguments, states, others = begun.pop()
        moved = any(not torch.equal(each.get_state(), state) for each, state in zip(generators, states, strict=True))
        calls.append(_Call(layer, arguments, _copy_leaves(output), moved, _read_others() != others))

    with ExitStack() as stack:
        for name, module in modules:
            kind = type(module).__name__
            layer = f"the host's layer {name!r} ({kind})" if name else f"the host itself ({kind})"
            for handle in (
                module.register_forward_pre_hook(begin_call, with_kwargs=True),
                module.register_forward_hook(partial(end_call, layer)),
            ):
                stack.callback(handle.remove)
        host(inputs)
    return calls


def _read_others() -> tuple[Any, ...]:
    """The states of the global generators of numpy and of Python."""
    legacy: dict[str, Any] = np.random.get_state(legacy=False)  # noqa: NPY002 (hosts may use it)
    words, place = legacy["state"]["key"], legacy["state"]["pos"]
    return words.tobytes(), place, legacy["has_gauss"], random.getstate()


def _copy_leaves(value: Any) -> list[Any] | None:
    """Copies of the tensors and plain values in ``value``, with the types and keys of their containers.

    None if it has parts that cannot be compared.
    """
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return [value]
    # Only dense tensors can be compared element by element.
    if isinstance(value, Tensor):
        return None if value.is_nested or value.layout is not torch.strided else [value.clone()]
    if isinstance(value, Mapping):
        mapping = cast("Mapping[Any, Any]", value)
        shape, parts = list(mapping), list(mapping.values())
    elif isinstance(value, tuple | list):
        parts = list(cast("Sequence[Any]", value))
        shape = [len(parts)]
    elif is_dataclass(value) and not isinstance(value, type):
        shape, parts = [], [getattr(value, field.name) for field in fields(value)]
    else:
        return None
    leaves: list[Any] = [type(cast("object", value)), *shape]
    for part in map(_copy_leaves, parts):
        if part is None:
            return None
        leaves += part
    return leaves


def _are_close(leaves: Sequence[Any] | None, others: Sequence[Any] | None) -> bool:
    """Whether flattened values are equal up to rounding; True if they cannot be compared."""

    def is_close(leaf: Any, other: Any) -> bool:
        if not isinstance(leaf, Tensor) or not isinstance(other, Tensor):
            return type(leaf) is type(other) and bool(leaf == other)
        return leaf.shape == other.shape and torch.allclose(leaf.double(), other.double(), equal_nan=True)

    if leaves is None or others is None:
        return True
    return len(leaves) == len(others) and all(map(is_close, leaves, others))


def can_vmap(host: nn.Module, example_input: Tensor) -> bool:
    """Whether a vmap over networks gives the outputs, gradients and buffers of a loop, in both modes.

    It does not for operations that vmap does not support, and for Python code that depends on values.
    """
    host = copy.deepcopy(host).to("cpu", torch.float64)
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    parameters = {
        name: draw(_NETWORKS, *parameter.shape).requires_grad_() for name, parameter in host.named_parameters()
    }
    buffers = {name: torch.stack([buffer] * _NETWORKS) for name, buffer in host.named_buffers()}
    inputs = draw(_NETWORKS, _EXAMPLES, *example_input.shape[1:])

    def call(parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        return functional_call(host, (dict(parameters), dict(buffers)), (inputs,))

    def collect(outputs: Tensor, buffers: Mapping[str, Tensor]) -> list[Tensor]:
        leaves = list(parameters.values()) if outputs.requires_grad else []
        gradients = torch.autograd.grad(outputs.sum(), leaves, allow_unused=True, materialize_grads=True)
        return [outputs.detach(), *gradients, *buffers.values()]

    for training in (False, True):
        host.train(training)
        apart, together = ({name: buffer.clone() for name, buffer in buffers.items()} for _ in range(2))
        one_by_one: list[Tensor] = []
        for network, x in enumerate(inputs):
            rows = [{name: stacked[network] for name, stacked in part.items()} for part in (parameters, apart)]
            one_by_one.append(call(rows[0], rows[1], x))
        expected = collect(torch.stack(one_by_one), apart)
        try:
            with sdpa_kernel(SDPBackend.MATH):  # as populations compute it
                computed = collect(vmap(call)(parameters, together, inputs), together)
        except Exception:  # noqa: BLE001 - whatever it is, a loop does without vmap
            return False
        if not _are_close(expected, computed):
            return False
    return True


def require_splittable_minibatches(host: nn.Module, example_input: Tensor, *, draws: bool) -> None:
    """Raise ConfigError if splitting a minibatch into parts changes outputs or buffers of ``host`` in training.

    It does with batch normalisation, with buffers that change in every pass, and if the host draws random numbers
    (``draws``).
    """
    if draws:
        raise ConfigError(
            "examples_per_pass: the hosts draw random numbers in training, which would be others in parts of a "
            "minibatch: set it to null; networks_per_pass saves memory, too"
        )
    host = copy.deepcopy(host).to("cpu", torch.float64).train()
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    parameters = {name: draw(*parameter.shape) for name, parameter in host.named_parameters()}
    inputs = draw(2 * _EXAMPLES, *example_input.shape[1:])

    def run(parts: Sequence[Tensor]) -> list[Tensor]:
        buffers = {name: buffer.clone() for name, buffer in host.named_buffers()}
        outputs = [functional_call(host, ({**parameters}, buffers), (part,)) for part in parts]
        return [torch.cat(outputs), *buffers.values()]

    with torch.no_grad():
        if not _are_close(run([inputs]), run(torch.split(inputs, _EXAMPLES))):
            raise ConfigError(
                "examples_per_pass: what the hosts compute depends on all examples of a minibatch, as by batch "
                "normalisation, or changes with every pass: set it to null; networks_per_pass saves memory, too"
            )


def require_bf16(host: nn.Module, example_input: Tensor) -> None:
    """Raise ConfigError unless ``host`` can run forward and backward under autocast in bfloat16 on its device."""
    device = example_input.device
    reason = "torch has no autocast for it"
    supported = torch.amp.is_autocast_available(device.type)
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        supported, reason = False, "it does not compute in bfloat16"
    if supported:
        host = copy.deepcopy(host).train()
        try:
            with seed_globally(0, global_generators(host)), torch.autocast(device.type, torch.bfloat16):
                outputs = host(example_input)
            torch.autograd.grad(outputs.float().sum(), list(host.parameters()), allow_unused=True)
        except RuntimeError as error:
            supported, reason = False, f"the host fails there in bfloat16: {error}"
    if not supported:
        raise ConfigError(f"bf16 does not go with device {str(device)!r}: {reason}; set it to false")
