"""Every block of code of the pages runs, one after the other, as a reader would type them, given what they speak of."""

import re
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.lifecycle.rules import Isolation

pytestmark = pytest.mark.landing

README = Path(__file__).parents[2] / "README.md"
GUIDE = README.with_name("docs") / "grow-your-model.md"
BLOCK_OF_TEXT = re.compile(r"(?<=\n\n)```\n(.*?)^```", re.MULTILINE | re.DOTALL)
LOOK, LANGUAGE, LADDER, INTEROP = (GUIDE.with_name(f"{name}.md") for name in ("look", "language", "ladder", "interop"))
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_page_on_looking_shows_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = LOOK.read_text()
    names: dict[str, object] = {}
    for block in BLOCK.findall(text):
        exec(compile(block, str(LOOK), "exec"), names)  # noqa: S102
    lines = repr(names["looked"]).splitlines()
    title, first, _, last = BLOCK_OF_TEXT.findall(text)[-1].splitlines()
    assert lines[0] == title
    assert lines[1].split()[:2] == first.split()[:2]
    (same,) = (line for line in lines if line.split()[:2] == last.split()[:2])
    for found, said in ((lines[1], first), (same, last)):
        assert figures(found) == pytest.approx(figures(said), rel=0.1, abs=0.01)
    assert (tmp_path / "map.svg").exists()


def figures(line: str) -> list[float]:
    return [float(one.replace(",", "")) for one in re.findall(r"-?[\d,]*\.?\d+", line)]


def run_blocks(page: Path, *given: dict[str, Any]) -> dict[str, Any]:
    """What the page's blocks of code leave behind, each run with what those before it left, and with what is given."""
    text = page.read_text()
    names: dict[str, Any] = {"__name__": "guide"}
    for block, more in zip_longest(BLOCK.finditer(text), given, fillvalue=dict[str, Any]()):
        line = text[: block.start(1)].count("\n")
        names.update(more)
        exec(compile("\n" * line + block[1], str(page), "exec"), names)  # noqa: S102
    return names


@pytest.mark.slow
def test_the_page_on_ladders_runs_from_top_to_bottom_and_shows_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    names = run_blocks(LADDER)
    assert str(names["plan"]) == BLOCK_OF_TEXT.findall(LADDER.read_text())[0].strip()
    assert [rung.depth for rung in names["made"].rungs] == [1, 2, 4]
    assert names["ladder"].training.finished


@pytest.mark.slow
def test_the_guide_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    names = run_blocks(GUIDE)
    assert type(names["classifier"]).__name__ == "BertForSequenceClassification"
    assert "eval_loss" in names["trainer"].evaluate()
    seed = names["apart"].seeds["0"]
    assert seed.isolation is Isolation.NONE
    assert seed.alpha > 0, "the seed that learns apart has not been advanced"
    assert all(parameter.any() for parameter in seed.parameters()), "the seed that learns apart has not learned"


@pytest.mark.slow
def test_the_page_on_language_models_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    run_blocks(LANGUAGE)
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
    names = run_blocks(README, growing)
    assert names["grower"].decisions == 40
    assert type(names["plain"]) is nn.Sequential
    assert names["observation"]["globals"].shape[0] == 16


def test_the_page_on_other_libraries_runs() -> None:
    names = run_blocks(INTEROP)
    assert names["envs"].table.shape == (28, 8)
    assert names["observation"]["action_mask"].shape == (16, 28)
