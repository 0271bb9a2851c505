"""The code of the start page and of every how-to page runs as it stands, from top to bottom."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.landing

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r'^```python(?: title="(?P<file>[\w.]+)")?\n(?P<code>.*?)^```', re.MULTILINE | re.DOTALL)
PAGES = [
    DOCS / "start.md",
    *(page for page in sorted((DOCS / "how-to").glob("*.md")) if BLOCK.search(page.read_text())),
]
NEEDED = {"lightning": "lightning", "hugging-face": "transformers"}
GROWS = {
    "start",
    "frozen",
    "lightning",
    "hugging-face",
    "several-processes",
    "language-model",
    "own-controller",
    "width",
}
"""Pages on which something is to be seen that grew."""


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    library = NEEDED.get(page.stem)
    if library is not None and find_spec(library) is None:
        pytest.skip(f"needs {library}")
    blocks = list(BLOCK.finditer(page.read_text()))
    script = tmp_path / (blocks[0]["file"] or "page.py")
    script.write_text("\n".join(block["code"] for block in blocks))
    command = [sys.executable, str(script)]
    if blocks[0]["file"]:
        command[1:1] = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    result = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert result.returncode == 0, result.stderr
    if page.stem == "own-reward":
        assert all(float(one) != 0 for one in re.findall(r"-?[\d.]+", result.stdout)), result.stdout
    if page.stem in GROWS:
        assert re.search("germinate|fossilize|'growth.op': '1'", result.stdout), result.stdout


def test_code_is_not_left_out_by_accident() -> None:
    """Every page with Python is in the list above; those without are for commands or for finding others."""
    without = {page.stem for page in (DOCS / "how-to").glob("*.md")} - {page.stem for page in PAGES}
    assert without == {"index", "own-suite", "paper", "search"}


@pytest.mark.slow
def test_the_front_page_prints_what_it_shows(tmp_path: Path) -> None:
    """With the data, network and loop of the start page; the last digits differ between machines."""
    before = [block["code"] for block in BLOCK.finditer((DOCS / "start.md").read_text())]
    data, loop = before[0], before[2].partition("\n\n\nfor epoch")[0]
    text = (DOCS / "index.md").read_text()
    (block,) = BLOCK.finditer(text)
    script = tmp_path / "page.py"
    script.write_text("\n".join([data, loop, block["code"]]))
    result = subprocess.run([sys.executable, str(script)], check=True, capture_output=True, text=True)
    (shown,) = re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)

    def leave_out_figures(output: str) -> list[str]:
        return [re.sub(r"[+-]?\d[\d.,]*", "N", line) for line in output.strip().splitlines()]

    assert leave_out_figures(result.stdout) == leave_out_figures(shown)
