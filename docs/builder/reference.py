"""The reference: the pages of docs/reference name what is public, and the code says the rest.

A line ``::: esper.attach`` stands for that object's signature and docstring. Comments stand for lists: of names with a
line each, of all blueprints, and of the help of all commands.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from functools import cache
from typing import Any

import griffe

from docs.builder.pages import ROOT
from esper.cli import COMMANDS, main
from esper.growth import blueprints

WHOLE = ("esper", "esper.rl", "esper.growth.blueprints", "esper.errors")
"""Modules all of whose ``__all__`` is to be in the reference."""
WIDTH = "100"
"""Columns of a terminal for the help of commands."""
_NAME = re.compile(r"^::: (\S+)$", re.MULTILINE)
_LIST = re.compile(r"^<!-- list ([\w. ]+) -->$", re.MULTILINE)


def public_names() -> list[str]:
    """Every name in the reference with its module, such as ``esper.attach``."""
    return list(_find_pages())


def find_gaps() -> list[str]:
    """What is public and not in the reference, or has no docstring: names, and public methods of classes."""
    named = public_names()
    exported = [f"{module}.{name}" for module in WHOLE for name in _exports(module)]
    absent = [f"{name} is in no page of docs/reference" for name in exported if name not in named]
    bare = [f"{one} has no docstring" for name in named for one in _undocumented(name, _find(name))]
    return absent + bare


def fill_lists(text: str) -> str:
    """A page with its comments replaced by what they stand for.

    ``<!-- list esper esper.runs.reader.RunReader -->`` is a table of these names; a module stands for its ``__all__``.
    """
    text = _LIST.sub(lambda found: "\n".join(_list_names(found[1].split())), text)
    for mark, lines in (("<!-- blueprints -->", _list_blueprints), ("<!-- commands -->", _list_commands)):
        if mark in text:
            text = text.replace(mark, "\n".join(lines()))
    return text


@cache
def _find_pages() -> dict[str, str]:
    """Every name in the reference with the file of its page."""
    pages = sorted((ROOT / "docs" / "reference").glob("*.md"))
    return {name: page.name for page in pages for name in _NAME.findall(page.read_text())}


@cache
def _package() -> Any:
    loader = griffe.GriffeLoader(search_paths=[ROOT / "src"])
    package = loader.load("esper")
    loader.resolve_aliases(implicit=True)
    return package


def _find(name: str) -> Any:
    found = _package() if name == "esper" else _package()[name.removeprefix("esper.")]
    return found.final_target if found.is_alias else found


def _exports(module: str) -> list[str]:
    """The names that it exports, without its modules."""
    names = [str(name) for name in _find(module).exports or ()]
    return [name for name in names if not _find(f"{module}.{name}").is_module]


def _undocumented(name: str, found: Any) -> Iterator[str]:
    if not found.has_docstring:
        yield name
    if not found.is_class:
        return
    said = {member for base in _bases(found) for member in base.members}
    for member in found.members.values():
        bare = member.is_function and not member.name.startswith("_") and not member.has_docstring
        if bare and member.name not in said:
            yield f"{name}.{member.name}"


def _bases(found: Any) -> list[Any]:
    with suppress(Exception):  # griffe cannot see classes of other libraries
        return list(found.mro())
    return []


def _list_names(names: list[str]) -> Iterator[str]:
    yield from ("| name | what it is |", "|---|---|")
    for name in names:
        inner = [f"{name}.{one}" for one in _exports(name)] if _find(name).is_module else [name]
        for one in inner:
            first = _find(one).docstring.value.partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")
            yield f"| [`{one}`]({_find_pages()[one]}#{one}) | {first} |"


def _list_blueprints() -> Iterator[str]:
    yield from ("| name | family | layouts | what it is |", "|---|---|---|---|")
    for name in blueprints.names():
        kind = blueprints.get(name)
        layouts = ", ".join(sorted(str(layout) for layout in kind.layouts))
        first = (kind.__doc__ or "").partition("\n")[0].replace("|", "\\|")
        yield f"| `{name}` | {kind.family} | {layouts} | {first} |"


def _list_commands() -> Iterator[str]:
    os.environ["COLUMNS"] = WIDTH
    for command in COMMANDS:
        shown = io.StringIO()
        with redirect_stdout(shown), suppress(SystemExit):
            main([*command.name.split(), "--help"])
        if not shown.getvalue():
            raise RuntimeError(f"`esper {command.name} --help` printed nothing; it needs an extra that is missing")
        yield from (f"## esper {command.name}", "", "```text", shown.getvalue().rstrip(), "```", "")
