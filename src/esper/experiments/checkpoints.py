"""Checkpoints that are whole or not there, and that load without running anything from the file.

A checkpoint is two files: the tensors as safetensors, and a JSON manifest with their hash. The manifest is written
last, so a checkpoint exists exactly when its manifest does.
"""

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save

from esper.errors import CheckpointError, RunError
from esper.files import TEMPORARY_SUFFIX, write_atomically
from esper.settings import Settings

FORMAT = "esper-checkpoint"
FORMAT_VERSION = 1
_MANIFEST_NAME = re.compile(r"iteration-(\d{8})\.json")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds: named tensors (on the CPU) and a state of JSON values."""

    path: Path
    iteration: int
    sha256: str
    tensors: dict[str, torch.Tensor]
    state: dict[str, Any]

    def check_against(self, expected: Mapping[str, torch.Tensor]) -> None:
        """Refuse tensors other than those expected in name, shape and type.

        Raises:
            CheckpointError: naming the first tensor that is missing, not known, or different.
        """
        advice = "resume with the configuration and the Esper that wrote it"
        for name, tensor in expected.items():
            found = self.tensors.get(name)
            if found is None:
                raise CheckpointError(f"{self.path} lacks tensor {name!r}: {advice}")
            if found.shape != tensor.shape or found.dtype != tensor.dtype:
                difference = f"as {_describe(found)} where {_describe(tensor)} is needed"
                raise CheckpointError(f"{self.path} holds tensor {name!r} {difference}: {advice}")
        for name in self.tensors:
            if name not in expected:
                raise CheckpointError(f"{self.path} holds an unknown tensor {name!r}: {advice}")


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
        manifest = _Manifest(
            format=FORMAT,
            version=FORMAT_VERSION,
            iteration=iteration,
            tensors_sha256=hashlib.sha256(data).hexdigest(),
            state_sha256=_state_hash(state),
            state=dict(state),
        )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self._tensors_path(iteration), data)
            write_atomically(self._manifest_path(iteration), json.dumps(manifest.model_dump()))
            self._delete_old()
        except (OSError, RunError) as error:
            raise CheckpointError(f"checkpoint {iteration} is not saved, earlier ones are intact: {error}") from error
        return Checkpoint(self._tensors_path(iteration), iteration, manifest.tensors_sha256, copies, dict(state))

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
            except _DamagedError as damage:
                _log.warning("%s; going back to the checkpoint before it", damage)
        raise CheckpointError(f"no usable checkpoint in {self.folder}: start a new run")

    def load(self, iteration: int) -> Checkpoint:
        """Read and verify one checkpoint.

        Raises:
            CheckpointError: it is missing, damaged, foreign or of another format version.
        """
        manifest = _read_manifest(self._manifest_path(iteration))
        path = self._tensors_path(iteration)
        data = _read(path)
        if hashlib.sha256(data).hexdigest() != manifest.tensors_sha256:
            raise _DamagedError(f"checkpoint {path} is torn or corrupt (its hash differs)")
        if manifest.iteration != iteration:
            raise _DamagedError(f"checkpoint {path} says it is of iteration {manifest.iteration}")
        try:
            tensors = load(data)
        except SafetensorError as error:
            raise CheckpointError(f"{path} is not a safetensors file ({error}): start a new run") from error
        return Checkpoint(path, iteration, manifest.tensors_sha256, tensors, manifest.state)

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


class _DamagedError(CheckpointError):
    """A checkpoint that was ours and whole once; the one before it may serve."""


class _Manifest(Settings):
    format: Literal["esper-checkpoint"]
    version: int
    iteration: int = Field(ge=0)
    tensors_sha256: str
    state_sha256: str
    state: dict[str, Any]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise _DamagedError(f"checkpoint file {path} is missing") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path} ({error.strerror}): check its permissions") from error


def _read_manifest(path: Path) -> _Manifest:
    try:
        content: Any = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise _DamagedError(f"checkpoint manifest {path} is torn or corrupt") from error
    version = _version_of(content, path)
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {version}, this Esper reads {FORMAT_VERSION}: use the Esper that wrote it"
        )
    try:
        manifest = _Manifest.model_validate(content)
    except ValidationError as error:
        raise _DamagedError(f"checkpoint manifest {path} is corrupt ({error.errors()[0]['msg']})") from error
    if _state_hash(manifest.state) != manifest.state_sha256:
        raise _DamagedError(f"checkpoint manifest {path} is corrupt (its hash differs)")
    return manifest


def _version_of(content: Any, path: Path) -> Any:
    match content:
        case {"format": "esper-checkpoint", "version": version}:
            return version
        case _:
            raise CheckpointError(f"{path} is not an Esper checkpoint: move it out of the run directory")


def _state_hash(state: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
