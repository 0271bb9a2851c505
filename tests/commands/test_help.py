"""Help of all commands: no empty defaults."""

from __future__ import annotations

import re

import pytest

from esper.cli import COMMANDS, Command, main


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_no_default_is_empty_or_none(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command.name.split(), "--help"])
    printed = capsys.readouterr().out
    assert "options" in printed
    assert not re.search(r"\(default:\s*(None)?\s*\)", printed)
