"""Checkpoints of a run, each written completely or not at all; if the newest is damaged, the one before it is used."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import save as encode_tensors
from torch import Tensor

from esper.errors import CheckpointError, RunError
from esper.files import TEMPORARY_SUFFIX, lock_folder, write_atomically
from esper.serialization.state_files import (
    MOST_MANIFEST_BYTES,
    Count,
    DamagedError,
    Hash,
    Manifest,
    StateFormat,
    copy_to_cpu,
    describe_tensors,
)


class CheckpointManifest(Manifest):
    """The JSON file of a checkpoint."""

    format: Literal["esper-checkpoint"] = "esper-checkpoint"
    version: Literal[2] = 2
    iteration: Count
    state_sha256: Hash
    state: dict[str, Any]

    def encode(self) -> str:
        """The manifest as JSON, with NaN and Infinity; CheckpointError if it is too large to be read again."""
        text = json.dumps(self.model_dump())
        if len(text) > MOST_MANIFEST_BYTES:
            raise CheckpointError(f"the state takes {len(text)} bytes as JSON: keep large values as tensors")
        return text


_ADVICE = ": use an earlier checkpoint, or start a new run"
_FORMAT = StateFormat(
    name="esper-checkpoint",
    versions=(2,),
    manifest=CheckpointManifest,
    what="checkpoint",
    damaged_advice=_ADVICE,
    missing_advice=_ADVICE,
    foreign_advice="is not an Esper checkpoint: move it out of the run directory",
)


def _hash_state(state: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


_MANIFEST_NAME = re.compile(r"iteration-([0-9]{8})\.json")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint: named tensors on the CPU, and a state of JSON values."""

    path: Path
    iteration: int
    sha256: str
    tensors: dict[str, Tensor]
    state: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run; the newest `keep` are kept."""

    def __init__(self, folder: Path, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError("at least one checkpoint has to be kept")
        self.folder = folder
        self.keep = keep

    def save(self, iteration: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Checkpoint:
        """Write a checkpoint durably, then delete the oldest beyond `keep`."""
        copies = copy_to_cpu(tensors)
        data = encode_tensors(copies)
        manifest = CheckpointManifest(
            iteration=iteration, state=dict(state), state_sha256=_hash_state(state), **describe_tensors(data)
        )
        content = manifest.encode()
        # The manifest last: a checkpoint exists once its manifest does.
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with lock_folder(self.folder):
                write_atomically(self._tensors_path(iteration), data)
                write_atomically(self._manifest_path(iteration), content)
                self._delete_old()
        except (OSError, RunError) as error:
            raise CheckpointError(f"checkpoint {iteration} is not saved, earlier ones are intact: {error}") from error
        return Checkpoint(self._tensors_path(iteration), iteration, manifest.tensors_sha256, copies, dict(state))

    def iterations(self) -> list[int]:
        """The iterations that have a checkpoint, oldest first."""
        names = (_MANIFEST_NAME.fullmatch(path.name) for path in self.folder.glob("iteration-*.json"))
        return sorted(int(name[1]) for name in names if name is not None)

    def latest(self) -> Checkpoint:
        """Load the newest undamaged checkpoint; damaged ones are skipped with a logged warning."""
        iterations = self.iterations()
        for iteration in reversed(iterations):
            try:
                return self.load(iteration)
            except DamagedError as damage:
                # A run that goes on deletes old checkpoints: begin again with its new ones.
                if self.iterations() != iterations:
                    return self.latest()
                _log.warning("%s; going back to the checkpoint before it", damage)
        raise CheckpointError(f"no usable checkpoint in {self.folder}: start a new run")

    def load(self, iteration: int) -> Checkpoint:
        """Read and verify the checkpoint of an iteration."""
        # The manifest must be intact and about this iteration; then the tensors must have its hash.
        source, path = self._manifest_path(iteration), self._tensors_path(iteration)
        manifest = _FORMAT.read_manifest(source)
        try:
            intact = _hash_state(manifest.state) == manifest.state_sha256
        except RecursionError as error:
            raise DamagedError(f"checkpoint manifest {source} is nested too deeply{_ADVICE}") from error
        if not intact:
            raise DamagedError(f"checkpoint manifest {source} is corrupt (its hash differs){_ADVICE}")
        if manifest.iteration != iteration:
            raise DamagedError(
                f"checkpoint {path} has the manifest of iteration {reprlib.repr(manifest.iteration)}{_ADVICE}"
            )
        return Checkpoint(
            path, iteration, manifest.tensors_sha256, _FORMAT.read_tensors(path, manifest), manifest.state
        )

    def _tensors_path(self, iteration: int) -> Path:
        return self.folder / f"iteration-{iteration:08d}.safetensors"

    def _manifest_path(self, iteration: int) -> Path:
        return self.folder / f"iteration-{iteration:08d}.json"

    def _delete_old(self) -> None:
        # Files of a process that was killed while it wrote them.
        for leftover in self.folder.glob(f".iteration-*{TEMPORARY_SUFFIX}"):
            leftover.unlink()
        for iteration in self.iterations()[: -self.keep]:
            # The manifest first: without it the tensors are no checkpoint.
            self._manifest_path(iteration).unlink()
            self._tensors_path(iteration).unlink(missing_ok=True)
