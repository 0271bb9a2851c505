"""Frozen parts of a host, which never change while it grows."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from esper.errors import SlotError
from esper.growth.hooks import list_named_modules

WHOLE = ""
"""Name of the host itself among its modules."""


class FrozenParts:
    """Freezes submodules of a host: no parameter requires a gradient, and they stay in evaluation mode.

    Args:
        host: Any module.
        names: Names of submodules to freeze; `WHOLE` is the host itself.
    """

    def __init__(self, host: nn.Module, names: Sequence[str] = ()) -> None:
        self.names = tuple(names)
        self._trainable = tuple(
            name for name, parameter in host.named_parameters() if parameter.requires_grad and is_frozen(name, names)
        )
        """Names of parameters that required a gradient before."""
        self._in_training_mode = frozenset(name for name, part in self._list_modules(host) if part.training)
        """Names of modules that were in training mode before."""
        self.modules: list[nn.Module] = []
        """All modules of the frozen parts."""
        # No gradients, and no dropout or new statistics.
        for part in self._list_parts(host):
            part.requires_grad_(False)
            part.zero_grad()  # otherwise gradient clipping would count gradients of former training
        self.set_eval(host)

    def unfreeze(self, host: nn.Module, *, training: bool) -> None:
        """Undo the freezing of ``host``, or of a copy of it.

        Modules that were in training mode before return to it if the host is in ``training`` mode.
        """
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
        for part in self._list_parts(host):
            part.eval()
        # Listed once, not in every pass.
        self.modules = [module for part in self._list_parts(host) for module in part.modules()]

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
        if not self.names or any(parameter.requires_grad for parameter in host.parameters()):
            return False
        if WHOLE in self.names:
            return True
        # If only parts are named, they must contain all modules without children, and the whole state.
        leaves = [f"{name}." for name, part in list_named_modules(host) if not any(True for _ in part.children())]
        return all(map(self.holds, [*leaves, *host.state_dict()]))

    def _list_modules(self, host: nn.Module) -> list[tuple[str, nn.Module]]:
        """Modules of the frozen parts, with their names."""
        return [(name, part) for name, part in list_named_modules(host) if is_frozen(f"{name}.", self.names)]

    def _list_parts(self, host: nn.Module) -> Iterable[nn.Module]:
        return (host.get_submodule(name) for name in self.names)


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

    Non-persistent buffers are not included. A class computes them itself, such as angles of positions, which another
    device may round differently and a longer input may extend.
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
