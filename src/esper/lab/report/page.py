"""A page: an HTML file that needs nothing else, with its texts, figures and tables."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from esper.files import lock_folder, write_atomically
from esper.lab.comparison import Comparison
from esper.lab.figures.drawing import draw_svg
from esper.lab.figures.exhibit import Exhibit, Figure, Table
from esper.runs.events import RunResumed, RunStarted
from esper.runs.reader import RunReader
from esper.runs.run_directory import RunDirectory


def list_platforms(reader: RunReader) -> str:
    """The software and the devices of a run; those of every process, if they changed while it was resumed."""
    events = [*reader.events(RunStarted), *reader.events(RunResumed)]
    described = dict.fromkeys(
        ", ".join(value if name in ("system", "devices") else f"{name} {value}" for name, value in one.platform.items())
        for one in events
    )
    return " and then ".join(described) or "software unknown"


@dataclass(frozen=True)
class Headline:
    """The first thing on a page: an answer in a word or two, its sentences, and what has to be known with it."""

    short: str
    sentences: Sequence[str] = ()
    command: str = ""
    """A command that gives the answer, if there is one."""
    notes: Sequence[str] = ()


_NARROW_COLUMNS = 7
"""Columns of a table for which half of the page is enough."""


@dataclass(frozen=True)
class Section:
    """A titled part of the page."""

    title: str
    exhibits: Sequence[Exhibit] = ()
    """In place of one without rows, a sentence says why there is nothing to show."""
    note: str = ""
    terms: Sequence[tuple[str, str]] = ()
    """Names, and what they are."""

    @property
    def anchor(self) -> str:
        """The identifier to which the table of contents links."""
        return make_anchor(self.title)

    def place_exhibits(self) -> Iterator[tuple[Exhibit, bool]]:
        """The exhibits in order, each with whether it takes the page's whole width.

        Two narrow ones in a row share the width; a figure that takes all of it is drawn for it.
        """
        for is_narrow, group in groupby(self.exhibits, _is_narrow):
            exhibits = list(group)
            for place, exhibit in enumerate(exhibits):
                is_wide = not is_narrow or (place == len(exhibits) - 1 and place % 2 == 0)
                widened = replace(exhibit, columns=2) if is_wide and isinstance(exhibit, Figure) else exhibit
                yield widened, is_wide


def make_anchor(title: str) -> str:
    """An identifier for the place with this title: ``How it learned`` as ``how-it-learned``."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _is_narrow(exhibit: Exhibit) -> bool:
    if not exhibit.rows:
        return False  # a sentence instead
    return len(exhibit.shown_columns) <= _NARROW_COLUMNS if isinstance(exhibit, Table) else exhibit.columns == 1


@dataclass(frozen=True)
class Reproduction:
    """The settings of a run, and the commands that make it again."""

    title: str
    settings: str
    sentence: str = ""
    commands: str = ""

    @property
    def anchor(self) -> str:
        """The identifier to which the table of contents links."""
        return make_anchor(self.title)


@dataclass(frozen=True)
class Report:
    """A page, the figures and tables that belong to it, and the comparisons behind it by title."""

    title: str
    heading: str
    facts: str
    headlines: Sequence[Headline]
    sections: Sequence[Section]
    exhibits: Sequence[Exhibit]
    reproduction: Reproduction | None = None
    comparisons: Mapping[str, Comparison] = field(default_factory=dict[str, Comparison])
    verdicts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The comparisons as JSON values."""

    @property
    def contents(self) -> Sequence[Section | Reproduction]:
        """All titled parts in order, as the table of contents lists them."""
        return [*self.sections, *([] if self.reproduction is None else [self.reproduction])]

    def render(self) -> str:
        """The page as HTML."""
        return _ENVIRONMENT.get_template("page.html").render(page=self, svg=_draw_markup)

    def write(self, folder: Path) -> Path:
        """Write the page into the folder, and beside it the verdicts if there are any; the page's path."""
        run, page = RunDirectory(folder), self.render()
        with lock_folder(folder):
            if self.verdicts:
                write_atomically(run.verdicts, json.dumps(self.verdicts, indent=1))
            write_atomically(run.report, page)
        return run.report


def _draw_markup(figure: Figure) -> Markup:
    """A figure's drawing, in which everything is escaped already."""
    return Markup(draw_svg(figure))


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
