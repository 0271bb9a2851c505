"""Comparisons as tables for the terminal."""

from __future__ import annotations

from collections.abc import Callable

from rich.table import Table
from rich.text import Text

from esper.experiments.comparison import Against, Comparison, Verdict
from esper.experiments.statistics import Interval
from esper.ui.formats import EN_DASH, p_value, percent, score, signed

INTERVAL_STYLE = "dim"
_VERDICT_STYLES = {Verdict.ABOVE: "green", Verdict.BELOW: "red", Verdict.OPEN: ""}


def comparison_table(comparison: Comparison, title: str) -> Table:
    """A row per controller, best first, with the 95% interval below each figure; 80 columns are enough.

    Accuracy is on test data; added are parameters over the host's; then how far the policy's mean score is ahead, on
    what share of instances it is better, and the adjusted p-value of the difference.
    """
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 2, 0, 0),
        header_style="underline",
    )
    table.add_column("controller", no_wrap=True)
    for name in ("score", "accuracy", "added", "policy ahead", "better", "p"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in comparison.standings:
        table.add_row(
            Text(one.controller, "bold" if one.against is None else ""),
            _cell(score(one.score.estimate), _range(score, one.score)),
            _cell(percent(one.accuracy.estimate), _range(percent, one.accuracy)),
            _cell(f"+{percent(one.growth.estimate)}", _range(percent, one.growth)),
            *_against(one.against),
        )
    return table


def _against(against: Against | None) -> tuple[Text, Text, Text]:
    if against is None:
        return Text(), Text(), Text()
    difference, improvement = against.difference, against.improvement
    return (
        _cell(signed(difference.estimate), _range(signed, difference), _VERDICT_STYLES[against.verdict]),
        _cell(percent(improvement.estimate), _range(percent, improvement)),
        Text(p_value(against.p)),
    )


def _cell(estimate: str, interval: str, style: str = "") -> Text:
    return Text.assemble((estimate, style), "\n", (interval, INTERVAL_STYLE))


def _range(formatted: Callable[[float], str], found: Interval) -> str:
    return f"{formatted(found.low)}{EN_DASH}{formatted(found.high)}"
