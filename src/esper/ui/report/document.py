"""An HTML file that needs nothing else."""

from __future__ import annotations

from esper.ui.report.markup import Node, Style, element, render
from esper.ui.report.styles import CSS

_NO_REQUESTS = "default-src 'none'; style-src 'unsafe-inline'"
"""The page may load nothing, wherever it is opened."""


def document(title: str, *content: Node) -> str:
    """The whole file, with the style sheet of reports."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=_NO_REQUESTS),
        element("title", title),
        Style(CSS),
    )
    page = element("html", head, element("body", element("main", *content)), lang="en")
    return f"<!doctype html>\n{render(page)}\n"
