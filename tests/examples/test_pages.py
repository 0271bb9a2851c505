"""Code of the pages, notebooks and examples runs as a reader would type it, grows something, and shows what it says."""

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

pytestmark = pytest.mark.landing

ROOT = Path(__file__).parents[2]
DOCS, EXAMPLES = ROOT / "docs", ROOT / "examples"
BLOCK = re.compile(r'^```python(?: title="(?P<file>[\w.]+)")?\n(?P<code>.*?)^```', re.MULTILINE | re.DOTALL)
BLOCK_OF_TEXT = re.compile(r"(?<=\n\n)```\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [
    DOCS / "start.md",
    *(page for page in sorted((DOCS / "how-to").glob("*.md")) if BLOCK.search(page.read_text())),
]
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
NEEDED = {
    "lightning": "lightning",
    "hugging-face": "transformers",
    "lightning_trainer": "lightning",
    "hugging_face_trainer": "transformers",
    "deeper_gpt": "transformers",
    "ladder_gpt": "transformers",
    "ladder_vit": "transformers",
    "sb3": "sb3_contrib",
    "search_settings": "optuna",
}
"""By page or example, a library that it imports."""


def run(folder: Path, *words: Any, needs: str | None = None) -> str:
    """What Python prints that is called with these words in ``folder``."""
    if needs is not None and find_spec(needs) is None:
        pytest.skip(f"needs {needs}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    command = [sys.executable, *map(str, words)]
    result = subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    blocks = list(BLOCK.finditer(page.read_text()))
    script = tmp_path / (blocks[0]["file"] or "page.py")
    script.write_text("\n".join(block["code"] for block in blocks))
    several = ["-m", "torch.distributed.run", "--nproc-per-node", "2"] if blocks[0]["file"] else []
    printed = run(tmp_path, *several, script, needs=NEEDED.get(page.stem))
    if page.stem == "own-reward":
        assert all(float(one) != 0 for one in re.findall(r"-?[\d.]+", printed)), printed
    if page.stem in GROWS:
        assert re.search("germinate|fossilize|'growth.op': '1'", printed), printed


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
    (tmp_path / "page.py").write_text("\n".join([data, loop, block["code"]]))
    (shown,) = re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)

    def leave_out_figures(output: str) -> list[str]:
        return [re.sub(r"[+-]?\d[\d.,]*", "N", line) for line in output.strip().splitlines()]

    assert leave_out_figures(run(tmp_path, "page.py")) == leave_out_figures(shown)


# Pages whose blocks need something that they speak of.


def run_blocks(page: Path, *given: dict[str, Any]) -> dict[str, Any]:
    """What the page's blocks of code leave behind, each run with what those before it left, and with what is given."""
    text = page.read_text()
    names: dict[str, Any] = {"__name__": "guide"}
    for block, more in zip_longest(BLOCK.finditer(text), given, fillvalue=dict[str, Any]()):
        line = text[: block.start("code")].count("\n")
        names.update(more)
        exec(compile("\n" * line + block["code"], str(page), "exec"), names)  # noqa: S102
    return names


def test_the_page_on_looking_shows_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = DOCS / "look.md"
    lines = repr(run_blocks(page)["looked"]).splitlines()
    title, first, _, last = BLOCK_OF_TEXT.findall(page.read_text())[-1].splitlines()
    assert lines[0] == title
    assert lines[1].split()[:2] == first.split()[:2]
    (same,) = (line for line in lines if line.split()[:2] == last.split()[:2])
    for found, said in ((lines[1], first), (same, last)):
        assert figures(found) == pytest.approx(figures(said), rel=0.1, abs=0.01)
    assert (tmp_path / "map.svg").exists()


def figures(line: str) -> list[float]:
    return [float(one.replace(",", "")) for one in re.findall(r"-?[\d,]*\.?\d+", line)]


@pytest.mark.slow
def test_the_page_on_ladders_runs_from_top_to_bottom_and_shows_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    names = run_blocks(DOCS / "ladder.md")
    assert str(names["plan"]) == BLOCK_OF_TEXT.findall((DOCS / "ladder.md").read_text())[0].strip()
    assert [rung.depth for rung in names["made"].rungs] == [1, 2, 4]
    assert names["ladder"].training.finished


@pytest.mark.slow
def test_the_guide_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    names = run_blocks(DOCS / "grow-your-model.md")
    assert type(names["classifier"]).__name__ == "BertForSequenceClassification"
    assert "eval_loss" in names["trainer"].evaluate()
    assert names["careful"].decisions
    assert names["weighed"].tried, "the grower that compares with forks has planted nothing"


@pytest.mark.slow
def test_the_page_on_language_models_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    run_blocks(DOCS / "language.md")
    assert (tmp_path / "deeper" / "config.json").exists()


def draw_images() -> tuple[Tensor, Tensor]:
    """64 images of two classes, one of which is brighter on the left."""
    labels = torch.arange(64) % 2
    images = torch.randn(64, 3, 8, 8)
    images[..., :4] += labels[:, None, None, None]
    return images, labels


def train_one_epoch(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    images, labels = draw_images()
    model.train()
    loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def validate(model: nn.Module) -> tuple[float, float]:
    images, labels = draw_images()
    outputs = model.eval()(images)
    return F.cross_entropy(outputs, labels).item(), (outputs.argmax(1) == labels).float().mean().item()


class Convolutions(nn.Module):
    """A small network of images."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1, self.layer2 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.layer2(F.relu(self.layer1(images))).mean((2, 3))
        for block in self.blocks:
            hidden = F.relu(block(hidden))
        return self.head(hidden)


@pytest.mark.slow
def test_the_readme_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    images, labels = draw_images()
    growing = {
        "torch": torch,
        "net": nn.Sequential(nn.Flatten(), nn.ReLU(), nn.Linear(192, 4), nn.ReLU(), nn.Linear(4, 2)),
        "images": images,
        "validation": [(images, labels)],
        "train_one_epoch": train_one_epoch,
    }
    names = run_blocks(ROOT / "README.md", growing)
    assert names["grower"].decisions == 40
    assert type(names["plain"]) is nn.Sequential
    assert names["observation"]["globals"].shape[0] == 16


def test_the_page_on_other_libraries_runs() -> None:
    names = run_blocks(DOCS / "interop.md")
    assert names["envs"].table.shape == (28, 8)
    assert names["observation"]["action_mask"].shape == (16, 28)


# The notebooks run from top to bottom, and are shown with what they printed.


NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
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
    (tmp_path / "notebook.py").write_text("\n\n".join(cells))
    run(tmp_path, "notebook.py", needs="pandas" if any("import pandas" in cell for cell in cells) else None)


# The examples run, grow something, and end with both scores.


GROWING = ["plain_loop", "own_blueprint", "lightning_trainer", "hugging_face_trainer", "deeper_gpt"]
LADDERS = ["ladder_gpt", "ladder_vit"]


def run_example(folder: Path, name: str, *options: str) -> str:
    return run(folder, EXAMPLES / f"{name}.py", *options, needs=NEEDED.get(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", GROWING)
def test_an_example_grows_and_tells_the_scores(name: str, tmp_path: Path):
    printed = run_example(tmp_path, name)
    assert "live" in printed or "fossilized" in printed
    scores = re.search(r"accuracy without growth ([01]\.\d+), with growth ([01]\.\d+)", printed)
    assert float(scores[2]) > 1 / 10


@pytest.mark.slow
@pytest.mark.parametrize("name", LADDERS)
def test_an_example_makes_three_sizes(name: str, tmp_path: Path):
    printed = run_example(tmp_path, name)
    assert "3 sizes from one training" in printed
    accuracies = re.findall(r"test loss [\d.]+, accuracy ([01]\.\d+)", printed)
    assert len(accuracies) == 3
    assert all(float(accuracy) > 0.6 for accuracy in accuracies)


@pytest.mark.slow
def test_a_suite_of_ones_own_is_played(tmp_path: Path):
    suite = f"{EXAMPLES}/own_suite.py:rings"
    words = ["evaluate", "--controller", "look", "--suite", suite, "--instances", "8", "--json"]
    scores = json.loads(run(tmp_path, "-m", "esper", *words).splitlines()[-1])
    assert scores["all_at_start"]["score"] > scores["none"]["score"] > 1 / 3


@pytest.mark.slow
@pytest.mark.parametrize("words", [["numbered_actions"], ["sb3", "--steps", "960"]])
def test_other_learners_control_growth(words: list[str], tmp_path: Path):
    assert re.search(r"J of|J on", run_example(tmp_path, *words))


@pytest.mark.slow
def test_settings_are_searched(tmp_path: Path):
    found = re.search(r"test accuracy ([01]\.\d+)", run_example(tmp_path, "search_settings", "--trials", "3"))
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
    assert {path.stem for path in EXAMPLES.glob("*.py")} - shared == {*GROWING}
