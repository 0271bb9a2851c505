"""Every block of code in the guide runs, one after the other, as a reader would type them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from esper.lifecycle.rules import Isolation

GUIDE = Path(__file__).parents[2] / "docs" / "grow-your-model.md"
BLOCK_OF_TEXT = re.compile(r"(?<=\n\n)```\n(.*?)^```", re.MULTILINE | re.DOTALL)
LOOK = GUIDE.with_name("look.md")
LANGUAGE = GUIDE.with_name("language.md")
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


@pytest.mark.slow
def test_the_guide_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    text = GUIDE.read_text()
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) >= 6
    names: dict[str, object] = {"__name__": "guide"}
    for block in blocks:
        line = text[: block.start(1)].count("\n")
        exec(compile("\n" * line + block[1], str(GUIDE), "exec"), names)  # noqa: S102
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
    text = LANGUAGE.read_text()
    names: dict[str, object] = {}
    for block in BLOCK.finditer(text):
        line = text[: block.start(1)].count("\n")
        exec(compile("\n" * line + block[1], str(LANGUAGE), "exec"), names)  # noqa: S102
    assert (tmp_path / "deeper" / "config.json").exists()
