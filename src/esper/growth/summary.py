"""Tables of the seeds in a model, of the costs of further seeds, and of the modules that were tried."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from esper.errors import plural
from esper.growth.site import Layout
from esper.growth.slot import Slot
from esper.lifecycle.table import SeedRating, format_signed

NOTHING = "-"
"""An empty cell of a table."""


class SlotState(StrEnum):
    """Free for a seed or not, or with a seed that may still be pruned or is permanent."""

    DORMANT = "dormant"
    """Free: a seed may germinate."""
    DISABLED = "disabled"
    """Free, but seeds are not allowed."""
    LIVE = "live"
    """Has a seed that may still be pruned."""
    FOSSILIZED = "fossilized"
    """Has a permanent seed."""


@dataclass(frozen=True)
class SlotSummary:
    """Figures of one slot and its seed."""

    slot: str
    layout: Layout
    shape: tuple[int, ...]
    """Shape of one example's features."""
    stage: SlotState
    blueprint: str | None = None
    """Blueprint of the seed; None without a seed, like ``alpha`` and ``contribution``."""
    parameters: int = 0
    """Number of scalars of the seed; 0 without one."""
    flops: int = 0
    """FLOPs that the seed adds to a forward pass of one example, a multiply-add counted as two."""
    alpha: float | None = None
    contribution: float | None = None
    """Score with the seed minus score without it, as last measured by a grower; None before."""


@dataclass(frozen=True)
class TriedModule:
    """A module that was planted, and its outcome. Decisions are numbered from 1."""

    slot: str
    blueprint: str
    parameters: int
    """Number of scalars."""
    planted: int
    """Decision that planted it."""
    decided: int | None = None
    """Decision that kept or pruned it, or the last decision of growth; None while it is on probation."""
    kept: bool | None = None
    """Whether it was kept permanently; None until decided."""
    by: str = ""
    """What kept or pruned it: the controller's name; ``gate`` (its output was not finite); ``governor`` (a rollback);
    ``constraint`` (one was broken); or ``finish``."""
    rating: SeedRating[float | None] | None = None
    """The measurements that decided; None if it was rolled back or not rated."""

    @property
    def outcome(self) -> str:
        """``kept``, ``pruned`` or ``on probation``."""
        return {True: "kept", False: "pruned", None: "on probation"}[self.kept]

    def __str__(self) -> str:
        """``pruned mlp in u2 at decision 9 by look: contribution +0.016, ... (planted at decision 4, ...)``."""
        when = "" if self.decided is None else f" at decision {self.decided} by {self.by}"
        figures = "" if self.rating is None else f": {self.rating}"
        planted = f"planted at decision {self.planted}, {plural(self.parameters, 'parameter')}"
        return f"{self.outcome} {self.blueprint} in {self.slot}{when}{figures} ({planted})"


@dataclass(frozen=True, repr=False)
class GrowthSummary:
    """All slots of a model, in the order of its forward pass; prints as a table."""

    slots: tuple[SlotSummary, ...]
    host_parameters: int
    """Number of scalars of the host without its seeds."""
    tried: tuple[TriedModule, ...] = ()
    """All modules that a grower has planted, in order."""
    matches: Mapping[str, int] = field(default_factory=dict[str, int])
    """Number of submodules that each pattern given to `attach` matched."""

    @property
    def parameters(self) -> int:
        """Number of scalars of all seeds."""
        return sum(slot.parameters for slot in self.slots)

    @property
    def flops(self) -> int:
        """FLOPs of all seeds in a forward pass of one example."""
        return sum(slot.flops for slot in self.slots)

    def __repr__(self) -> str:
        titles = ("slot", "layout", "shape", "stage", "blueprint", "parameters", "FLOPs", "alpha", "contribution")
        rows = [
            (
                slot.slot,
                slot.layout,
                " x ".join(map(str, slot.shape)),
                slot.stage,
                slot.blueprint or NOTHING,
                f"{slot.parameters:,}",
                f"{slot.flops:,}",
                _show(slot.alpha, ".2f"),
                _show(slot.contribution, "+.4f"),
            )
            for slot in self.slots
        ]
        total = ("total", "", "", "", "", f"{self.parameters:,}", f"{self.flops:,}", "", "")
        table = align_columns([titles, *rows, total], numbers_from=titles.index("parameters"))
        share = _format_share(self.parameters, self.host_parameters)
        text = f"{table}\nhost: {self.host_parameters:,} parameters, seeds {share} of that"
        for pattern, count in self.matches.items():
            text += f"\n{pattern!r} matched {plural(count, 'submodule')}"
        return text if not self.tried else f"{text}\n\n{count_tried(self.tried)}\n{_format_tried(self.tried)}"


@dataclass(frozen=True)
class Offer:
    """Cost of a blueprint in a slot, with the blend ADD."""

    slot: str
    blueprint: str
    parameters: int
    """Number of scalars."""
    flops: int
    """FLOPs added to a forward pass of one example, a multiply-add counted as two."""


@dataclass(frozen=True, repr=False)
class Preview:
    """All blueprints that may germinate now; prints as a table."""

    offers: tuple[Offer, ...]
    host_parameters: int
    """Number of scalars of the host without its seeds."""

    def __repr__(self) -> str:
        titles = ("slot", "blueprint", "parameters", "of the host", "FLOPs")
        rows = [
            (
                one.slot,
                one.blueprint,
                f"{one.parameters:,}",
                _format_share(one.parameters, self.host_parameters),
                f"{one.flops:,}",
            )
            for one in self.offers
        ]
        return align_columns([titles, *rows], numbers_from=titles.index("parameters"))


def summarise_slot(slot: Slot) -> SlotSummary:
    """Figures of a slot and its seed."""
    seed, place = slot.seed, (slot.name, slot.site.layout, slot.site.shape)
    if seed is None:
        return SlotSummary(*place, SlotState.DORMANT if slot.enabled else SlotState.DISABLED)
    stage = SlotState.FOSSILIZED if seed.fossilized else SlotState.LIVE
    costs = seed.parameter_count, seed.flops_at(slot.site)
    return SlotSummary(*place, stage, seed.blueprint.name, *costs, float(seed.alpha), seed.contribution)


def count_tried(tried: Sequence[TriedModule]) -> str:
    """The numbers of modules tried and kept, as text: ``2 modules tried, 0 kept``."""
    kept = sum(module.kept is True for module in tried)
    undecided = sum(module.kept is None for module in tried)
    return f"{plural(len(tried), 'module')} tried, {kept:,} kept{f', {undecided:,} on probation' if undecided else ''}"


def _format_tried(tried: Sequence[TriedModule]) -> str:
    """One row per module, in the order of planting."""
    titles = ("slot", "blueprint", "outcome", "by", "planted", "decided", "parameters")
    figures = ("contribution", "error", "rent", "minimum", "loss without it", "loss error", "loss minimum")
    rows: list[Sequence[str]] = []
    for module in tried:
        cells = (NOTHING,) * len(figures)
        if (rating := module.rating) is not None:
            cells = (
                NOTHING if rating.contribution is None else format_signed(rating.contribution),
                _show(rating.error, ".2g"),
                f"{rating.price:.3g}",
                NOTHING if rating.threshold is None else format_signed(rating.threshold),
                _show(rating.loss_gain, "+.2%"),
                _show(rating.loss_error, ".2%"),
                _show(rating.loss_threshold, ".2%"),
            )
        names = (module.slot, module.blueprint, module.outcome, module.by or NOTHING)
        rows.append((*names, str(module.planted), _show(module.decided, ""), f"{module.parameters:,}", *cells))
    return align_columns([(*titles, *figures), *rows], numbers_from=titles.index("planted"))


def _show(value: float | None, form: str) -> str:
    return NOTHING if value is None else format(value, form)


def _format_share(parameters: int, host_parameters: int) -> str:
    return f"{parameters / host_parameters:.1%}" if host_parameters else NOTHING


def align_columns(rows: Sequence[Sequence[str]], numbers_from: int) -> str:
    """Rows as text with aligned columns: columns before ``numbers_from`` to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    signs = ["<" if place < numbers_from else ">" for place in range(len(widths))]
    template = "  ".join(f"{{:{sign}{width}}}" for sign, width in zip(signs, widths, strict=True))
    return "\n".join(template.format(*row).rstrip() for row in rows)
