"""The manifest of a checkpoint: what it is, the size and hash of its tensors, and its state."""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from esper.errors import CheckpointError
from esper.parsing import parse_json
from esper.settings import Settings

FORMAT_VERSION = 2
MOST_BYTES = 8 * 2**20
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
        if len(data) > MOST_BYTES:
            raise CheckpointError(f"the state takes {len(data)} bytes as JSON: keep large values as tensors")
        return data


def decode(data: bytes, path: Path) -> Manifest:
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
