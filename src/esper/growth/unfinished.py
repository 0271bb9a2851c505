"""What becomes of seeds that are neither fossilized nor pruned when a model is made plain."""

from __future__ import annotations

import math
import warnings
from enum import StrEnum
from typing import TYPE_CHECKING

from esper.errors import SlotError
from esper.growth.seed import Seed
from esper.lifecycle.rules import Isolation

if TYPE_CHECKING:
    from esper.growth.model import GrowingModel


class Unfinished(StrEnum):
    """What to do with live seeds."""

    KEEP = "keep"
    """Fold in those that count and were not measured to do harm, as they are; drop the others; warn of either."""
    DROP = "drop"
    """Drop them all. The host, which has learned together with them, may do much worse then."""
    RAISE = "raise"
    """Refuse a model that has any."""


def folded(model: GrowingModel, unfinished: Unfinished) -> list[str]:
    """The slots whose seeds are to be part of the plain model: all fossils, and what ``unfinished`` says of the others.

    Raises:
        SlotError: there are unfinished seeds, which ``unfinished`` forbids.
    """
    live = {name: seed for name, seed in model.seeds.items() if not seed.fossilized}
    keeps = unfinished is Unfinished.KEEP
    kept = [name for name, seed in live.items() if keeps and counts(seed) and not _harms(seed)]
    if live and unfinished is Unfinished.RAISE:
        told = "; ".join(_told(name, seed) for name, seed in live.items())
        raise SlotError(
            f"unfinished seeds: {told}; call finish() of their grower, fossilize or prune them, or say what becomes of "
            "them: finalize(unfinished='keep') or 'drop'"
        )
    if live and keeps:
        told = "; ".join(f"{'kept' if name in kept else 'dropped'} {_told(name, seed)}" for name, seed in live.items())
        warnings.warn(
            f"unfinished seeds: {told}; call finish() of their grower first to have them measured and judged, or say "
            "finalize(unfinished='drop') to drop them all",
            stacklevel=5,
        )
    return [name for name, seed in model.seeds.items() if seed.fossilized or name in kept]


def counts(seed: Seed) -> bool:
    """Whether the seed takes part in what the model computes."""
    return seed.isolation is Isolation.NONE and float(seed.alpha) > 0


def _harms(seed: Seed) -> bool:
    """Whether the model was measured to do better without the seed; never, if nobody measured."""
    return seed.contribution is not None and seed.contribution < 0


def _told(name: str, seed: Seed) -> str:
    known = seed.contribution is not None and not math.isnan(seed.contribution)
    contribution = f"contribution {seed.contribution:+.4f}" if known else "contribution not measured"
    return f"{seed.blueprint.name} in {name!r} (alpha {float(seed.alpha):.2f}, {contribution})"
