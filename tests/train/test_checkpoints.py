"""Checkpoints come back exactly, or are refused with a sentence; damage costs one checkpoint, not the run."""

import errno
import json
import logging
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.errors import CheckpointError
from esper.serialization import Checkpoints

TENSORS = {"policy.weight": torch.arange(6.0).reshape(2, 3), "step": torch.tensor(4)}
STATE = {"cursor": 17, "generator": {"state": 2**127 + 1}, "order": [3, 1, 2]}


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints")


def tensors_file(checkpoints: Checkpoints, iteration: int) -> Path:
    return checkpoints.folder / f"iteration-{iteration:08d}.safetensors"


def manifest_file(checkpoints: Checkpoints, iteration: int) -> Path:
    return checkpoints.folder / f"iteration-{iteration:08d}.json"


def edit_manifest(checkpoints: Checkpoints, iteration: int, change: Callable[[dict[str, Any]], Any]) -> None:
    path = manifest_file(checkpoints, iteration)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype
        assert torch.equal(tensor, right[name])


class TestSavingAndLoading:
    def test_tensors_and_state_come_back_exactly(self, checkpoints: Checkpoints):
        written = checkpoints.save(3, TENSORS, STATE)
        read = checkpoints.latest()
        assert (read.iteration, read.sha256, read.path) == (3, written.sha256, tensors_file(checkpoints, 3))
        assert read.state == STATE
        assert_same(read.tensors, TENSORS)

    @pytest.mark.parametrize(
        "dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float32, torch.float64]
    )
    @pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (2, 3)])
    def test_types_and_shapes_are_kept(self, checkpoints: Checkpoints, dtype: torch.dtype, shape: tuple[int, ...]):
        tensors = {"x": torch.ones(shape, dtype=dtype)}
        checkpoints.save(0, tensors, {})
        assert_same(checkpoints.latest().tensors, tensors)

    def test_views_and_shared_memory_are_saved_by_value(self, checkpoints: Checkpoints):
        base = torch.arange(12.0).reshape(3, 4)
        tensors = {"base": base, "same": base, "transposed": base.T, "row": base[1], "wide": base[:, :1].expand(3, 5)}
        checkpoints.save(0, tensors, {})
        assert_same(checkpoints.latest().tensors, tensors)

    def test_a_saved_checkpoint_does_not_follow_later_changes(self, checkpoints: Checkpoints):
        tensor = torch.zeros(3, requires_grad=True)
        written = checkpoints.save(0, {"x": tensor}, {})
        with torch.no_grad():
            tensor.add_(1.0)
        assert torch.equal(written.tensors["x"], torch.zeros(3))

    @given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(), st.lists))
    def test_any_json_state_comes_back(self, tmp_path_factory: pytest.TempPathFactory, value: Any):
        checkpoints = Checkpoints(tmp_path_factory.getbasetemp() / "any-state")
        checkpoints.save(0, {}, {"value": value})
        assert checkpoints.latest().state == {"value": value}

    def test_only_the_last_are_kept(self, tmp_path: Path):
        checkpoints = Checkpoints(tmp_path, keep=2)
        for iteration in range(1, 6):
            checkpoints.save(iteration, TENSORS, STATE)
        assert checkpoints.iterations() == [4, 5]
        assert len(list(tmp_path.iterdir())) == 4

    def test_saving_an_iteration_again_replaces_it(self, checkpoints: Checkpoints):
        checkpoints.save(1, TENSORS, {"try": 1})
        checkpoints.save(1, TENSORS, {"try": 2})
        assert checkpoints.latest().state == {"try": 2}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Checkpoints], object]] = {
    "flipped tensors": lambda own: flip(tensors_file(own, 2)),
    "truncated tensors": lambda own: os.truncate(tensors_file(own, 2), 10),
    "no tensors": lambda own: tensors_file(own, 2).unlink(),
    "truncated manifest": lambda own: os.truncate(manifest_file(own, 2), 10),
    "empty manifest": lambda own: manifest_file(own, 2).write_text(""),
    "garbled manifest": lambda own: manifest_file(own, 2).write_bytes(b"\xff\xfe\x00" * 9),
    "nested manifest": lambda own: manifest_file(own, 2).write_text("[" * 200_000),
    "changed state": lambda own: edit_manifest(own, 2, lambda content: content["state"].update(cursor=18)),
    "lost field": lambda own: edit_manifest(own, 2, lambda content: content.pop("state")),
    "another iteration": lambda own: edit_manifest(own, 2, lambda content: content.update(iteration=5)),
}


class TestDamage:
    @pytest.mark.parametrize("name", DAMAGES)
    def test_the_checkpoint_before_serves_with_a_warning(
        self, checkpoints: Checkpoints, name: str, caplog: pytest.LogCaptureFixture
    ):
        checkpoints.save(1, TENSORS, {"cursor": 1})
        checkpoints.save(2, TENSORS, {"cursor": 2})
        DAMAGES[name](checkpoints)
        with caplog.at_level(logging.WARNING):
            latest = checkpoints.latest()
        assert (latest.iteration, latest.state) == (1, {"cursor": 1})
        assert "going back to the checkpoint before it" in caplog.text
        advice = "use an earlier checkpoint, or start a new run"
        with pytest.raises(CheckpointError, match=f"iteration-00000002.*: {advice}$"):
            checkpoints.load(2)

    def test_with_none_left_the_way_out_is_named(self, checkpoints: Checkpoints):
        checkpoints.save(1, TENSORS, STATE)
        os.truncate(tensors_file(checkpoints, 1), 5)
        with pytest.raises(CheckpointError, match=f"no usable checkpoint in {checkpoints.folder}: start a new run"):
            checkpoints.latest()

    def test_tensors_without_a_manifest_are_no_checkpoint(self, checkpoints: Checkpoints):
        checkpoints.save(1, TENSORS, STATE)
        checkpoints.save(2, TENSORS, STATE)
        manifest_file(checkpoints, 2).unlink()
        assert checkpoints.latest().iteration == 1


class TestStrangers:
    def test_a_foreign_manifest_is_refused(self, checkpoints: Checkpoints):
        checkpoints.save(1, TENSORS, STATE)
        manifest_file(checkpoints, 2).write_text('{"name": "someone else\'s"}')
        with pytest.raises(CheckpointError, match="is not an Esper checkpoint: move it"):
            checkpoints.latest()

    def test_another_version_is_refused(self, checkpoints: Checkpoints):
        checkpoints.save(1, TENSORS, STATE)
        checkpoints.save(2, TENSORS, STATE)
        edit_manifest(checkpoints, 2, lambda content: content.update(version=9))
        with pytest.raises(CheckpointError, match="has format version 9, this Esper reads 2"):
            checkpoints.latest()


class TestFailingWrites:
    @pytest.fixture
    def tiny_files(self) -> Iterator[None]:
        """The system refuses files above 64 KiB."""
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, hard))
        yield
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    def test_a_write_that_fails_halfway_leaves_the_earlier_ones(self, checkpoints: Checkpoints, tiny_files: None):
        checkpoints.save(1, TENSORS, STATE)
        with pytest.raises(CheckpointError, match="checkpoint 2 is not saved, earlier ones are intact: cannot write"):
            checkpoints.save(2, {"big": torch.zeros(100_000)}, STATE)
        assert {path.name for path in checkpoints.folder.iterdir()} == {
            "iteration-00000001.safetensors",
            "iteration-00000001.json",
        }
        assert_same(checkpoints.latest().tensors, TENSORS)

    @pytest.mark.parametrize("failing", range(4))
    def test_a_full_disk_at_any_moment_leaves_the_earlier_ones(
        self, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, failing: int
    ):
        checkpoints.save(1, TENSORS, STATE)
        real, calls = os.fsync, iter(range(100))

        def fsync(descriptor: int) -> None:
            if next(calls) == failing:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)
        with pytest.raises(CheckpointError, match=r"No space left on device\): free some space"):
            checkpoints.save(2, TENSORS, {"new": True})
        monkeypatch.undo()
        # The last fsync comes after the rename of the manifest: then the new checkpoint is whole.
        assert checkpoints.latest().iteration == (2 if failing == 3 else 1)
        assert_same(checkpoints.latest().tensors, TENSORS)

    def test_leftovers_of_a_killed_write_are_cleaned_up(self, checkpoints: Checkpoints):
        checkpoints.save(1, TENSORS, STATE)
        leftover = checkpoints.folder / ".iteration-00000002.safetensors.partial"
        leftover.write_bytes(b"half")
        checkpoints.save(2, TENSORS, STATE)
        assert not leftover.exists()
