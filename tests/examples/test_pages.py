"""The code of the start page and of every how-to page runs as it stands, from top to bottom."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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


# The notebooks run from top to bottom, and are shown with what they printed.


NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))
SHOWN = {"grow_a_vision_model": "test accuracy", "read_a_run": "fossilized", "train_a_controller": "Did learning help?"}
"""A piece of what each ends with."""


def code_of(notebook: Path) -> list[dict[str, Any]]:
    cells = json.loads(notebook.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code" and cell["source"]]


def test_there_is_a_case_for_every_notebook() -> None:
    assert {notebook.stem for notebook in NOTEBOOKS} == SHOWN.keys()


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_it_was_run_before_it_was_committed_and_names_no_machine(notebook: Path) -> None:
    cells = code_of(notebook)
    outputs = json.dumps([cell["outputs"] for cell in cells])
    assert SHOWN[notebook.stem] in outputs
    assert all(output["output_type"] != "error" for cell in cells for output in cell["outputs"])
    assert "/tmp/" not in outputs
    assert "/home/" not in outputs


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_it_runs_from_top_to_bottom(notebook: Path, tmp_path: Path) -> None:
    cells = ["".join(cell["source"]) for cell in code_of(notebook)]
    if any("import pandas" in cell for cell in cells) and find_spec("pandas") is None:
        pytest.skip("needs pandas")
    script = tmp_path / "notebook.py"
    script.write_text("\n\n".join(cells))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    result = subprocess.run(
        [sys.executable, str(script)], check=False, capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert result.returncode == 0, result.stderr
