"""Numbers as people read them."""

import json
import math
import shutil
import subprocess
from pathlib import Path

import pytest

import esper
import esper.dash
from esper.dash import formats
from esper.dash.formats import MINUS, p_value, score, signed_score
from esper.errors import plural


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0:00"), (59.6, "1:00"), (187, "3:07"), (3787, "1:03:07"), (math.inf, "?"), (math.nan, "?")],
)
def test_durations(seconds: float, words: str):
    assert formats.duration(seconds) == words


@pytest.mark.parametrize(
    ("value", "words"), [(0.0214, "+0.021"), (-0.0214, "\u22120.021"), (0.0004, "0.000"), (-0.0004, "0.000")]
)
def test_signs_are_never_put_before_nothing(value: float, words: str):
    assert formats.signed_score(value) == words


@pytest.mark.parametrize(("share", "words"), [(0, "0%"), (0.001, "<1%"), (0.005, "<1%"), (0.126, "13%"), (1.3, "130%")])
def test_percents_do_not_hide_what_is_small(share: float, words: str):
    assert formats.percent(share) == words


@pytest.mark.parametrize(("p", "words"), [(0.0004, "<0.001"), (0.034, "0.034"), (1.0, "1.000")])
def test_p_values_are_never_zero(p: float, words: str):
    assert formats.p_value(p) == words


@pytest.mark.parametrize(
    ("words", "sentence"), [([], ""), (["a"], "a"), (["a", "b"], "a and b"), (["a", "b", "c"], "a, b and c")]
)
def test_lists(words: list[str], sentence: str):
    assert formats.join_words(words) == sentence


# The dashboard writes numbers as terminal and report do.


NODE = shutil.which("node")
FORMATS = Path(esper.dash.__file__).parent / "static" / "js" / "formats.js"
VALUES = (0.0, 0.0001, -0.0001, 0.0004, 0.0006, -0.05, 0.21, -0.2, 0.04, 0.5, 1.0)


@pytest.mark.skipif(NODE is None, reason="needs node: apt install nodejs")
def test_numbers_of_a_verdict_are_written_alike(tmp_path: Path) -> None:
    (tmp_path / "formats.mjs").write_text(FORMATS.read_text())
    (tmp_path / "written.mjs").write_text(
        'import { pValue, score, signed } from "./formats.mjs";\n'
        f"const values = {json.dumps(VALUES)};\n"
        "const written = values.map((one) => [signed(one), score(one), pValue(Math.abs(one))]);\n"
        "console.log(JSON.stringify(written));\n"
    )
    words = [str(NODE), str(tmp_path / "written.mjs")]
    written = json.loads(subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout)
    assert written == [[signed_score(one), score(one), p_value(abs(one))] for one in VALUES]
    assert MINUS in written[5][0]


# Numbers agree with their nouns, wherever a sentence is put together.


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (0, "run", "0 runs"),
        (1, "run", "1 run"),
        (2, "run", "2 runs"),
        (1234, "run", "1,234 runs"),
        (0.6, "run", "1 run"),
    ],
)
def test_a_number_has_its_noun_in_the_plural_unless_it_is_one(number: float, noun: str, text: str) -> None:
    assert plural(number, noun) == text


def test_a_plural_of_another_form_can_be_given() -> None:
    assert [plural(count, "family", "families") for count in (1, 2)] == ["1 family", "2 families"]
