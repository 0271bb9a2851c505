"""Frozen parts of a host, which never change while it grows, and swapping growths on a frozen host."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from esper.errors import SlotError
from esper.growth.seed import Seed
from esper.growth.site import Site
from esper.growth.taps import list_named_modules

if TYPE_CHECKING:
    from esper.growth.model import GrowingModel

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
        if not torch.compiler.is_compiling() and any(module.training for module in self.modules):
            self.set_eval(host)

    def set_eval(self, host: nn.Module) -> None:
        """Put the frozen parts in evaluation mode."""
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


@dataclass(frozen=True)
class Growth:
    """Seeds removed from a model; see `esper.GrowingModel.swap`."""

    seeds: Mapping[str, Seed]
    """Seeds by slot."""
    sites: Mapping[str, Site]
    """Sites of the slots."""
    host_sha256: str = ""
    """`hash_frozen` of the host in which the seeds grew."""

    @property
    def parameters(self) -> int:
        """Number of parameters of all seeds."""
        return sum(seed.parameter_count for seed in self.seeds.values())


def swap_growth(model: GrowingModel, growth: Growth | None) -> Growth:
    """Replace a model's growth and return the former one; see `esper.GrowingModel.swap`."""
    if not model.frozen.holds_all(model.host):
        raise SlotError(
            "the host trains together with its seeds, so they cannot be swapped: attach with freeze_host=True"
        )
    growth = Growth({}, {}) if growth is None else growth
    # Reject what does not fit before anything is removed.
    host_sha256 = hash_frozen(model.host, [WHOLE])
    if growth.seeds and growth.host_sha256 != host_sha256:
        raise SlotError(
            "this growth belongs to a frozen host with different values: load the values that the host had when the "
            "growth was swapped out"
        )
    for name, seed in growth.seeds.items():
        if name in model.slots and seed.blueprint.name not in model.slots[name].blueprints:
            raise SlotError(
                f"the growth has a seed of {seed.blueprint.name!r} in slot {name!r}, which offers "
                f"{', '.join(model.slots[name].blueprints)}: attach with that blueprint, too"
            )
    for name, site in growth.sites.items():
        if name not in model.slots or model.slots[name].site != site:
            here = model.slots[name].site.shape if name in model.slots else "no such slot"
            raise SlotError(f"the growth has a seed for features {site.shape} at slot {name!r}; here is {here}")
    # The former growth is kept without the host: its sites have no layers.
    sites = {name: replace(model.slots[name].site, layer=None) for name in model.seeds}
    leaving = Growth(model.seeds, sites, host_sha256)
    # The model gets copies, because several models may get the same growth, and all of them train it.
    replace_seeds(model, {name: copy.deepcopy(seed) for name, seed in growth.seeds.items()})
    return leaving


def replace_seeds(model: GrowingModel, seeds: Mapping[str, Seed]) -> None:
    """Replace all seeds of a model with ``seeds``, by slot. A seed that stays in its slot is not touched.

    Raises:
        SlotError: growth is switched off, or a seed cannot be planted; the model then keeps its former seeds.
    """
    slots = model.slots.values()
    for slot in slots:
        slot.require_not_disabled()
    former, optimizer = model.seeds, model.ownership.optimizer
    moments = {} if optimizer is None else dict(optimizer.state)

    def plant_all(seeds: Mapping[str, Seed]) -> None:
        changed = [slot for slot in slots if slot.seed is not seeds.get(slot.name)]
        for slot in changed:
            slot.remove()
        for slot in changed:
            if slot.name in seeds:
                slot.plant(seeds[slot.name])

    with model.tap.gate.switching():
        try:
            plant_all(seeds)
        except SlotError:
            plant_all(former)
            if optimizer is not None:
                # Removed parameters have lost their moments.
                parameters = [parameter for seed in former.values() for parameter in seed.parameters()]
                optimizer.state.update({key: moments[key] for key in parameters if key in moments})
            raise
