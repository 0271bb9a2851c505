"""A controller in a file plays wherever controllers are named: it is benchmarked like those that come with Esper."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from esper.cli import main
from esper.control.controller import load_controller
from esper.errors import ConfigError
from esper.tasks.suite_files import FILES
from factories import Loop
from train.runs import TINY

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "own-controller.md"
SUITE = """

from esper.tasks.registry import register
from esper.tasks.token_suite import TokenSuite


@register
class Quick(TokenSuite):
    name = "quick"
    steps = 8
    batches_per_step = 1
    validation_size = 32
    test_size = 64
"""
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The code of the how-to page, as its reader saves it."""
    monkeypatch.setenv(FILES, "")
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    path = tmp_path / "eager.py"
    path.write_text(block)
    return path


def last_json(text: str) -> dict[str, Any]:
    return json.loads(text.splitlines()[-1])


@pytest.mark.landing
def test_the_page_ends_with_a_command_that_benchmarks_its_controller(file: Path, capsys: Capture):
    command = re.search(r"^esper (evaluate --controller eager\.py:Eager .*)$", PAGE.read_text(), re.MULTILINE)
    words = command[1].replace("tokens", "short").replace("256", "4").replace("eager.py", str(file)).split()
    assert main([*words, "--json"]) == 0
    printed = capsys.readouterr()
    known = {"none", "random", "all_at_start", "schedule", "periodic", "heuristic", "look"}
    assert set(last_json(printed.out)) == {*known, "eager"}
    assert "On 4 held-out instances this controller scores" in printed.err


@pytest.mark.slow
def test_a_controller_and_a_suite_of_one_file_reach_other_processes(file: Path, capsys: Capture):
    file.write_text(file.read_text() + SUITE)
    words = ["evaluate", "--controller", f"{file}:Eager", "--suite", f"{file}:quick", "--instances", "2"]
    scores: list[dict[str, Any]] = []
    for workers in ("1", "2"):
        assert main([*words, "--workers", workers, "--json"]) == 0
        scores.append(last_json(capsys.readouterr().out))
    assert "eager" in scores[0]
    assert scores[0] == scores[1]


@pytest.mark.landing
def test_a_search_is_measured_beside_it(file: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("esper.commands.bench.WORKERS", 1)
    words = ["bench", "search", f"--controller={file}:Eager", "--suite", "short", "--instances", "2", "--json"]
    assert main(words) == 0
    record = last_json(capsys.readouterr().out)
    assert (record["controller"], record["trainings"]) == (f"{file}:Eager", 0)


@pytest.mark.slow
def test_it_plays_beside_the_arms_of_a_comparison_until_its_file_changes(file: Path, tmp_path: Path, capsys: Capture):
    config = tmp_path / "a.yaml"
    config.write_text("iterations: 1\n")
    settings = [word for setting in TINY for word in ("--set", setting)]
    words = ["compare", str(config), *settings, "--arms", "--controller", f"{file}:Eager", "--seeds", "1"]
    words += ["--instances", "2", "--workers", "1", "--run-dir", str(tmp_path / "all"), "--json"]
    assert main(words) == 0
    arms = {arm["name"]: arm for arm in last_json(capsys.readouterr().out)["arms"]["standings"]}
    assert arms["eager"]["environment_steps"] == 0
    assert "heuristic" in arms

    kept = tmp_path / "all" / "a" / "arms" / "eager.json"
    before = kept.read_text()
    file.write_text(f"{file.read_text()}\n# another version\n")
    assert main(words) == 0
    assert kept.read_text() != before  # by its key


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--controller", "eager.py:Eager"], "--controller needs --arms"),
        (["--arms", "--controller", "look"], "--controller look: give FILE.py:NAME; the baselines play in any case"),
        (["--arms", *["--controller", "eager.py:Eager"] * 2], "is called 'eager' in results"),
    ],
    ids=("no arms", "a baseline", "twice"),
)
def test_a_comparison_refuses_others_before_it_trains(
    words: list[str], message: str, file: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(file.parent)
    for name in ("a.yaml", "b.yaml"):
        Path(name).write_text("iterations: 1\n")
    assert main(["compare", "a.yaml", "b.yaml", *words]) == 2
    assert message in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit", "SystemExit"),
        ("class Eager: ...", "cannot be made (TypeError: Eager() takes no arguments): NAME is a class or a function"),
        ("def Eager(horizon): return horizon", "makes int, which is no controller: give it a name and the methods"),
        ("Eager = 3", "defines no class or function 'Eager'"),
        ("", "defines no class or function 'Eager'"),
        ("from esper.control.rules import Never\nEager = lambda _: Never()", "is called 'none' in results"),
        (
            "from esper.control.rules import Never\n"
            "class Eager(Never):\n    def __init__(self, horizon): self.name = '../up'",
            "is called '../up' in results",
        ),
        (None, "does not exist: name another file"),
    ],
)
def test_what_is_no_controller_is_a_sentence(code: str | None, message: str, file: Path, capsys: Capture):
    file.unlink()
    if code is not None:
        file.write_text(code)
    assert main(["evaluate", "--controller", f"{file}:Eager", "--suite", "digits", "--instances", "4"]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


def test_every_name_of_an_own_controller_is_of_its_file_alone_and_a_grower_takes_it(file: Path):
    other = file.parent / "elsewhere" / "eager.py"
    other.parent.mkdir()
    other.write_text(file.read_text().replace('name = "eager"', 'name = "other"'))
    assert [load_controller(f"{path}:Eager", 12).name for path in (file, other)] == ["eager", "other"]
    with pytest.raises(ConfigError, match="is called 'other' in results: .* not in use \\(other\\)"):
        load_controller(f"{other}:Eager", 12, ["other"])
    loop = Loop(f"{file}:Eager")
    loop.epoch()
    assert loop.grower.controller.name == "eager"


@pytest.mark.parametrize(("code", "reason"), [("1 / 0", "ZeroDivisionError"), ("raise SystemExit", "SystemExit")])
def test_a_grower_refuses_a_file_that_fails(code: str, reason: str, file: Path):
    file.write_text(code)
    with pytest.raises(ConfigError, match=f"controller .*eager.py:Eager: .*eager.py cannot be run: {reason}"):
        Loop(f"{file}:Eager")
    file.unlink()
    with pytest.raises(ConfigError, match="there is no such file as"):
        Loop(f"{file}:Eager")
