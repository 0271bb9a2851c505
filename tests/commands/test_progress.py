"""Every command that takes long reports how much of its work is done, of how much."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from esper.cli import COMMANDS, main
from esper.dash.output import ProgressReporter
from train.runs import TINY, short_suite

pytestmark = pytest.mark.landing

SETTINGS = [word for setting in (*TINY, "iterations=2") for word in ("--set", setting)]
SHORT = {"runs": "it lists what is there", "dash": "it serves until it is stopped", "doctor": "it takes seconds"}
"""Commands without progress, and why."""
SWEEP = """
def suggest(trial):
    return {
        "suite": "short", "environments": 8, "shards": 1, "probe_instances": 2, "iterations": 2,
        "policy": {"hidden": 16, "width": 16}, "ppo": {"group": 4, "minibatches": 2, "epochs": 1},
    }
"""
CALLS = {
    "train": ("train", "--run-dir", "new", *SETTINGS),
    "evaluate a run": ("evaluate", "run", "--instances", "4", "--transfer", "2", "--workers", "1"),
    "evaluate": ("evaluate", "--controller", "look", "--suite", "short", "--instances", "40", "--workers", "1"),
    "compare": ("compare", "a.yaml", *SETTINGS, "--arms", "--seeds", "2", "--instances", "2", "--workers", "1"),
    "sweep": ("sweep", "space.py:suggest", "--trials", "1", "--instances", "2", "--workers", "1"),
    "report": ("report", "run", "--out", "pages"),
    "bench suite": ("bench", "suite", "short", "--search", "1", "--score", "2"),
    "bench search": ("bench", "search", "--suite", "short", "--instances", "3"),
}
Updates = list[tuple[str, float, float | None]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("progress")
    with short_suite():
        assert main(["train", "--run-dir", str(folder / "run"), *SETTINGS]) == 0
        yield folder / "run"


@pytest.fixture
def folder(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The present folder, with all that the calls name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("esper.commands.bench.WORKERS", 1)
    shutil.copytree(trained, "run")
    Path("a.yaml").write_text("iterations: 2\n")
    Path("space.py").write_text(SWEEP)
    return tmp_path


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> Updates:
    """What is reported: what is done now, how much is done, and of how much."""
    seen: Updates = []
    update: Callable[..., None] = ProgressReporter.update

    def watch(reporter: ProgressReporter, done: float, total: float | None = None, name: str | None = None) -> None:
        update(reporter, done, total, name)
        line = reporter.describe_progress()
        seen.append((line, done, total))

    monkeypatch.setattr(ProgressReporter, "update", watch)
    return seen


def test_every_command_is_called_here() -> None:
    called = {name.removesuffix(" a run") for name in CALLS}
    assert called | set(SHORT) == {command.name for command in COMMANDS}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.usefixtures("folder")
def test_a_command_reports_how_much_is_done(name: str, updates: Updates) -> None:
    if name == "sweep":
        pytest.importorskip("optuna")
    assert main([*CALLS[name]]) == 0
    assert updates
    lines = [line for line, *_ in updates]
    assert all(" done, " in line and line.endswith(("left", "known yet")) for line in lines), lines
    assert any(line.endswith(" left") for line in lines), lines  # what is left is estimated, too
    assert len({done for _, done, _ in updates}) > 1, updates
