"""Print how large Esper is beside its budgets; exit with 1 over one.

    python tools/size.py
    python tools/size.py --compare FOLDER [FOLDER ...]

Lines and bytes of `src/esper` by room, lines of tests, and words of the documentation that people write: generated
pages are left out. A budget is raised only with a table that shows what users get for it (CONTRIBUTING, "Proof of
value"), and golf is no way to meet one: bytes are counted as well.
With ``--compare`` it prints instead how Esper's rooms and other folders of Python source are written, by `FIGURES`.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "esper"

ROOMS: dict[tuple[str, ...], int] = {
    ("growth",): 5_985,
    ("grower",): 4_540,
    ("engine", "lifecycle", "control"): 4_800,
    ("population",): 3_350,
    ("rl", "train"): 4_910,
    ("tasks",): 2_940,
    ("runs", "dash"): 3_455,
    ("lab",): 4_160,
    ("ladders",): 1_580,
    ("commands", "cli.py", "integrations"): 1_720,
}
"""Budgets in lines, by folders and files of `src/esper`; what stands in none of them is the ground."""
GROUND = 2_215
LINES = 39_560
MEGABYTES = 1.85
TEST_LINES = 52_570
WORDS = 35_000
GENERATED = ("docs/architecture/rooms.md", "docs/gallery/*.md", "docs/reference/events.md")


FIGURES = {
    "files": "{:,.0f}",
    "lines": "{:,.0f}",
    "bytes": "{:,.0f}",
    "classes": "{:,.0f}",
    "dataclasses": "{:,.0f}",  # named tuples among them
    "one caller": "{:,.0f}",  # private functions whose name is used once
    "forwarders": "{:,.0f}",  # functions whose body is one `return f(...)`
    "imports": "{:.1%}",  # share of all lines
    "comments": "{:.1f}",  # comment lines per 100 lines of code, neither blank nor docstring
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line per budget, or the comparison; returns the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--compare", type=Path, nargs="+", metavar="FOLDER", help="other folders of Python source")
    folders = parser.parse_args(arguments).compare
    if folders is None:
        return print_budgets()
    rows = {", ".join(room): measure(files, SOURCE) for room, files in list_rooms().items()}
    rows["all of src"] = measure(SOURCE.rglob("*.py"), SOURCE)
    rows |= {str(folder): measure(folder.rglob("*.py"), folder) for folder in folders}
    print(f"{'':32}" + "".join(f"{name:>12}" for name in FIGURES))
    for name, figures in rows.items():
        print(f"{name[-31:]:32}" + "".join(f"{form.format(figures[key]):>12}" for key, form in FIGURES.items()))
    return 0


def list_rooms() -> dict[tuple[str, ...], list[Path]]:
    """The files of each room, and of the ground."""
    rooms: dict[tuple[str, ...], list[Path]] = {room: [] for room in (*ROOMS, ("ground",))}
    for path in sorted(SOURCE.rglob("*.py")):
        first = path.relative_to(SOURCE).parts[0]
        rooms[next((room for room in ROOMS if first in room), ("ground",))].append(path)
    return rooms


def measure(files: Iterable[Path], project: Path) -> Mapping[str, float]:
    """The `FIGURES` of some files of a project, in all of which callers are looked for."""
    uses = Counter(name for path in project.rglob("*.py") for name in list_uses(ast.parse(path.read_bytes())))
    found, code = dict.fromkeys(FIGURES, 0.0), 0
    for path in files:
        text = path.read_text()
        nodes = list(ast.walk(ast.parse(text)))
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        private = [node.name for node in functions if node.name.startswith("_") and not node.name.startswith("__")]
        strings = [node for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
        blank, comments = count_blank_and_comments(text)
        code += text.count("\n") - blank - comments - sum(map(count_lines, strings))
        found["files"] += 1
        found["lines"] += text.count("\n")
        found["bytes"] += len(text.encode())
        found["classes"] += len(classes)
        found["dataclasses"] += sum(map(is_record, classes))
        found["one caller"] += sum(uses[name] == 1 for name in private)
        found["forwarders"] += sum(map(is_forwarder, functions))
        found["imports"] += sum(count_lines(node) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom))
        found["comments"] += comments
    found["imports"] /= max(found["lines"], 1)
    found["comments"] *= 100 / max(code, 1)
    return found


def list_uses(tree: ast.Module) -> Iterator[str]:
    """Every use of a name or an attribute; imports and definitions are none."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def is_record(node: ast.ClassDef) -> bool:
    """Whether a class is a dataclass or a named tuple."""
    signs = [ast.unparse(part).partition("(")[0] for part in (*node.decorator_list, *node.bases)]
    return any(sign.rpartition(".")[2] in ("dataclass", "NamedTuple") for sign in signs)


def is_forwarder(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function only returns the result of a call, docstring aside."""
    *before, last = node.body
    others = [part for part in before if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))]
    return not others and isinstance(last, ast.Return) and isinstance(last.value, ast.Call)


def count_lines(node: ast.stmt) -> int:
    """The lines that a statement takes."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def count_blank_and_comments(text: str) -> tuple[int, int]:
    """Blank lines outside of strings, and lines that are a comment alone."""
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    blank = sum(token.type == tokenize.NL and not token.line.strip() for token in tokens)
    return blank, sum(token.type == tokenize.COMMENT and token.line.lstrip().startswith("#") for token in tokens)


def print_budgets() -> int:
    """Print a line per budget; returns 1 if one is exceeded."""
    sources = list(SOURCE.rglob("*.py"))
    generated = {page for pattern in GENERATED for page in ROOT.glob(pattern)}
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page not in generated]
    within: list[bool] = []
    print(f"{'':32}{'files':>6}{'lines':>8}{'budget':>8}{'bytes':>11}{'budget':>11}")
    for room, files in list_rooms().items():
        within.append(print_row(", ".join(room), files, ROOMS.get(room, GROUND)))
    within.append(print_row("all of src", sources, LINES, round(MEGABYTES * 1e6)))
    within.append(print_row("tests", list((ROOT / "tests").rglob("*.py")), TEST_LINES))
    words = sum(len(page.read_text().split()) for page in pages)
    within.append(words <= WORDS)
    print(f"{'words of docs':32}{len(pages):6}{words:8,}{WORDS:8,}{'' if within[-1] else '  over its budget'}")
    return 0 if all(within) else 1


def print_row(name: str, files: Iterable[Path], budget: int, byte_budget: int | None = None) -> bool:
    """Print the size of some files beside their budgets; returns whether they are within them."""
    texts = [path.read_bytes() for path in files]
    lines, size = sum(text.count(b"\n") for text in texts), sum(map(len, texts))
    within = lines <= budget and (byte_budget is None or size <= byte_budget)
    row = f"{name:32}{len(texts):6}{lines:8,}{budget:8,}{size:11,}"
    if byte_budget is not None:
        row += f"{byte_budget:11,}"
    print(row if within else f"{row}  over its budget")
    return within


if __name__ == "__main__":
    sys.exit(main())
