"""Figures and tables of a model that grew name what its growth was about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from esper.telemetry.metric import LOSS, Metric, contributions
from esper.ui.figures.record import Exhibit, Figure, Table


def named(exhibit: Exhibit, metadata: Mapping[str, Any]) -> Exhibit:
    """With the run's own words in its captions and headings, and no figure twice."""
    what, rows = exhibit
    about = Metric.of(metadata)
    direction = f" ({about.direction})" if about.direction else ""
    words = {
        "metric": about.metric,
        "measured": LOSS if about.is_loss else f"{about.metric}{direction} and {LOSS}",
        "contributions": contributions(metadata),
    }
    caption = what.caption.format_map(words)
    if isinstance(what, Figure):
        return replace(what, caption=caption), rows
    return _table(replace(what, caption=caption), words, about), rows


def _table(what: Table, words: Mapping[str, str], about: Metric) -> Table:
    columns = [
        replace(one, heading=one.heading.format_map(words))
        for one in what.columns
        if not (one.name == "metric" and about.is_loss)
    ]
    return replace(what, columns=tuple(columns))
