"""What an adaptation tried, what it kept, and what that cost, as one page of text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from esper.adaptation.trainer import Figures, Retention, Structure
from esper.growth.summary import NOTHING, align_columns

SHOWN = 12
"""Structures on the page, the best first."""


@dataclass(frozen=True)
class Trial:
    """A structure that was grown on a part of the new data, and measured on the rest, each part in turn."""

    structure: Structure
    found: Figures
    """On the parts that it had not learned from, with the weight that other data allowed."""
    retention: Retention
    """Means over the parts."""
    earned: Mapping[str, float]
    """By slot: what the score loses when that seed alone is switched off; means over the parts."""
    parameters: int
    """Scalars that it adds."""

    def __str__(self) -> str:
        return describe_structure(self.structure)


@dataclass(frozen=True, repr=False)
class Adaptation:
    """What was found by `esper.adapt`; the model holds what was kept. As text a page."""

    trials: tuple[Trial, ...]
    """The best first."""
    untried: int
    """Structures that the budget left out."""
    before: Figures
    """Of the host on the new data."""
    kept: Trial | None
    """What grew again on all of the new data; None where nothing did better than the host, or nothing of it stayed."""
    diverged: tuple[Trial, ...]
    """What did better still, but not when it grew on all of the new data: that training diverged."""
    retention: Retention
    """Of what grew again; where the share is 0, it was taken off."""
    source_loss: float
    """Of the host on that half of the other data which nothing learns from; not a number where there are none."""
    flops: float | None
    """Spent in all; None where torch cannot count the host's."""
    seconds: float
    """Likewise."""

    def __repr__(self) -> str:
        kept, before, share, rise = self.kept, self.before, self.retention.share, self.retention.rise
        has_source = not math.isnan(self.source_loss)
        parts: list[str] = []
        if kept is not None:
            weight = f", at {kept.retention.share:.0%} of what it learned" if has_source else ""
            diverged = f"\n{len(self.diverged)} did better, but diverged when growing on all of them."
            parts.append(
                f"Kept: {kept}, {kept.parameters:,} parameters.\n"
                f"On new data that it did not learn from{weight}:\n"
                f"score {kept.found.score:.4g}, the host's {before.score:.4g}; "
                f"loss {kept.found.loss:.4g}, the host's {before.loss:.4g}.\n"
                f"By that it was chosen among {len(self.trials)}, which flatters it: measure it on data of their own."
                + (diverged if self.diverged else "")
            )
            rows = [(slot, kept.structure[slot], f"{earned:+.4f}") for slot, earned in kept.earned.items()]
            parts.append(align_columns([("slot", "blueprint", "earned"), *rows], numbers_from=2))
        elif share == 0:
            parts.append(
                "Nothing was kept: grown on all of the new data, the best raises the loss on source too much at any "
                "weight."
            )
        elif self.diverged:
            parts.append(
                f"Nothing was kept: {len(self.diverged)} did better than the host, but diverged when growing on all of "
                "the new data;\ngive an optimizer with a lower learning rate."
            )
        else:
            parts.append(f"Nothing was kept: no structure did better than the host, whose score is {before.score:.4g}.")
        if has_source and kept is None:
            parts.append(f"Source, on batches that nothing learned from: loss {self.source_loss:.4g}.")
        elif has_source:
            parts.append(
                f"Source, on batches that nothing learned from: loss {self.source_loss:.4g} before, {rise:+.2%} now, "
                f"with {share:.0%} of what was learned\non all new data, which is kept. By them that weight was "
                "chosen, which flatters it a little;\nnothing is lost under model.without_growth()."
            )
        left = f", {self.untried} not tried for want of budget" if self.untried else ""
        flops = "" if self.flops is None else f", {self.flops / 1e9:.3g} GFLOP"
        parts.append(f"{len(self.trials)} structures tried{left}; {self.seconds:.1f} s{flops}")
        titles = ("structure", "score", "loss", "source", "share", "parameters")
        trials = [
            (
                str(trial),
                f"{trial.found.score:.4f}",
                f"{trial.found.loss:.4g}",
                f"{trial.retention.rise:+.2%}" if has_source else NOTHING,
                f"{trial.retention.share:.0%}",
                f"{trial.parameters:,}",
            )
            for trial in self.trials[:SHOWN]
        ]
        parts.append(align_columns([titles, *trials], numbers_from=1))
        return "\n\n".join(parts)


def describe_structure(structure: Structure) -> str:
    """In a line: its seeds, or how many of each kind where they are many."""
    if len(structure) <= 2:
        return " + ".join(f"{blueprint} at {slot}" for slot, blueprint in structure.items())
    kinds = list(structure.values())
    counted = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    return f"{len(structure)} seeds: {counted}"
