"""The command line: what is run, what is printed, and how it ends."""

import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from esper import __version__
from esper.cli import COMMANDS, Command, main
from esper.commands.options import Overrides
from esper.errors import RunError

TABLE = (
    Command("grow", f"{__name__}:grow", "Grow something."),
    Command("bench suite", f"{__name__}:bench", "Measure something."),
    Command("fail", f"{__name__}:fail", "Fail in a chosen way."),
)


def grow(run_dir: Path | None = None, seed: int = 0, overrides: Overrides = (), json: bool = False) -> None:
    """Grow something."""
    sys.stdout.write(f"{run_dir} {seed} {overrides} {json}\n")


def bench() -> int:
    """Measure something."""
    return 7


def fail(how: str) -> None:
    """Fail in a chosen way."""
    if how == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
    raise {"typed": RunError("no run at X"), "interrupt": KeyboardInterrupt(), "defect": ZeroDivisionError()}[how]


def test_options_reach_the_function(capsys: pytest.CaptureFixture[str]):
    words = ["grow", "--run-dir", "runs/a", "--seed", "3", "--set", "a.b=1", "--set", "c=[1, 2]", "--json"]
    assert main(words, TABLE) == 0
    assert capsys.readouterr().out == "runs/a 3 ('a.b=1', 'c=[1, 2]') True\n"


def test_a_command_of_two_words_and_its_exit_code():
    assert main(["bench", "suite"], TABLE) == 7


def test_a_typed_error_is_one_sentence_and_code_2(capsys: pytest.CaptureFixture[str]):
    assert main(["fail", "--how", "typed"], TABLE) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "error: no run at X\n")


def test_ctrl_c_is_code_130():
    assert main(["fail", "--how", "interrupt"], TABLE) == 130


def test_sigterm_is_code_143():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as exit_:
        main(["fail", "--how", "terminate"], TABLE)
    assert exit_.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == before


def test_another_thread_may_call_it_too():
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(main, ["bench", "suite"], TABLE).result() == 7


def test_a_defect_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        main(["fail", "--how", "defect"], TABLE)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["grwo"], "unknown command `grwo`, did you mean `grow`?"),
        (["bench", "suit"], "unknown command `bench suit`, did you mean `bench suite`?"),
        (["xyzzy"], "unknown command `xyzzy`, `esper --help` lists all commands"),
    ],
)
def test_unknown_commands(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(words, TABLE) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_the_overview_lists_all_commands(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(words, TABLE) == 0
    printed = capsys.readouterr().out
    for command in TABLE:
        assert f"{command.name} " in printed
        assert command.help in printed


def test_a_group_lists_its_own_commands(capsys: pytest.CaptureFixture[str]):
    assert main(["bench"], TABLE) == 0
    printed = capsys.readouterr().out
    assert "bench suite" in printed
    assert "grow " not in printed


def test_a_wrong_option_is_code_2(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_:
        main(["grow", "--sed", "3"], TABLE)
    assert exit_.value.code == 2
    assert "--seed" in capsys.readouterr().err


def test_the_version(capsys: pytest.CaptureFixture[str]):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"esper {__version__}\n"


def test_help_does_not_import_torch():
    script = "import sys; from esper.cli import main; main(['--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False, capture_output=True).returncode == 0


def test_python_m_esper_is_the_command():
    result = subprocess.run([sys.executable, "-m", "esper", "nonsense"], check=False, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: unknown command `nonsense`")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_shows_what_to_write_and_nothing_of_types(command: Command, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_:
        main([*command.name.split(), "--help"])
    assert exit_.value.code == 0
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"usage: esper {command.name}" in printed
    assert "--help" in printed
    assert "None}" not in printed
    assert not re.search(r"\(default:\s*(None)?\s*\)", printed)
