"""HTML and SVG as a tree whose text and attributes are always escaped."""

from __future__ import annotations

import html
from dataclasses import dataclass

_VOID = frozenset({"meta", "br", "hr", "col"})


@dataclass(frozen=True, slots=True)
class Element:
    """A tag with attributes and children."""

    tag: str
    attributes: dict[str, str]
    children: tuple[Element | Style | str, ...]


@dataclass(frozen=True, slots=True)
class Style:
    """A style sheet, which HTML does not escape: only for text that is part of the program."""

    css: str


Node = Element | Style | str


def element(tag: str, *children: Node, **attributes: str | float) -> Element:
    """An element. Attributes are written with underscores: ``class_``, ``stroke_width``; numbers get short."""
    named = {name.rstrip("_").replace("_", "-"): _text(value) for name, value in attributes.items()}
    return Element(tag, named, children)


def render(node: Node) -> str:
    """The tree as text."""
    if isinstance(node, str):
        return html.escape(node)
    if isinstance(node, Style):
        return f"<style>{node.css}</style>"
    attributes = "".join(f' {name}="{html.escape(value)}"' for name, value in node.attributes.items())
    if node.tag in _VOID:
        return f"<{node.tag}{attributes}>"
    return f"<{node.tag}{attributes}>{''.join(map(render, node.children))}</{node.tag}>"


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"
