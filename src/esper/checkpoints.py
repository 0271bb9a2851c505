"""Checkpoints that are whole or not there, and that load without running anything from the file.

A checkpoint is two files: the tensors as safetensors, and a JSON manifest with their hash. The manifest is written
last, so a checkpoint exists exactly when its manifest does. Paths follow from the folder and the iteration alone;
nothing that a file says is ever used as one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, ValidationError
from safetensors.torch import save

from esper import tensor_file
from esper.errors import CheckpointError, RunError
from esper.files import TEMPORARY_SUFFIX, UnsuitableFileError, read_bounded, write_atomically
from esper.parsing import parse_json
from esper.settings import Settings

FORMAT_VERSION = 2
MOST_MANIFEST_BYTES = 8 * 2**20
"""More than this is no manifest."""

_Count = Annotated[int, Field(strict=True, ge=0)]
_Hash = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class DamagedError(CheckpointError):
    """A checkpoint that was ours and whole once; the one before it may serve."""


class Manifest(Settings):
    """What the JSON file says."""

    format: Literal["esper-checkpoint"] = "esper-checkpoint"
    version: Literal[2] = FORMAT_VERSION
    iteration: _Count
    tensors_bytes: _Count
    tensors_sha256: _Hash
    state_sha256: _Hash
    state: dict[str, Any]

    @classmethod
    def of(cls, iteration: int, tensors: bytes, state: Mapping[str, Any]) -> Manifest:
        """The manifest of a new checkpoint."""
        return cls(
            iteration=iteration,
            tensors_bytes=len(tensors),
            tensors_sha256=hashlib.sha256(tensors).hexdigest(),
            state_sha256=_state_hash(state),
            state=dict(state),
        )

    def encode(self) -> bytes:
        """As JSON; CheckpointError if that would be too large to be read again."""
        data = json.dumps(self.model_dump()).encode()
        if len(data) > MOST_MANIFEST_BYTES:
            raise CheckpointError(f"the state takes {len(data)} bytes as JSON: keep large values as tensors")
        return data


def decode_manifest(data: bytes, path: Path) -> Manifest:
    """The manifest in ``data``, read from ``path``.

    Raises:
        CheckpointError: it is damaged (then DamagedError), foreign or of another format version.
    """
    try:
        content = parse_json(data)
    except ValueError as error:
        raise DamagedError(f"checkpoint manifest {path} is torn or corrupt") from error
    _check_version(content, path)
    try:
        manifest = Manifest.model_validate(content)
        whole = _state_hash(manifest.state) == manifest.state_sha256
    except ValidationError as error:
        raise DamagedError(f"checkpoint manifest {path} is corrupt ({error.errors()[0]['msg']})") from error
    except RecursionError as error:
        raise DamagedError(f"checkpoint manifest {path} is nested too deeply") from error
    if not whole:
        raise DamagedError(f"checkpoint manifest {path} is corrupt (its hash differs)")
    return manifest


def _check_version(content: Any, path: Path) -> None:
    match content:
        case {"format": "esper-checkpoint", "version": int(version)}:
            if version != FORMAT_VERSION:
                raise CheckpointError(
                    f"{path} has format version {reprlib.repr(version)}, this Esper reads {FORMAT_VERSION}: "
                    "use the Esper that wrote it"
                )
        case _:
            raise CheckpointError(f"{path} is not an Esper checkpoint: move it out of the run directory")


def _state_hash(state: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


_MANIFEST_NAME = re.compile(r"iteration-([0-9]{8})\.json")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds: named tensors (on the CPU) and a state of JSON values."""

    path: Path
    iteration: int
    sha256: str
    tensors: dict[str, torch.Tensor]
    state: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run, of which the last `keep` stay."""

    def __init__(self, folder: Path, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError("at least one checkpoint has to be kept")
        self.folder = folder
        self.keep = keep

    def save(self, iteration: int, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> Checkpoint:
        """Write a checkpoint durably, then delete the oldest beyond `keep`.

        Raises:
            CheckpointError: it cannot be written; earlier checkpoints are untouched.
        """
        copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
        data = save(copies)
        written = Manifest.of(iteration, data, state)
        content = written.encode()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self._tensors_path(iteration), data)
            write_atomically(self._manifest_path(iteration), content)
            self._delete_old()
        except (OSError, RunError) as error:
            raise CheckpointError(f"checkpoint {iteration} is not saved, earlier ones are intact: {error}") from error
        return Checkpoint(self._tensors_path(iteration), iteration, written.tensors_sha256, copies, dict(state))

    def iterations(self) -> list[int]:
        """Iterations that have a checkpoint, oldest first."""
        names = (_MANIFEST_NAME.fullmatch(path.name) for path in self.folder.glob("iteration-*.json"))
        return sorted(int(name[1]) for name in names if name is not None)

    def latest(self) -> Checkpoint:
        """The newest undamaged checkpoint; a damaged one is passed over with a logged warning.

        Raises:
            CheckpointError: there is none, or the newest is foreign or of another format version.
        """
        for iteration in reversed(self.iterations()):
            try:
                return self.load(iteration)
            except DamagedError as damage:
                _log.warning("%s; going back to the checkpoint before it", damage)
        raise CheckpointError(f"no usable checkpoint in {self.folder}: start a new run")

    def load(self, iteration: int) -> Checkpoint:
        """Read and verify one checkpoint.

        Raises:
            CheckpointError: it is missing, damaged, foreign or of another format version.
        """
        source, path = self._manifest_path(iteration), self._tensors_path(iteration)
        found = decode_manifest(_read(source, MOST_MANIFEST_BYTES), source)
        if found.iteration != iteration:
            raise DamagedError(f"checkpoint {path} says it is of iteration {reprlib.repr(found.iteration)}")
        data = _read(path, found.tensors_bytes)
        if len(data) < found.tensors_bytes or hashlib.sha256(data).hexdigest() != found.tensors_sha256:
            raise DamagedError(f"checkpoint {path} is torn or corrupt (its size or its hash differs)")
        try:
            tensors = tensor_file.decode(data)
        except ValueError as error:
            raise CheckpointError(f"{path} is not a safetensors file ({error}): start a new run") from error
        return Checkpoint(path, iteration, found.tensors_sha256, tensors, found.state)

    def _tensors_path(self, iteration: int) -> Path:
        return self.folder / f"iteration-{iteration:08d}.safetensors"

    def _manifest_path(self, iteration: int) -> Path:
        return self.folder / f"iteration-{iteration:08d}.json"

    def _delete_old(self) -> None:
        for leftover in self.folder.glob(f".iteration-*{TEMPORARY_SUFFIX}"):
            leftover.unlink()
        for iteration in self.iterations()[: -self.keep]:
            # The manifest first: without it the tensors are no checkpoint.
            self._manifest_path(iteration).unlink()
            self._tensors_path(iteration).unlink(missing_ok=True)


def _read(path: Path, most: int) -> bytes:
    try:
        return read_bounded(path, most)
    except FileNotFoundError as error:
        raise DamagedError(f"checkpoint file {path} is missing") from error
    except UnsuitableFileError as error:
        raise DamagedError(f"checkpoint file {path} is corrupt ({error.strerror})") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path} ({error.strerror}): check its permissions") from error
