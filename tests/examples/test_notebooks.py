"""The notebooks run from top to bottom, and are shown with what they printed."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.landing

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
