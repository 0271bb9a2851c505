"""A number that no command can do is refused by every command that takes one, before it does anything."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from esper.cli import COMMANDS, Command, main
from esper.commands.options import find_interval
from esper.train.workers import Backend


def mentions_integers(hint: Any) -> bool:
    return hint is int or any(map(mentions_integers, get_args(hint)))


def list_integers() -> list[tuple[str, str]]:
    """Commands and their options that are integers."""
    options: list[tuple[str, str]] = []
    for command in COMMANDS:
        target = command.load()
        hints = get_type_hints(target, include_extras=True)
        names = [name for name in inspect.signature(target).parameters if mentions_integers(hints[name])]
        options += [(command.name, name) for name in names]
        if "computing" in hints:
            options += [
                (command.name, name) for name, hint in get_type_hints(Backend).items() if mentions_integers(hint)
            ]
    return options


NEEDED = {"sweep": ["space.py:suggest"], "compare": ["a.yaml", "b.yaml"]}
"""Arguments that a command cannot do without."""


@pytest.mark.parametrize("number", [10**9, -(10**9)])
@pytest.mark.parametrize(("command", "option"), list_integers())
def test_an_integer_out_of_bounds_is_refused_at_once(
    command: str,
    option: str,
    number: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    number = number * 10 if option == "seed" else number
    assert main([*command.split(), *NEEDED.get(command, []), f"--{option}", str(number)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: --{option} {number}: give ")
    assert not captured.out
    assert not list(tmp_path.iterdir())


def test_the_options_are_found() -> None:
    found = list_integers()
    assert {("evaluate", "instances"), ("compare", "seeds"), ("sweep", "trials"), ("train", "workers")} <= set(found)


def test_an_interval_is_found_in_the_hint_of_an_option_that_may_be_left_out() -> None:
    (train,) = (command for command in COMMANDS if command.name == "train")
    assert isinstance(train, Command)
    assert find_interval(get_type_hints(train.load(), include_extras=True)["seed"]).ge == 0
