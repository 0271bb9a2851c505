"""Print how large Esper is beside its budgets; exit with 1 over one.

    python tools/size.py

Lines and bytes of `src/esper` by room, lines of tests, and words of the documentation that people write: generated
pages are left out. A budget is raised only with a table that shows what users get for it (CONTRIBUTING, "Proof of
value"), and golf is no way to meet one: bytes are counted as well.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "esper"

ROOMS: dict[tuple[str, ...], int] = {
    ("growth",): 6_900,
    ("grower",): 5_280,
    ("engine", "lifecycle", "control"): 5_200,
    ("population",): 3_700,
    ("rl", "train"): 5_300,
    ("tasks",): 3_350,
    ("runs", "dash"): 3_850,
    ("lab",): 4_500,
    ("ladders",): 1_750,
    ("commands", "cli.py", "integrations"): 1_800,
}
"""Budgets in lines, by folders and files of `src/esper`; what stands in none of them is the ground."""
GROUND = 2_450
LINES = 43_700
MEGABYTES = 1.99
TEST_LINES = 58_550
WORDS = 44_000
GENERATED = ("docs/architecture/rooms.md", "docs/gallery/*.md", "docs/reference/events.md")


def main() -> int:
    """Print a line per budget; returns the exit code."""
    sources = list(SOURCE.rglob("*.py"))
    generated = {page for pattern in GENERATED for page in ROOT.glob(pattern)}
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page not in generated]
    used: set[Path] = set()
    within: list[bool] = []
    print(f"{'':32}{'files':>6}{'lines':>8}{'budget':>8}{'bytes':>11}{'budget':>11}")
    for room, budget in ROOMS.items():
        files = [path for path in sources if path.relative_to(SOURCE).parts[0] in room]
        used.update(files)
        within.append(print_row(", ".join(room), files, budget))
    within.append(print_row("ground", set(sources) - used, GROUND))
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
