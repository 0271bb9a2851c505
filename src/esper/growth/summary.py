"""What has grown in a model, and what growing more would cost, as tables that print."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from esper.growth.blueprints.registry import get
from esper.growth.site import Layout
from esper.growth.slot import Slot

NOTHING = "-"
"""Stands in a table where there is no figure."""


class SlotState(StrEnum):
    """What is in a slot."""

    DORMANT = "dormant"
    """Nothing; a seed may germinate."""
    DISABLED = "disabled"
    """Nothing, and nothing may germinate."""
    LIVE = "live"
    """A seed that may still be pruned."""
    FOSSILIZED = "fossilized"
    """A seed that stays for good."""


@dataclass(frozen=True)
class SlotSummary:
    """One slot and its seed."""

    slot: str
    layout: Layout
    shape: tuple[int, ...]
    """Shape of one example's features."""
    stage: SlotState
    blueprint: str | None
    """The seed's; None without one, as for ``alpha`` and ``contribution``."""
    parameters: int
    """Scalars that the seed holds; 0 without one."""
    flops: int
    """FLOPs that the seed adds to a forward pass of one example, a multiply-add counted as two."""
    alpha: float | None
    """The seed's weight."""
    contribution: float | None
    """Accuracy with the seed less accuracy without it, in [-1, 1], as `esper.Grower` last measured it; None before."""


@dataclass(frozen=True, repr=False)
class GrowthSummary:
    """All slots of a model, in the order of its forward pass; as text a table."""

    slots: tuple[SlotSummary, ...]
    host_parameters: int
    """Scalars of the host without its seeds."""

    @property
    def parameters(self) -> int:
        """Scalars of all seeds."""
        return sum(slot.parameters for slot in self.slots)

    @property
    def flops(self) -> int:
        """FLOPs of all seeds in a forward pass of one example."""
        return sum(slot.flops for slot in self.slots)

    def __repr__(self) -> str:
        titles = ("slot", "layout", "shape", "stage", "blueprint", "parameters", "FLOPs", "alpha", "contribution")
        rows = [
            (
                one.slot,
                one.layout,
                " x ".join(map(str, one.shape)),
                one.stage,
                one.blueprint or NOTHING,
                f"{one.parameters:,}",
                f"{one.flops:,}",
                NOTHING if one.alpha is None else f"{one.alpha:.2f}",
                NOTHING if one.contribution is None else f"{one.contribution:+.4f}",
            )
            for one in self.slots
        ]
        total = ("total", "", "", "", "", f"{self.parameters:,}", f"{self.flops:,}", "", "")
        table = align_columns([titles, *rows, total], numbers_from=titles.index("parameters"))
        return f"{table}\nhost: {self.host_parameters:,} parameters, seeds {_share(self.parameters, self)} of that"


@dataclass(frozen=True)
class Offer:
    """What a blueprint would cost in a slot, joined to the features by addition."""

    slot: str
    blueprint: str
    parameters: int
    """Scalars."""
    flops: int
    """FLOPs added to a forward pass of one example, a multiply-add counted as two."""


@dataclass(frozen=True, repr=False)
class Preview:
    """All that may germinate now; as text a table."""

    offers: tuple[Offer, ...]
    host_parameters: int
    """Scalars of the host without its seeds."""

    def __repr__(self) -> str:
        titles = ("slot", "blueprint", "parameters", "of the host", "FLOPs")
        rows = [
            (one.slot, one.blueprint, f"{one.parameters:,}", _share(one.parameters, self), f"{one.flops:,}")
            for one in self.offers
        ]
        return align_columns([titles, *rows], numbers_from=titles.index("parameters"))


def summarise(slots: Iterable[Slot], host_parameters: int) -> GrowthSummary:
    """What is in the slots."""
    return GrowthSummary(tuple(map(_describe_slot, slots)), host_parameters)


def preview(slots: Iterable[Slot], host_parameters: int) -> Preview:
    """What may germinate: the blueprints on offer in slots that are free and enabled."""
    offers = tuple(
        Offer(slot.name, name, get(name).parameters_at(slot.site), get(name).flops_at(slot.site))
        for slot in slots
        if slot.enabled and slot.occupant is None
        for name in slot.blueprints
    )
    return Preview(offers, host_parameters)


def _describe_slot(slot: Slot) -> SlotSummary:
    where, seed = (slot.name, slot.site.layout, slot.site.shape), slot.seed
    if seed is None:
        stage = SlotState.DORMANT if slot.enabled else SlotState.DISABLED
        return SlotSummary(*where, stage, None, 0, 0, None, None)
    return SlotSummary(
        *where,
        SlotState.FOSSILIZED if seed.fossilized else SlotState.LIVE,
        seed.blueprint.name,
        seed.parameter_count,
        seed.flops_at(slot.site),
        float(seed.alpha),
        seed.contribution,
    )


def _share(parameters: int, whole: GrowthSummary | Preview) -> str:
    return f"{parameters / whole.host_parameters:.1%}" if whole.host_parameters else NOTHING


def align_columns(rows: Sequence[Sequence[str]], numbers_from: int) -> str:
    """Columns as wide as they must be; those from ``numbers_from`` on end at the same place."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    signs = ["<" if place < numbers_from else ">" for place in range(len(widths))]
    template = "  ".join(f"{{:{sign}{width}}}" for sign, width in zip(signs, widths, strict=True))
    return "\n".join(template.format(*row).rstrip() for row in rows)
