"""The parts that a page is made of: sections, figures with captions, legends, tables."""

from __future__ import annotations

from collections.abc import Sequence

from esper.ui.figures.record import Column, Query, Source, Table
from esper.ui.figures.rows import Rows, Value
from esper.ui.report.markup import Element, Node, element


def section(title: str, *content: Node) -> Element:
    """A titled part of the page."""
    return element("section", element("h2", title), *content)


def figure(content: Node, caption: str, *extra: Node, source: Source | None = None) -> Element:
    """A figure, what explains its marks, a caption that says what it shows, and where its numbers come from."""
    origin = [] if source is None else [_origin(source)]
    return element("figure", *extra, content, element("figcaption", caption), *origin)


def exhibited(what: Table, rows: Rows) -> Element:
    """A table with caption and source; where there are no rows, why."""
    if not rows:
        return element("p", f"{what.absent.capitalize()}.", class_="note")
    cells = [[_written(column, value) for value in rows.column(column.name)] for column in what.columns]
    body = table([column.heading for column in what.columns], list(zip(*cells, strict=True)), "numbers")
    return figure(body, what.caption, source=what.source)


def _written(column: Column, value: Value) -> Node:
    text = column.written(value)
    return element("td", text, class_="long") if column.long else text


def _origin(source: Source) -> Element:
    title = "The query behind it, for esper query" if isinstance(source, Query) else "Where its numbers come from"
    return element("details", element("summary", title), element("pre", element("code", source.text)), class_="origin")


def legend(entries: Sequence[tuple[str, str]]) -> Element:
    """Names beside samples of their marks, given by class."""
    items = [element("span", element("i", class_=kind), name, class_="entry") for name, kind in entries]
    return element("div", *items, class_="legend")


def table(head: Sequence[Node], rows: Sequence[Sequence[Node]], kind: str = "") -> Element:
    """A table that scrolls by itself where the page is too narrow; cells that are no ``td`` yet become one."""
    header = element("tr", *(element("th", title, scope="col") for title in head))
    body = [element("tr", *map(_cell, row)) for row in rows]
    whole = element("table", element("thead", header), element("tbody", *body), class_=kind)
    return element("div", whole, class_="scroll")


def upright(name: str) -> Element:
    """A column's name that takes no more room than its figures."""
    return element("span", name, class_="upright")


def _cell(content: Node) -> Node:
    is_cell = isinstance(content, Element) and content.tag in ("td", "th")
    return content if is_cell else element("td", content)
