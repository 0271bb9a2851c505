"""Numbers agree with their nouns, wherever a sentence is put together."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import esper
from esper.errors import plural

SOURCE = Path(esper.__file__).parent
ROOMS = ("commands", "lab", "dash")
"""Where tables, pages and lines are written."""
NOUNS = (
    *("cohort", "decision", "environment", "episode", "event", "example", "figure", "instance", "iteration", "network"),
    *("parameter", "rollback", "run", "schedule", "seed", "slot", "step", "table", "task", "time", "trial"),
)
COUNTED = re.compile(rf"^ (?:(?!on |holds )[a-z][a-z-]* )?(?:{'|'.join(NOUNS)})s\b")
NO_COUNTS = {
    "{POOL}": "a constant",
    "{SMOOTHING}": "a constant",
    "{speed}": "per second",
    "{split}": "the name of a split",
    "{parameters}": "text, as the number may be unknown",
    "{added}": "text with a sign",
}
"""What stands before such a noun without being a count that may be one."""


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


def counted(path: Path) -> Iterator[str]:
    """Where a value of an f-string is followed by a noun in the plural."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            for value, after in zip(node.values, node.values[1:], strict=False):
                if isinstance(value, ast.FormattedValue) and isinstance(after, ast.Constant):
                    followed = COUNTED.match(str(after.value))
                    shown = f"{{{ast.unparse(value.value)}}}"
                    if followed and shown not in NO_COUNTS and "per_second" not in shown:
                        yield f"{path.relative_to(SOURCE)}:{value.lineno}: {shown}{followed[0]}"


def test_no_sentence_counts_without_the_helper() -> None:
    found = [place for room in ROOMS for path in sorted((SOURCE / room).rglob("*.py")) for place in counted(path)]
    assert found == []
