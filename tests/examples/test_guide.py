"""Every block of code in the guide runs, one after the other, as a reader would type them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from esper.lifecycle.rules import Isolation

GUIDE = Path(__file__).parents[2] / "docs" / "grow-your-model.md"
BLOCK_OF_TEXT = re.compile(r"(?<=\n\n)```\n(.*?)^```", re.MULTILINE | re.DOTALL)
LOOK, ADAPT, LANGUAGE = (GUIDE.with_name(f"{name}.md") for name in ("look", "adapt", "language"))
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
    assert last.split()[:2] in [line.split()[:2] for line in lines]
    assert (tmp_path / "map.svg").exists()


def run_blocks(page: Path) -> dict[str, Any]:
    """What the page's blocks of code leave behind, each run with what those before it left."""
    text = page.read_text()
    names: dict[str, Any] = {"__name__": "guide"}
    for block in BLOCK.finditer(text):
        line = text[: block.start(1)].count("\n")
        exec(compile("\n" * line + block[1], str(page), "exec"), names)  # noqa: S102
    return names


@pytest.mark.slow
def test_the_page_on_adapting_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    names = run_blocks(ADAPT)
    assert names["found"].kept is not None
    turned, labels, test = names["turned"], names["labels"], names["test"]
    adapted, before = (names["accuracy"](names[which], turned[test], labels[test]) for which in ("plain", "kept"))
    assert adapted > before + 0.2
    assert type(names["plain"]).__name__ == "ViTForImageClassification"
    assert names["careful"].retention.rise <= 0.1
    assert names["decision"].number == 20


@pytest.mark.slow
def test_the_guide_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    names = run_blocks(GUIDE)
    assert names["resumed"] is not None
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
