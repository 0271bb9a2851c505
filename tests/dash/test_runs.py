"""Finding runs."""

import os
from pathlib import Path

import pytest

from dash.planted_run import Plan, plant
from esper.dash.run_view import DEPTH, RunFinder
from esper.errors import RunError

SMALL = Plan(networks=1, slots=1, steps=2, iterations=1)


def names(*places: Path) -> list[str]:
    return sorted(RunFinder(places).find())


def test_runs_are_found_in_folders_and_by_themselves(tmp_path: Path):
    plant(tmp_path / "runs" / "first", SMALL)
    plant(tmp_path / "runs" / "sweep" / "seed0", SMALL)
    assert names(tmp_path / "runs") == ["first", "sweep/seed0"]
    assert names(tmp_path / "runs" / "first") == ["first"]


def test_new_runs_show_and_vanished_ones_do_not(tmp_path: Path):
    finder = RunFinder((tmp_path / "runs",))
    assert finder.find() == {}
    store = plant(tmp_path / "runs" / "late", SMALL)
    assert finder.store("late") == store
    store.unlink()
    with pytest.raises(RunError, match="no run 'late'"):
        finder.store("late")


def test_runs_of_the_same_name_keep_apart(tmp_path: Path):
    for place in ("one", "other"):
        plant(tmp_path / place / "run", SMALL)
    found = RunFinder((tmp_path / "one", tmp_path / "other")).find()
    assert sorted(found) == [str(tmp_path / "other" / "run"), "run"]


def test_hidden_and_deep_folders_are_left_alone(tmp_path: Path):
    plant(tmp_path / ".hidden" / "run", SMALL)
    plant(tmp_path.joinpath(*"abcdefgh"[: DEPTH + 1]), SMALL)
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", ["../outside", "..", "/etc", "first/../../outside", "first\0", ""])
def test_no_name_leads_outside(tmp_path: Path, name: str):
    plant(tmp_path / "outside", SMALL)
    plant(tmp_path / "runs" / "first", SMALL)
    with pytest.raises(RunError):
        RunFinder((tmp_path / "runs",)).store(name)


def test_a_name_of_any_bytes_can_be_shown(tmp_path: Path):
    plant(Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff")), SMALL)
    assert names(tmp_path) == ["bad�"]
