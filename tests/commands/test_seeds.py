"""A seed that no source of randomness takes is refused by every command that takes one, before it does anything."""

from __future__ import annotations

import inspect

import pytest

from esper.cli import COMMANDS, main

SEEDED = [one.name for one in COMMANDS if "seed" in inspect.signature(one.load()).parameters]
NEEDED = {"sweep": ["space.py:suggest"]}
"""Arguments that a command cannot do without."""


@pytest.mark.parametrize("seed", [-1, 2**31])
@pytest.mark.parametrize("name", SEEDED)
def test_a_seed_that_cannot_be_is_refused(name: str, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*name.split(), *NEEDED.get(name, []), "--seed", str(seed)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "seed" in error
    assert str(seed) in error


def test_commands_with_seeds_are_found() -> None:
    assert {"train", "sweep", "bench suite"} <= set(SEEDED)
