"""The examples run and end with both scores; the code of the start page and of every how-to page runs as it stands."""

import importlib
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

# The code of the start page and of every how-to page runs as it stands, from top to bottom.


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


# The examples run, grow something, and end with both scores.


EXAMPLES = Path(__file__).parents[2] / "examples"
REQUIRED = {"lightning_trainer": "lightning", "hugging_face_trainer": "transformers", "deeper_gpt": "transformers"}
DEEPER = ["deeper_gpt"]
LADDERS = ["ladder_gpt", "ladder_vit"]
SCORES = re.compile(r"accuracy without growth ([01]\.\d+), with growth ([01]\.\d+)")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain_loop", "own_blueprint", "lightning_trainer", "hugging_face_trainer", *DEEPER])
def test_an_example_grows_and_tells_the_scores(name: str, tmp_path: Path):
    if name in REQUIRED and importlib.util.find_spec(REQUIRED[name]) is None:
        pytest.skip(f"needs {REQUIRED[name]}")
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    assert "live" in result.stdout or "fossilized" in result.stdout
    scores = SCORES.search(result.stdout)
    assert float(scores[2]) > 1 / 10


@pytest.mark.slow
@pytest.mark.parametrize("name", LADDERS)
def test_an_example_makes_three_sizes(name: str, tmp_path: Path):
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers")
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    result = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert result.returncode == 0, result.stderr
    assert "3 sizes from one training" in result.stdout
    accuracies = re.findall(r"test loss [\d.]+, accuracy ([01]\.\d+)", result.stdout)
    assert len(accuracies) == 3
    assert all(float(accuracy) > 0.6 for accuracy in accuracies)


@pytest.mark.slow
def test_a_suite_of_ones_own_is_played(tmp_path: Path):
    suite = f"{EXAMPLES}/own_suite.py:rings"
    words = ["evaluate", "--controller", "look", "--suite", suite, "--instances", "8", "--json"]
    command = [sys.executable, "-m", "esper", *words]
    result = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    scores = json.loads(result.stdout.splitlines()[-1])
    assert scores["all_at_start"]["score"] > scores["none"]["score"] > 1 / 3


@pytest.mark.slow
@pytest.mark.parametrize("words", [["numbered_actions.py"], ["sb3.py", "--steps", "960"]])
def test_other_learners_control_growth(words: list[str], tmp_path: Path):
    if "sb3.py" in words and importlib.util.find_spec("sb3_contrib") is None:
        pytest.skip("needs sb3-contrib")
    command = [sys.executable, str(EXAMPLES / words[0]), *words[1:]]
    result = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert re.search(r"J of|J on", result.stdout)


@pytest.mark.slow
def test_settings_are_searched(tmp_path: Path):
    if importlib.util.find_spec("optuna") is None:
        pytest.skip("needs optuna")
    command = [sys.executable, str(EXAMPLES / "search_settings.py"), "--trials", "3"]
    result = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    found = re.search(r"test accuracy ([01]\.\d+)", result.stdout)
    assert float(found[1]) > 1 / 10


def test_the_sweep_at_weights_and_biases_has_the_same_space(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module("search_settings")
    told = example.sweep_configuration()["parameters"]
    assert {name: (one["min"], one["max"]) for name, one in told.items()} == example.SPACE
    assert set(told) <= set(inspect.signature(example.grown).parameters)


def test_every_example_is_run():
    elsewhere = {"grow", "look", *LADDERS}  # the first two in test_practice.py
    shared = {"counting", "digits", "own_suite", "search_settings", "numbered_actions", "sb3", *elsewhere}
    named = set(test_an_example_grows_and_tells_the_scores.pytestmark[0].args[1])
    assert {path.stem for path in EXAMPLES.glob("*.py")} - shared == named
