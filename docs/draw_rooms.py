"""Draw the rooms of the code and their imports into docs/architecture.md, and list all files in architecture/rooms.md.

python docs/draw_rooms.py          # draw anew
python docs/draw_rooms.py --check  # fail if the pages show something else
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "src" / "esper"
PAGES = {"drawing": ROOT / "docs" / "architecture.md", "files": ROOT / "docs" / "architecture" / "rooms.md"}
"""The page of each part that is made here, between two comments."""

Edges = Counter[tuple[str, str]]
"""How many files of the first room import something of the second."""


def room_of(parts: tuple[str, ...]) -> str | None:
    """The room of a module or file, given the parts of its name below `esper`; None for single files of the root."""
    return parts[0] if len(parts) > 1 or (SOURCES / parts[0]).is_dir() else None


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Modules of Esper that are imported when the code runs, not those that only types need."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("esper"):
            yield from ([f"esper.{alias.name}" for alias in node.names] if node.module == "esper" else [node.module])
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("esper."))
        yield from imported_names(node)


def read_edges() -> tuple[Counter[str], Edges]:
    """Files per room, and which room imports which."""
    sizes: Counter[str] = Counter()
    edges: Edges = Counter()
    for file in sorted(SOURCES.rglob("*.py")):
        room = room_of(file.relative_to(SOURCES).with_suffix("").parts)
        if room is None:
            continue
        sizes[room] += 1
        imported = {room_of(tuple(name.split(".")[1:])) for name in imported_names(ast.parse(file.read_text()))}
        edges.update((room, other) for other in imported if other not in {None, room} and other is not None)
    return sizes, edges


def without_detours(edges: Edges) -> Edges:
    """Only edges that no longer way of edges says as well (the transitive reduction).

    Raises:
        SystemExit: rooms import one another in a circle.
    """

    def reached(start: str, seen: frozenset[str]) -> set[str]:
        found: set[str] = set()
        for first, second in edges:
            if first == start:
                if second in seen:
                    sys.exit(f"{first} and {second} import one another: a room may only stand on what is below it")
                found |= {second} | reached(second, seen | {second})
        return found

    below = {room: reached(room, frozenset({room})) for room, _ in edges}
    return Counter(
        {
            (room, other): count
            for (room, other), count in edges.items()
            if not any(other in below.get(middle, set()) for first, middle in edges if first == room)
        }
    )


def draw() -> str:
    """A Mermaid flow chart: an arrow from every room to those it hands its results to."""
    sizes, edges = read_edges()
    rooms = [f'    {room}["{room}<br/>{count} files"]' for room, count in sorted(sizes.items())]
    arrows = [f"    {other} --> {room}" for room, other in sorted(without_detours(edges))]
    return "\n".join(["```mermaid", "flowchart LR", *rooms, *arrows, "```", ""])


def list_files() -> str:
    """Every file by room, with the first line of its docstring."""
    rooms: dict[str, list[str]] = {}
    for file in sorted(SOURCES.rglob("*.py")):
        inner = file.relative_to(SOURCES)
        docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
        if file.name == "__init__.py" and len(inner.parts) > 1:
            continue
        room = room_of(inner.with_suffix("").parts) or "at the root"
        rooms.setdefault(room, []).append(f"- `{inner.as_posix()}`: {docstring.partition(chr(10))[0]}")
    return "\n".join(f"## {room}\n\n" + "\n".join(lines) + "\n" for room, lines in sorted(rooms.items()))


def main() -> None:
    """Write both parts between their comments, or compare them with the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if the pages show something else")
    check: bool = parser.parse_args().check
    for part, text in {"drawing": draw(), "files": list_files()}.items():
        begin, end = f"<!-- {part}: made by docs/draw_rooms.py -->\n", f"<!-- end of {part} -->\n"
        page = PAGES[part].read_text()
        before, rest = page.split(begin)
        made = f"{before}{begin}{text}{end}{rest.split(end)[1]}"
        if not check:
            PAGES[part].write_text(made)
        elif made != page:
            sys.exit(f"{PAGES[part].name} shows an older layout: run python docs/draw_rooms.py")


if __name__ == "__main__":
    main()
