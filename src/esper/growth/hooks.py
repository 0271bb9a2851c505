"""Hooks of a growing host: its input, counts of passes, frozen parts; tensors in what a module returns."""

import hashlib
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from esper.errors import ExportError, SlotError, did_you_mean
from esper.growth.inputs import find_mask_or_cache


class GrowthHook(nn.Module):
    """A forward hook by which a host grows; copies of a part of the host do not have it."""


def find_hook_tables(module: nn.Module) -> list[MutableMapping[int, Any]]:
    """The tables of the module's forward hooks and forward pre-hooks; empty if it takes no hooks."""
    if isinstance(module, torch.jit.ScriptModule):
        return []

    def do_nothing(*_: object) -> None: ...

    # Torch gives public access to the tables only by handles of hooks in them.
    handles = [module.register_forward_hook(do_nothing), module.register_forward_pre_hook(do_nothing)]
    tables: list[Any] = [handle.hooks_dict_ref() for handle in handles]
    for handle in handles:
        handle.remove()
    return tables


def list_named_modules(module: nn.Module, *, remove_duplicate: bool = True) -> list[tuple[str, nn.Module]]:
    """`torch.nn.Module.named_modules`, which has no type hints, as a list."""
    return list(cast("Iterator[tuple[str, nn.Module]]", module.named_modules(remove_duplicate=remove_duplicate)))


def find_submodule(host: nn.Module, name: str) -> nn.Module:
    """The submodule ``name`` of a host, which may have several names; a SlotError if there is none."""
    modules = dict(list_named_modules(host, remove_duplicate=False))
    if name not in modules:
        hint = did_you_mean(name, modules) or "; print(model) shows the names"
        raise SlotError(f"the host has no submodule {name!r}{hint}")
    return modules[name]


def list_hooks(module: nn.Module) -> list[Any]:
    """The module's forward hooks and forward pre-hooks."""
    return [hook for table in find_hook_tables(module) for hook in table.values()]


GROWING_ADVICE = (
    "a growing model cannot be exported or traced, since its slots may change: export what model.finalize() returns"
)


def require_untraced() -> None:
    """Reject exporting or tracing a growing model."""
    if torch.compiler.is_exporting() or torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        raise ExportError(GROWING_ADVICE)


def require_unsharded(model: nn.Module) -> None:
    """Reject a model of whose parameters this process holds a part."""
    # Both modules are slow to import, and loaded wherever there is such a model.
    fsdp, tensor = sys.modules.get("torch.distributed.fsdp"), sys.modules.get("torch.distributed.tensor")
    wrapped = fsdp is not None and any(isinstance(part, fsdp.FSDPModule) for part in model.modules())
    if wrapped or (tensor is not None and any(isinstance(part, tensor.DTensor) for part in model.parameters())):
        raise SlotError(
            "this process holds only a part of the model's parameters (FSDP2, tensor parallelism), and growth needs "
            "whole ones: use DistributedDataParallel while the model grows, or shard what model.finalize() returns"
        )


def find_features(output: Any) -> Any:
    """The features in a submodule's output: the whole output, or the first element of a plain tuple."""
    return cast("tuple[Any, ...]", output)[0] if holds_features(output) else output


def replace_features(output: Any, features: Tensor) -> Any:
    """A submodule's output with its features replaced."""
    return (features, *output[1:]) if holds_features(output) else features


def holds_features(output: Any) -> bool:
    """Whether the features are the first element of a plain tuple, as for recurrent layers, not the output itself."""
    return type(output) is tuple and isinstance(next(iter(cast("tuple[Any, ...]", output)), None), Tensor)


class InputHook(nn.Module):
    """Forward pre-hook of the host that keeps the network's input until the next pass, for seeds that need it.

    The input has the index or keyword ``place`` among the host's arguments, or is the first tensor among them if there
    is none. ``names`` are those of the positional arguments. Copies of the model do not have the input.
    """

    def __init__(self, place: int | str, names: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.place = place
        self.names = names
        self.mask_or_cache = ""
        """Name of a mask or cache among the arguments of the last forward pass; empty if there was none."""
        self.inputs: Tensor | None = None
        """The input of the last forward pass; None before any."""
        self.before_pass: list[Callable[[Tensor], None]] = []
        """Called before each forward pass with the network's input."""
        self.after_pass: list[Callable[[Sequence[Tensor]], None]] = []
        """Called after it with its outputs that have a gradient, none if they are unknown; only with gradients."""

    def forward(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        require_untraced()
        # Find the input as in the example input, or as the first tensor.
        places: dict[int | str, Any] = {**dict(enumerate(arguments)), **keywords}
        tensors = {place: argument for place, argument in places.items() if isinstance(argument, Tensor)}
        inputs = tensors.get(self.place, next(iter(tensors.values()))) if tensors else None
        batch = 0 if inputs is None or inputs.dim() == 0 else len(inputs)
        self.mask_or_cache = find_mask_or_cache(self.names, arguments, keywords, batch)
        if inputs is not None:
            self.inputs = inputs
            for count in self.before_pass:
                count(inputs)

    def count_outputs(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        """Forward hook of the host that calls `after_pass`, if a backward pass may follow."""
        if not (self.after_pass and torch.is_grad_enabled()):
            return
        tensors = list(find_tensors(output))
        # A leaf, such as a returned parameter, outlives the pass.
        outputs = [tensor for tensor in tensors if tensor.grad_fn is not None]
        for count in self.after_pass if outputs or not tensors else ():
            count(outputs)

    def __getstate__(self) -> dict[str, Any]:
        # An input in an autograd graph can be neither copied nor pickled, and files should not contain data.
        return {**self.__dict__, "inputs": None, "mask_or_cache": "", "before_pass": [], "after_pass": []}


class SourceHook(GrowthHook):
    """Forward pre-hook of a layer that computes hidden units; keeps its input until the last layer has been called."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: Tensor | None = None

    def forward(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self.inputs = next(iter((*arguments, *keywords.values())), None)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "inputs": None}


def find_tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a network's output, in order, within mappings, lists, tuples and dataclasses."""
    if isinstance(value, Tensor):
        yield value
        return
    parts: Sequence[Any] = ()
    if isinstance(value, Mapping):
        parts = list(cast("Mapping[Any, Any]", value).values())
    elif isinstance(value, tuple | list):
        parts = cast("Sequence[Any]", value)
    elif is_dataclass(value):
        parts = [getattr(value, field.name) for field in fields(value)]
    for part in parts:
        yield from find_tensors(part)


def find_output_tensor(returned: Any) -> Tensor | None:
    """The first tensor with axes in the output of a network; None if there is none."""
    return next((part for part in find_tensors(returned) if part.dim() > 0), None)


def is_close(values: Tensor, expected: Tensor, tolerance: float = 1e-5) -> bool:
    """Whether two results are equal up to rounding, relative to the largest value; infinite values must be the same."""
    if (values.shape, values.dtype) != (expected.shape, expected.dtype):
        return False
    if expected.is_complex():
        values, expected = torch.view_as_real(values.resolve_conj()), torch.view_as_real(expected.resolve_conj())
    if not expected.is_floating_point():
        return torch.equal(values, expected)
    largest = expected[expected.isfinite()].abs().amax() if expected.isfinite().any() else 0.0
    bound = max(tolerance, 4 * torch.finfo(expected.dtype).eps) * float(largest)
    return torch.allclose(values, expected, rtol=0, atol=bound, equal_nan=True)


def find_attached(model: nn.Module) -> str | None:
    """The name of a submodule with a slot after it; None if there is none."""
    for name, part in list_named_modules(model):
        if any(isinstance(hook, GrowthHook) and not isinstance(hook, SourceHook) for hook in list_hooks(part)):
            return name
    return None


WHOLE = ""
"""Name of the host itself among its modules."""


class FrozenParts:
    """Freezes submodules of a host, by name: no parameter requires a gradient, and they stay in evaluation mode."""

    def __init__(self, host: nn.Module, names: Sequence[str] = ()) -> None:
        self.names = tuple(names)
        # What `unfreeze` restores.
        self._trainable = tuple(
            name for name, parameter in host.named_parameters() if parameter.requires_grad and self.holds(name)
        )
        self._in_training_mode = frozenset(name for name, part in self._list_modules(host) if part.training)
        # No gradients, and no dropout or new statistics.
        for name in names:
            part = host.get_submodule(name).requires_grad_(False)
            part.zero_grad()  # otherwise gradient clipping would count gradients of former training
        self.modules: list[nn.Module] = []
        """All modules of the frozen parts."""
        self.set_eval(host)

    def unfreeze(self, host: nn.Module, *, training: bool) -> None:
        """Undo the freezing of ``host``, or of a copy of it; with ``training``, also restore the modes of before."""
        for name, parameter in host.named_parameters():  # parametrized weights are no longer listed
            if name in self._trainable:
                parameter.requires_grad_(True)
        if training:
            for name, part in self._list_modules(host):  # from the outside in
                part.train(name in self._in_training_mode)

    def __call__(self, host: nn.Module, _: tuple[Any, ...]) -> None:
        """Forward pre-hook of the host: restore evaluation mode if the host itself was put in training mode."""
        if any(module.training for module in self.modules):
            self.set_eval(host)

    def set_eval(self, host: nn.Module) -> None:
        """Put the frozen parts in evaluation mode."""
        require_no_checkpointing(host, self.names)
        # Listed once, not in every pass.
        self.modules = [module for name in self.names for module in host.get_submodule(name).eval().modules()]

    @contextmanager
    def suspended(self) -> Generator[None]:
        """Context manager in which frozen parts may be in training mode; their parameters still do not learn."""
        modules, self.modules = self.modules, []
        try:
            yield
        finally:
            self.modules = modules

    def holds(self, key: str) -> bool:
        """Whether ``key`` of the host's state dict belongs to a frozen part."""
        return is_frozen(key, self.names)

    def holds_all(self, host: nn.Module) -> bool:
        """Whether no part of the host learns, applies dropout or updates statistics."""
        # If only parts are named, they must contain all modules without children, and the whole state.
        leaves = [f"{name}." for name, part in list_named_modules(host) if not any(True for _ in part.children())]
        learns = any(parameter.requires_grad for parameter in host.parameters())
        return not learns and all(map(self.holds, [*leaves, *host.state_dict()]))

    def _list_modules(self, host: nn.Module) -> list[tuple[str, nn.Module]]:
        return [(name, part) for name, part in list_named_modules(host) if self.holds(f"{name}.")]


def require_no_checkpointing(host: nn.Module, names: Sequence[str]) -> None:
    """Reject gradient checkpointing in frozen submodules, where Hugging Face's blocks do not checkpoint."""
    for name, module in list_named_modules(host):
        if is_frozen(f"{name}.", names) and vars(module).get("gradient_checkpointing") is True:
            raise SlotError(
                f"gradient checkpointing is enabled in the frozen {type(module).__name__} {name!r}, which stays in "
                "evaluation mode and does not checkpoint: call gradient_checkpointing_disable(), or do not freeze it"
            )


def is_frozen(key: str, names: Iterable[str]) -> bool:
    """Whether ``key`` of the host's state dict belongs to one of the submodules ``names``."""
    return any(name == WHOLE or key.startswith(f"{name}.") for name in names)


def hash_frozen(host: nn.Module, names: Sequence[str]) -> str:
    """SHA-256 of the state of the host's submodules ``names``; an empty string if there are none.

    Without non-persistent buffers, such as angles of positions, which another device may round differently.
    """
    if not names:
        return ""
    # Name, type, shape and bytes of each tensor, sorted by name.
    digest, state = hashlib.sha256(), host.state_dict()
    for name in sorted(key for key in state if is_frozen(key, names)):
        if not isinstance(state[name], Tensor):  # from a module's get_extra_state
            digest.update(f"{name} {state[name]!r}".encode())
            continue
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
