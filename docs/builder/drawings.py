"""Flow charts of Mermaid as tables: to draw them, a page would have to fetch a program from another host."""

from __future__ import annotations

import re

_CHART = re.compile(r"^```mermaid\nflowchart LR\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_BOX = re.compile(r'^ *(\w+)\["(?:\w+)<br/>([^"]*)"\]$', re.MULTILINE)
_ARROW = re.compile(r"^ *(\w+) --> (\w+)$", re.MULTILINE)


def tabulate_charts(text: str) -> str:
    """The page with a table in the place of each chart: boxes, what they say, and where their arrows lead."""
    return _CHART.sub(lambda chart: _tabulate(chart[1]), text)


def _tabulate(chart: str) -> str:
    arrows: dict[str, list[str]] = {}
    for start, end in _ARROW.findall(chart):
        arrows.setdefault(start, []).append(end)
    rows = [f"| {name} | {words} | {', '.join(arrows.get(name, []))} |" for name, words in _BOX.findall(chart)]
    return "\n".join(["| room | what is in it | an arrow leads to |", "|---|---|---|", *rows])
