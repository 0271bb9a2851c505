"""Comparisons as tables for the terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from esper.experiments.comparison import Against, Comparison, Verdict
from esper.experiments.statistics import Interval
from esper.ui.formats import EN_DASH, p_value, percent, score, signed, signed_interval

INTERVAL_STYLE = "dim"
_VERDICT_STYLES = {Verdict.ABOVE: "green", Verdict.BELOW: "red", Verdict.OPEN: ""}


def comparison_table(comparison: Comparison, title: str) -> Table:
    """A row per controller, best first, with the 95% interval below each figure."""
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left", title_style="bold", padding=(0, 1))
    table.add_column("controller", no_wrap=True)
    for name in ("score", "test accuracy", "parameters", "policy minus it", "policy better", "p"):
        table.add_column(name, justify="right")
    for one in comparison.standings:
        table.add_row(
            Text(one.controller, "bold" if one.against is None else ""),
            _cell(score(one.score.estimate), f"{score(one.score.low)}{EN_DASH}{score(one.score.high)}"),
            _cell(percent(one.accuracy.estimate), _percents(one.accuracy)),
            _cell(f"+{percent(one.growth.estimate)}", _percents(one.growth)),
            *_against(one.against),
        )
    return table


def _against(against: Against | None) -> tuple[Text, Text, Text]:
    if against is None:
        return Text(), Text(), Text()
    difference, improvement = against.difference, against.improvement
    return (
        _cell(signed(difference.estimate), signed_interval(difference), _VERDICT_STYLES[against.verdict]),
        _cell(percent(improvement.estimate), _percents(improvement)),
        Text(p_value(against.p)),
    )


def _cell(estimate: str, interval: str, style: str = "") -> Text:
    return Text.assemble((estimate, style), "\n", (interval, INTERVAL_STYLE))


def _percents(found: Interval) -> str:
    return f"{percent(found.low)}{EN_DASH}{percent(found.high)}"
