"""Numbers as people read them."""

import json
import math
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import esper
import esper.dash
from esper.dash import formats
from esper.dash.formats import MINUS, p_value, score, signed_score
from esper.errors import plural


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [
        *((formats.duration, *pair) for pair in ((0, "0:00"), (59.6, "1:00"), (187, "3:07"), (3787, "1:03:07"))),
        *((formats.duration, value, "?") for value in (math.inf, math.nan)),
        *((signed_score, *pair) for pair in ((0.0214, "+0.021"), (-0.0214, "\u22120.021"))),
        *((signed_score, value, "0.000") for value in (0.0004, -0.0004)),
        *((formats.percent, *pair) for pair in ((0, "0%"), (0.001, "<1%"), (0.005, "<1%"), (0.126, "13%"))),
        (formats.percent, 1.3, "130%"),
        *((p_value, *pair) for pair in ((0.0004, "<0.001"), (0.034, "0.034"), (1.0, "1.000"))),
        *((formats.join_words, *pair) for pair in (([], ""), (["a"], "a"), (["a", "b"], "a and b"))),
        (formats.join_words, ["a", "b", "c"], "a, b and c"),
    ],
)
def test_numbers_and_lists(write: Callable[[Any], str], value: Any, text: str):
    assert write(value) == text


def test_a_number_has_its_noun_in_the_plural_unless_it_is_one() -> None:
    numbers = {0: "0 runs", 1: "1 run", 2: "2 runs", 1234: "1,234 runs", 0.6: "1 run"}
    assert {number: plural(number, "run") for number in numbers} == numbers
    assert [plural(count, "family", "families") for count in (1, 2)] == ["1 family", "2 families"]


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
