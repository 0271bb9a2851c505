"""How code is written is counted in the same way for Esper's rooms and for other folders."""

from pathlib import Path

from tools import size

CODE = '''"""Two lines
of docstring."""

from dataclasses import dataclass
from typing import (
    NamedTuple,
)


@dataclass(frozen=True)
class Record:
    value: int


class Pair(NamedTuple):
    # A comment line.
    first: int  # not one


class Plain:
    def forward(self, value):
        """A forwarder."""
        return _once(value)


def _once(value):
    value += 1
    return _twice(_twice(value))


def _twice(value):
    return value
'''


def test_figures_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CODE)
    found = size.measure(tmp_path.rglob("*.py"), tmp_path)
    assert found == {
        "files": 1,
        "lines": CODE.count("\n"),
        "bytes": len(CODE),
        "classes": 3,
        "dataclasses": 2,
        "one caller": 1,  # _once; _twice is called at two places
        "forwarders": 1,
        "imports": 4 / CODE.count("\n"),
        "comments": 100 / 17,  # one in 17 lines of code
    }
