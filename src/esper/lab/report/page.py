"""A page: an HTML file that needs nothing else, made of what it says and of figures and tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from esper.files import write_atomically
from esper.lab.comparison import Comparison
from esper.lab.figures.drawing import draw_svg
from esper.lab.figures.exhibit import Exhibit, Figure, Rows
from esper.runs.run_directory import RunDirectory


@dataclass(frozen=True)
class Headline:
    """What comes first: in a word or two, in sentences, and what has to be known with it."""

    short: str
    sentences: Sequence[str] = ()
    command: str = ""
    """A command that gives the answer, if there is one."""
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Section:
    """A titled part of the page."""

    title: str
    exhibits: Sequence[Exhibit] = ()
    """Where one has no rows, a sentence says why there is nothing to show."""
    note: str = ""
    terms: Sequence[tuple[str, str]] = ()
    """Names, and what they are."""


@dataclass(frozen=True)
class Reproduction:
    """How to do it again, or what was told."""

    title: str
    settings: str
    sentence: str = ""
    commands: str = ""


@dataclass(frozen=True)
class Page:
    """Everything that a page says."""

    title: str
    heading: str
    facts: str
    headlines: Sequence[Headline] = ()
    sections: Sequence[Section] = field(default_factory=list[Section])
    reproduction: Reproduction | None = None

    def html(self) -> str:
        """The whole file."""
        return _ENVIRONMENT.get_template("page.html").render(page=self, svg=_svg)


@dataclass(frozen=True)
class Report:
    """A page, all figures and tables that belong to it, and what it judges by title."""

    html: str
    exhibits: Sequence[Exhibit]
    comparisons: Mapping[str, Comparison] = field(default_factory=dict[str, Comparison])
    verdicts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The same as JSON values."""

    def write(self, folder: Path) -> Path:
        """Write the page into the folder, and beside it the verdicts if there are any; the page's path.

        Raises:
            RunError: a file cannot be written.
        """
        if self.verdicts:
            write_atomically(RunDirectory(folder).verdicts, json.dumps(self.verdicts, indent=1))
        page = RunDirectory(folder).report
        write_atomically(page, self.html)
        return page


def _svg(what: Figure, rows: Rows) -> Markup:
    """A figure's drawing, in which everything is escaped already."""
    return Markup(draw_svg(what, rows))


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
