"""A run directory is made once and recognised later."""

from pathlib import Path

import pytest

from esper.errors import RunError
from esper.runs.run_directory import RunDirectory


def test_a_new_directory_is_made_with_its_parents(tmp_path: Path):
    run = RunDirectory.create(tmp_path / "runs" / "first")
    assert run.checkpoints.is_dir()
    assert run.config == tmp_path / "runs" / "first" / "config.yaml"


def test_an_empty_directory_is_taken(tmp_path: Path):
    assert RunDirectory.create(tmp_path).path == tmp_path


def test_a_directory_with_content_is_refused(tmp_path: Path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(RunError, match=r"is not empty: choose a new directory$"):
        RunDirectory.create(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_in_the_way_is_refused(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot make the run directory"):
        RunDirectory.create(tmp_path / "file" / "run")


@pytest.mark.parametrize("left", ["run.lock", ".config.yaml.partial"])
def test_what_a_killed_start_left_is_taken(tmp_path: Path, left: str):
    RunDirectory.create(tmp_path)
    (tmp_path / left).touch()
    assert RunDirectory.create(tmp_path).checkpoints.is_dir()


@pytest.mark.parametrize("there", ["config.yaml", "run.db", "checkpoints/iteration-00000000.safetensors"])
def test_a_run_that_has_begun_is_not_begun_again(tmp_path: Path, there: str):
    RunDirectory.create(tmp_path)
    (tmp_path / there).touch()
    with pytest.raises(RunError, match="is not empty"):
        RunDirectory.create(tmp_path)


def test_a_run_that_was_killed_before_it_had_a_store_is_opened(tmp_path: Path):
    run = RunDirectory.create(tmp_path)
    run.config.touch()
    with pytest.raises(RunError, match="has no run.db"):
        RunDirectory.open(tmp_path)
    run.lock.touch()
    with RunDirectory.open(tmp_path).open_store() as store:
        assert store.metadata() == {}
    run.store.unlink()
    (run.checkpoints / "iteration-00000000.json").touch()
    with pytest.raises(RunError, match="has no run.db"):
        RunDirectory.open(tmp_path)


def test_opening_needs_an_existing_directory(tmp_path: Path):
    with pytest.raises(RunError, match=f"no run at {tmp_path / 'nowhere'}"):
        RunDirectory.open(tmp_path / "nowhere")


@pytest.mark.parametrize("missing", ["config.yaml", "run.db"])
def test_opening_needs_a_run(tmp_path: Path, missing: str):
    for name in {"config.yaml", "run.db"} - {missing}:
        (tmp_path / name).touch()
    with pytest.raises(RunError, match=f"is not a run, it has no {missing}"):
        RunDirectory.open(tmp_path)


def test_a_run_is_opened(tmp_path: Path):
    made = RunDirectory.create(tmp_path / "run")
    made.config.touch()
    made.store.touch()
    assert RunDirectory.open(tmp_path / "run") == made
