"""Parts of a host that never change while it grows: parameters, buffers and the statistics of normalisation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from esper.errors import SlotError
from esper.growth.seed import Seed
from esper.growth.site import Site

if TYPE_CHECKING:
    from esper.growth.model import GrowingModel

WHOLE = ""
"""Name of the host itself among its modules."""


class FrozenParts:
    """Names of submodules whose parameters do not learn, and which stay in evaluation mode: no dropout, no statistics.

    Args:
        host: Some of whose submodules are to be frozen from now on.
        names: Theirs; `WHOLE` is all of it.
    """

    def __init__(self, host: nn.Module, names: Sequence[str] = ()) -> None:
        self.names = tuple(names)
        named = host.named_parameters()
        self._learned = tuple(name for name, one in named if one.requires_grad and is_frozen(name, names))
        """Names of parameters that learn again when the host is let go."""
        self._trained = frozenset(name for name, part in self._list_modules(host) if part.training)
        """Names of modules that were in training mode."""
        for part in self._find(host):
            part.requires_grad_(False)
            part.zero_grad()  # of former training, which clipping would count
        self.set_eval(host)

    def unfreeze(self, host: nn.Module, *, training: bool) -> None:
        """Let those parameters learn again that did before, of ``host`` or a copy of it.

        If it is in ``training``, so are those modules again that were before.
        """
        for name, one in host.named_parameters():  # without those that are computed from others by now
            if name in self._learned:
                one.requires_grad_(True)
        if training:
            for name, part in self._list_modules(host):  # from the outside in
                part.train(name in self._trained)

    def __call__(self, host: nn.Module, _: tuple[Any, ...]) -> None:
        """As a hook before the host's passes, but in those that are compiled: whoever still holds the host may have put
        it in training mode."""
        if not torch.compiler.is_compiling() and any(module.training for module in self._resting):
            self.set_eval(host)

    def set_eval(self, host: nn.Module) -> None:
        """Put the parts in evaluation mode."""
        for part in self._find(host):
            part.eval()
        self._resting = [module for part in self._find(host) for module in part.modules()]  # found once, not per pass

    def holds(self, key: str) -> bool:
        """Whether the host's state-dict key ``key`` is of a frozen part."""
        return is_frozen(key, self.names)

    def holds_all(self, host: nn.Module) -> bool:
        """Whether nothing of the host learns, drops out or gathers statistics."""
        learns = any(one.requires_grad for one in host.parameters())
        if learns or not self.names or WHOLE in self.names:
            return bool(self.names) and not learns
        modules = cast("Iterator[tuple[str, nn.Module]]", host.named_modules())
        leaves = [f"{name}." for name, part in modules if not any(True for _ in part.children())]
        return all(map(self.holds, [*leaves, *host.state_dict()]))

    def _list_modules(self, host: nn.Module) -> list[tuple[str, nn.Module]]:
        """The parts, and all that is in them, by name."""
        named = cast("Iterator[tuple[str, nn.Module]]", host.named_modules())
        return [(name, part) for name, part in named if is_frozen(f"{name}.", self.names)]

    def _find(self, host: nn.Module) -> Iterable[nn.Module]:
        return (host.get_submodule(name) for name in self.names)


def is_frozen(key: str, names: Iterable[str]) -> bool:
    """Whether the host's state-dict key ``key`` is of one of the submodules ``names``."""
    return any(name == WHOLE or key.startswith(f"{name}.") for name in names)


def hash_frozen(host: nn.Module, names: Sequence[str]) -> str:
    """SHA-256 of the tensors of the host's submodules ``names``; empty if there are none.

    Of the state dict, that is, without buffers that are not persistent: a class computes those anew, such as angles of
    positions, which another device rounds otherwise and a longer input extends.
    """
    if not names:
        return ""
    digest, state = hashlib.sha256(), host.state_dict()
    for name in sorted(key for key in state if is_frozen(key, names)):
        if not isinstance(state[name], Tensor):  # what a module keeps by get_extra_state
            digest.update(f"{name} {state[name]!r}".encode())
            continue
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Growth:
    """What grew in a model, apart from it; see `esper.GrowingModel.swap`."""

    seeds: Mapping[str, Seed]
    """Seeds by slot."""
    sites: Mapping[str, Site]
    """Sites of these slots."""

    @property
    def parameters(self) -> int:
        """Number of parameters of all its seeds."""
        return sum(seed.parameter_count for seed in self.seeds.values())


def swap_growth(model: GrowingModel, growth: Growth | None) -> Growth:
    """Replace a model's growth and return what it had, as `esper.GrowingModel.swap` does."""
    if not model.frozen.holds_all(model.host):
        raise SlotError(
            "the host has learned together with what grew, so neither is of use without the other: attach with "
            "freeze_host=True to swap what grows"
        )
    growth = Growth({}, {}) if growth is None else growth
    for name, seed in growth.seeds.items():
        if name in model.slots and seed.blueprint.name not in model.slots[name].blueprints:
            raise SlotError(
                f"the growth has a seed of {seed.blueprint.name!r} in slot {name!r}, which offers "
                f"{', '.join(model.slots[name].blueprints)}: attach with that on offer, too"
            )
    for name, site in growth.sites.items():
        if name not in model.slots or model.slots[name].site != site:
            here = model.slots[name].site.shape if name in model.slots else "no such slot"
            raise SlotError(f"the growth has a seed for features {site.shape} at slot {name!r}; here is {here}")
    leaving = Growth(model.seeds, {name: replace(model.slots[name].site, layer=None) for name in model.seeds})
    for slot in model.slots.values():
        slot.remove()
    for name, seed in growth.seeds.items():
        model.slots[name].plant(seed)
    return leaving
