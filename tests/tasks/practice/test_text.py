"""Texts as tokens."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from esper.errors import TaskError
from esper.tasks.practice import text as text_module
from esper.tasks.practice.text import tokenise

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=2).filter(lambda text: len(set(text)) > 1)


@given(text=texts)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_text_comes_back(text: str, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(text.encode())
    tokens, alphabet = tokenise(path)
    assert "".join(alphabet[token] for token in tokens) == text
    assert alphabet == "".join(sorted(set(text)))


def test_a_text_that_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text"
    path.write_bytes("aé€😀\r\nb".encode())
    whole = tokenise(path)
    monkeypatch.setattr(text_module, "CHUNK", 1)
    cut = tokenise(path)
    assert cut.alphabet == whole.alphabet
    assert np.array_equal(cut.tokens, whole.tokens)


@pytest.mark.parametrize(("characters", "kind"), [(256, np.uint8), (257, np.uint16)])
def test_tokens_are_as_small_as_the_alphabet_allows(characters: int, kind: type[np.generic], tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes("".join(map(chr, range(characters))).encode())
    assert tokenise(path).tokens.dtype == kind


@pytest.mark.parametrize(
    ("content", "sentence"), [(b"\xff\xfeab", "not UTF-8"), (b"aaa", "nothing to learn"), (b"ab\xe2\x82", "not UTF-8")]
)
def test_texts_that_cannot_be_learned(content: bytes, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(content)
    with pytest.raises(TaskError, match=sentence):
        tokenise(path)


def test_a_text_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="cannot read the text"):
        tokenise(tmp_path / "nowhere")


def test_a_text_is_read_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, opened, real = tmp_path / "text", list[Path](), Path.open
    path.write_text("abcab")

    def shrink_afterwards(text: Path, *given: Any, **named: Any) -> Any:
        opened.append(text)
        with real(text, *given, **named) as whole:
            file = io.StringIO(whole.read())
        with real(text, "w") as shrunk:
            shrunk.write("a")
        return file

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", shrink_afterwards)
        tokens, alphabet = tokenise(path)
    assert (tokens.tolist(), alphabet) == ([0, 1, 2, 0, 1], "abc")
    assert opened == [path]
