"""One host with its slots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from esper.errors import SlotError
from esper.growth.finalize import finalize
from esper.growth.input_relay import input_place
from esper.growth.ownership import SLOT_KEY, Ownership
from esper.growth.probe import Arguments, probe
from esper.growth.seed import Seed
from esper.growth.signature import called_as, unmade
from esper.growth.slot import InputTap, Slot
from esper.growth.summary import Preview, Summary, previewed, summarised


class Slots(nn.Module):
    """The slots of a model by the names of the submodules that they hook, in the order of the forward pass."""

    def __init__(self, slots: Mapping[str, Slot]) -> None:
        super().__init__()
        self._keys = {name: _key(name) for name in slots}
        for name, slot in slots.items():
            self.add_module(self._keys[name], slot)

    def __getitem__(self, name: str) -> Slot:
        if name not in self._keys:
            raise SlotError(f"no slot {name!r}; this model has {', '.join(self._keys)}")
        slot = self.get_submodule(self._keys[name])
        assert isinstance(slot, Slot)
        return slot

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, name: object) -> bool:
        return name in self._keys

    def values(self) -> list[Slot]:
        """The slots."""
        return [self[name] for name in self._keys]


def _key(name: str) -> str:
    """A dot would mean nesting in state-dict keys; a slash occurs in no module's name."""
    return name.replace(".", "/")


class GrowingModel(nn.Module):
    """A host and its growth slots; called as the host is. Make it with `esper.attach`.

    ``host`` is the very module that was given, with its own state-dict keys; what grows lives under ``slots``. The
    object's class is a subclass that is named after the host's and whose ``forward`` has the host's signature. Public
    attributes and methods that only the host has are read from it, such as ``config`` or ``generate``.

    Args:
        host: Any module.
        slots: Names of the submodules to hook, with the blueprints that may germinate there; None: all that fit.
        example_input: What the host takes: a tensor, a tuple of arguments, or a dictionary of keyword arguments.
        causal: As in `esper.growth.probe.probe`.

    Raises:
        SlotError: as `esper.growth.probe.probe` and `Slot`.
    """

    def __init__(
        self,
        host: nn.Module,
        slots: Sequence[str] | Mapping[str, Sequence[str] | None],
        example_input: Arguments,
        *,
        causal: bool | None = None,
    ) -> None:
        super().__init__()
        offers = slots if isinstance(slots, Mapping) else dict.fromkeys(slots)
        probed = probe(host, list(slots), example_input, causal=causal)
        self.host = host
        self.tap = InputTap(input_place(example_input))
        self.ownership = Ownership()
        made = {name: Slot(name, site, self.tap, self.ownership, offers[name]) for name, site in probed.sites.items()}
        self._hooks = [host.register_forward_pre_hook(self.tap, with_kwargs=True)]
        for name, slot in made.items():
            self._hooks.append(host.get_submodule(name).register_forward_hook(slot))
        self.slots = Slots(made)
        self.host_parameters = sum(parameter.numel() for parameter in host.parameters())
        """Parameters before any growth."""
        self.outputs = probed.outputs
        """Channels of what the host returns: its classes, if it is a classifier; None if it returns no tensor."""
        like = next((parameter for parameter in host.parameters() if parameter.is_floating_point()), None)
        if like is not None:
            self.slots.to(device=like.device, dtype=like.dtype)
        self.__class__ = called_as(type(self), type(host))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name.startswith("_"):
                raise
            try:
                return getattr(super().__getattr__("host"), name)
            except AttributeError:
                raise error from None

    def __reduce__(self) -> tuple[Any, ...]:
        return unmade, (type(self).__bases__[0], type(self.host)), self.__dict__

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """What the host returns, with what grew in it."""
        return self.host(*arguments, **keywords)

    @property
    def seeds(self) -> dict[str, Seed]:
        """The seeds by slot, live and fossilized."""
        return {slot.name: slot.seed for slot in self.slots.values() if slot.seed is not None}

    def parameter_groups(self, **options: Any) -> list[dict[str, Any]]:
        """Parameter groups for an optimizer: the host's, and one per slot, empty where nothing has grown yet.

        Groups that are there from the start are filled and emptied as seeds come and go, so that any scheduler survives
        growth; adding groups later would not do. ``options`` (``lr``, ``weight_decay``, ...) hold for all of them.
        Parameters that do not require a gradient are left out.
        """
        learning = [parameter for parameter in self.host.parameters() if parameter.requires_grad]
        groups: list[dict[str, Any]] = [{"params": learning, **options}]
        for slot in self.slots.values():
            own = [] if slot.seed is None else list(slot.seed.parameters())
            groups.append({"params": own, SLOT_KEY: slot.name, **options})
        return groups

    def link(self, optimizer: torch.optim.Optimizer) -> None:
        """Hand the parameters of all seeds to come to ``optimizer``; `esper.Grower` does so by itself.

        Raises:
            SlotError: the optimizer was not made from `parameter_groups`.
        """
        self.ownership.link(optimizer, self.slots, self.named_parameters)

    def summary(self) -> Summary:
        """Every slot with what lives there: stage, parameters, FLOPs, weight and contribution. Print it."""
        return summarised(self.slots.values(), self.host_parameters)

    def preview(self) -> Preview:
        """What each blueprint on offer would cost in each slot that is free, in parameters and FLOPs. Print it."""
        return previewed(self.slots.values(), self.host_parameters)

    def disable(self, slot: str) -> None:
        """Let nothing germinate in ``slot`` from now on; a seed that lives there stays.

        Raises:
            SlotError: no such slot.
        """
        self.slots[slot].enabled = False

    def enable(self, slot: str) -> None:
        """Undo `disable`."""
        self.slots[slot].enabled = True

    def release(self) -> None:
        """Take the slots off the host, which then computes what it did before it was attached to."""
        for hook in self._hooks:
            hook.remove()

    def finalize(self) -> nn.Module:
        """An ordinary module that needs no Esper: a copy of the host that computes what it does with its fossils.

        Seeds that are not fossilized are dropped. The copy keeps the host's state-dict keys; a fossil's tensors appear
        beside them, as attributes ``fossil_...`` of the submodule that it follows, where a forward hook made of torch
        operations reads them. It trains on, copies, pickles, compiles and exports like any module. Fossils that read
        the network's input find it where the example input had it: in the same place, or under the same keyword.

        Raises:
            ExportError: `torch.export` cannot trace the blueprint of a fossil.
        """
        return finalize(self)
