"""Saved state: tensors as safetensors, everything else as JSON. Reading validates files and runs no code from them.

A saved state is two files: the tensors, and a JSON manifest with their hash, which is written last. So a state exists
exactly when its manifest does. Nothing in a file is used as a path.
"""

import hashlib
import json
import logging
import math
import re
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
import torch
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from esper.config.settings import Settings
from esper.errors import CheckpointError, RunError
from esper.files import (
    TEMPORARY_SUFFIX,
    UnsuitableFileError,
    lock_folder,
    parse_json,
    read_bounded,
    write_atomically,
)

_Value = TypeVar("_Value")
_log = logging.getLogger(__name__)


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be saved as plain values and loaded again."""

    def state_dict(self) -> dict[str, Any]:
        """The state, as plain values only."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        ...


# Values in memory: plain copies, and what they were made of.


def to_plain(value: Any) -> Any:
    """Copy a value into tensors, numbers, text, lists and dictionaries; `from_plain` restores it.

    Args:
        value: Arrays, tensors, numbers, text, and lists, tuples, dictionaries, dataclasses and `Stateful` of them.
    """
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(cast("np.ndarray[Any, Any]", value).copy())
    if isinstance(value, Stateful):
        return value.state_dict()
    if is_dataclass(value):
        return {field.name: to_plain(vars(value)[field.name]) for field in fields(value)}
    if isinstance(value, list | tuple):
        return [to_plain(part) for part in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {str(name): to_plain(part) for name, part in cast("dict[Any, Any]", value).items()}
    if value is None or type(value) in (bool, int, float, str):  # not subclasses, which torch.load does not read
        return value
    raise CheckpointError(
        f"a state holds a {type(value).__name__}, which cannot be saved: make it of arrays, tensors, numbers, text, "
        "lists and dictionaries, or give it state_dict and load_state_dict"
    )


def from_plain(like: Any, plain: Any, name: str) -> Any:
    """Restore the value that `to_plain` copied into ``plain``.

    Args:
        like: A value of the same structure, from which types, shapes and devices are taken. A `Stateful` loads the
            state itself.
        plain: What `to_plain` returned.
        name: What is being restored, for error messages.
    """

    def check_type(kind: type[Any]) -> Any:
        if type(plain) is kind:
            return plain
        raise CheckpointError(f"{name} is a {type(plain).__name__} in the saved state, but must be a {kind.__name__}")

    def check_tensor(like: Tensor) -> Tensor:
        saved = check_type(Tensor)
        if saved.shape == like.shape and saved.dtype == like.dtype:
            return saved
        there, here = (f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in (saved, like))
        raise CheckpointError(f"{name} is {there} in the saved state, but {here} here")

    if isinstance(like, Tensor):
        return check_tensor(like).to(like.device, copy=True)
    if isinstance(like, np.ndarray):
        return check_tensor(torch.from_numpy(cast("np.ndarray[Any, Any]", like))).numpy(force=True).copy()
    if isinstance(like, Stateful):
        like.load_state_dict(check_type(dict))
        return like
    if is_dataclass(like) and not isinstance(like, type):
        parts = from_plain({field.name: vars(like)[field.name] for field in fields(like)}, plain, name)
        return type(like)(**parts)
    if isinstance(like, dict):
        # Keys were saved as text.
        values, saved = cast("dict[Any, Any]", like), check_type(dict)
        keys = {str(key): key for key in values}
        if keys.keys() != saved.keys():
            there, here = (", ".join(sorted(names)) or "nothing" for names in (saved, keys))
            raise CheckpointError(f"{name} has {there} in the saved state, but {here} here")
        return {key: from_plain(values[key], saved[text], f"{name}.{text}") for text, key in keys.items()}
    if isinstance(like, list | tuple):
        items, saved = cast("list[Any]", like), check_type(list)
        if len(items) != len(saved):
            raise CheckpointError(f"{name} has {len(saved)} parts in the saved state, but {len(items)} here")
        parts = [from_plain(item, saved[index], f"{name}[{index}]") for index, item in enumerate(items)]
        if not isinstance(like, tuple):
            return parts
        kind = cast("type[Any]", type(cast("Any", like)))
        return tuple(parts) if kind is tuple else kind(*parts)  # a named tuple takes its fields
    return check_type(cast("type[Any]", type(like)))


def require_in_range(tensors: Mapping[str, Tensor], what: str, non_negative: Collection[str] = ()) -> None:
    """Refuse numbers that cannot have been saved by training.

    Args:
        tensors: By name.
        what: Where they are from, for error messages.
        non_negative: Last parts of the names of those that are never below 0.
    """
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise CheckpointError(f"{what} has a value in {name!r} that is not finite: use an earlier checkpoint")
        if name.rpartition(".")[2] in non_negative and bool((tensor < 0).any()):
            raise CheckpointError(f"{what} has a value in {name!r} that is below 0: use an earlier checkpoint")


def strip_prefix(prefix: str, named: Mapping[str, _Value]) -> dict[str, _Value]:
    """The values whose names begin with ``prefix``, under their names without it."""
    return {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}


# Files: a manifest and its tensors.

Count = Annotated[int, Field(strict=True, ge=0)]
Hash = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]

MOST_HEADER_BYTES = 4 * 2**20
MOST_ELEMENTS = 2**40
"""The largest product of a tensor's axes, empty ones counted as one: larger products may overflow."""
MOST_MANIFEST_BYTES = 8 * 2**20
_LENGTH_BYTES = 8


class DamagedError(CheckpointError):
    """A state of Esper's that was damaged after it was saved; an earlier one may be intact."""


class Manifest(Settings):
    """The fields that the JSON file of every saved state has."""

    tensors_bytes: Count
    tensors_sha256: Hash


M = TypeVar("M", bound=Manifest)


@dataclass(frozen=True)
class StateFormat(Generic[M]):
    """A kind of saved state: its manifest's type, and the advice in messages if it cannot be read."""

    name: str
    """The manifest's field ``format``."""
    versions: tuple[int, ...]
    """Values of its field ``version`` that can be read."""
    manifest: type[M]
    what: str
    """What such a state is called in messages."""
    damaged_advice: str = ""
    missing_advice: str = ""
    foreign_advice: str = ""

    def read_manifest(self, path: Path) -> M:
        """Read the manifest in the file ``path``."""
        what = f"{self.what} manifest {path}"
        try:
            content = parse_json(self._read(path, MOST_MANIFEST_BYTES, what))
        except ValueError as error:
            raise DamagedError(f"{what} is torn or corrupt{self.damaged_advice}") from error
        match content:
            case {"format": self.name, "version": int(version)}:
                if version not in self.versions:
                    raise CheckpointError(
                        f"{path} has format version {reprlib.repr(version)}, this Esper reads "
                        f"{', '.join(map(str, self.versions))}: use the Esper that wrote it"
                    )
            case _:
                raise CheckpointError(f"{path} {self.foreign_advice}")
        try:
            return self.manifest.model_validate(content)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise DamagedError(f"{what} is corrupt at {place} ({first['msg']}){self.damaged_advice}") from error
        except RecursionError as error:
            raise DamagedError(f"{what} is nested too deeply{self.damaged_advice}") from error

    def read_tensors(self, path: Path, manifest: Manifest) -> dict[str, Tensor]:
        """Read a manifest's tensors from the file ``path``, onto the CPU."""
        # The whole file is hashed before anything in it is parsed.
        what = f"{self.what} file {path}"
        data = self._read(path, manifest.tensors_bytes, what)
        if len(data) < manifest.tensors_bytes or hashlib.sha256(data).hexdigest() != manifest.tensors_sha256:
            raise DamagedError(f"{what} is torn or corrupt (its size or its hash differs){self.damaged_advice}")
        try:
            return decode_tensors(data)
        except ValueError as error:
            raise CheckpointError(f"{path} is not a safetensors file ({error}){self.damaged_advice}") from error

    def _read(self, path: Path, most: int, what: str) -> bytes:
        try:
            return read_bounded(path, most)
        except FileNotFoundError as error:
            raise DamagedError(f"{what} is missing{self.missing_advice}") from error
        except UnsuitableFileError as error:
            raise DamagedError(f"{what} is corrupt ({error.strerror}){self.damaged_advice}") from error
        except OSError as error:
            raise CheckpointError(f"cannot read {path} ({error.strerror}): check its permissions") from error


def copy_to_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous copies of tensors that share no memory, as safetensors requires."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def describe_tensors(data: bytes) -> dict[str, Any]:
    """The fields of a `Manifest` for a tensors file."""
    return {"tensors_bytes": len(data), "tensors_sha256": hashlib.sha256(data).hexdigest()}


def _check_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    if math.prod(max(length, 1) for length in shape) > MOST_ELEMENTS:
        raise ValueError("a tensor is too large")
    return shape


class _Entry(Settings):
    """A tensor's entry in the header of a safetensors file."""

    dtype: Literal["BOOL", "U8", "I8", "I16", "I32", "I64", "F16", "BF16", "F32", "F64", "U16", "U32", "U64", "C64"]
    shape: Annotated[tuple[Count, ...], Field(max_length=16), AfterValidator(_check_shape)]
    data_offsets: tuple[Count, Count]


_HEADER = TypeAdapter(dict[str, _Entry])


def decode_tensors(data: bytes) -> dict[str, Tensor]:
    """Read the tensors in the bytes of a safetensors file, onto the CPU; ValueError if it is damaged."""
    # The header is checked before safetensors reads it: sizes in it could make it allocate any amount of memory.
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if length > min(len(data) - _LENGTH_BYTES, MOST_HEADER_BYTES):
        raise ValueError("its header is too long")
    try:
        _HEADER.validate_python(parse_json(data[_LENGTH_BYTES : _LENGTH_BYTES + length]))
        return load(data)
    except ValidationError as error:
        raise ValueError(f"its header is wrong: {error.errors()[0]['msg']}") from error
    except SafetensorError as error:
        raise ValueError("its header does not fit its contents") from error


# Checkpoints of a run; if the newest is damaged, the one before it is used.


class CheckpointManifest(Manifest):
    """The JSON file of a checkpoint."""

    format: Literal["esper-checkpoint"] = "esper-checkpoint"
    version: Literal[2] = 2
    iteration: Count
    state_sha256: Hash
    state: dict[str, Any]


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
_MANIFEST_NAME = re.compile(r"iteration-([0-9]{8})\.json")


def _hash_state(state: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint: named tensors on the CPU, and a state of JSON values."""

    path: Path
    iteration: int
    sha256: str
    tensors: dict[str, Tensor]
    state: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run; the newest `keep`, at least 1, are kept."""

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self.folder = folder
        self.keep = keep

    def save(self, iteration: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Checkpoint:
        """Write a checkpoint durably, then delete the oldest beyond `keep`."""
        copies = copy_to_cpu(tensors)
        data = save(copies)
        manifest = CheckpointManifest(
            iteration=iteration, state=dict(state), state_sha256=_hash_state(state), **describe_tensors(data)
        )
        content = json.dumps(manifest.model_dump())  # with NaN and Infinity, which pydantic would drop
        if len(content) > MOST_MANIFEST_BYTES:
            raise CheckpointError(f"the state takes {len(content)} bytes as JSON: keep large values as tensors")
        # The manifest last: a checkpoint exists once its manifest does.
        tensors_path, manifest_path = self._paths(iteration)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with lock_folder(self.folder):
                write_atomically(tensors_path, data)
                write_atomically(manifest_path, content)
                self._delete_old()
        except (OSError, RunError) as error:
            raise CheckpointError(f"checkpoint {iteration} is not saved, earlier ones are intact: {error}") from error
        return Checkpoint(tensors_path, iteration, manifest.tensors_sha256, copies, dict(state))

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
        path, source = self._paths(iteration)
        manifest = _FORMAT.read_manifest(source)
        try:
            intact = _hash_state(manifest.state) == manifest.state_sha256
        except RecursionError as error:
            raise DamagedError(f"checkpoint manifest {source} is nested too deeply{_ADVICE}") from error
        if not intact:
            raise DamagedError(f"checkpoint manifest {source} is corrupt (its hash differs){_ADVICE}")
        if manifest.iteration != iteration:
            other = reprlib.repr(manifest.iteration)
            raise DamagedError(f"checkpoint {path} has the manifest of iteration {other}{_ADVICE}")
        tensors = _FORMAT.read_tensors(path, manifest)
        return Checkpoint(path, iteration, manifest.tensors_sha256, tensors, manifest.state)

    def _paths(self, iteration: int) -> tuple[Path, Path]:
        """The files of a checkpoint: its tensors, and its manifest."""
        path = self.folder / f"iteration-{iteration:08d}.safetensors"
        return path, path.with_suffix(".json")

    def _delete_old(self) -> None:
        # Files of a process that was killed while it wrote them.
        for leftover in self.folder.glob(f".iteration-*{TEMPORARY_SUFFIX}"):
            leftover.unlink()
        for iteration in self.iterations()[: -self.keep]:
            # The manifest first: without it the tensors are not a checkpoint.
            tensors_path, manifest_path = self._paths(iteration)
            manifest_path.unlink()
            tensors_path.unlink(missing_ok=True)


# One tensor that holds a whole state, for state dictionaries that take nothing else.

_JSON_NAME = "rest"
"""Name of the JSON beside the numbered tensors."""
_TENSOR_KEY = "tensor"
"""Only key of the object that stands for a tensor in the JSON."""


def pack_state(state: Any) -> Tensor:
    """Encode what `to_plain` returned as uint8 ``[n]``: a safetensors file with the JSON as one of its tensors."""
    tensors: dict[str, Tensor] = {}

    def extract_tensors(value: Any) -> Any:
        if isinstance(value, Tensor):
            name = str(len(tensors))
            tensors[name] = value.contiguous()
            return {_TENSOR_KEY: name}
        if isinstance(value, dict):
            return {key: extract_tensors(part) for key, part in cast("dict[str, Any]", value).items()}
        return [extract_tensors(part) for part in cast("list[Any]", value)] if isinstance(value, list) else value

    text = json.dumps(extract_tensors(state)).encode()
    tensors[_JSON_NAME] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return torch.frombuffer(bytearray(save(tensors)), dtype=torch.uint8)


def unpack_state(packed: Tensor) -> Any:
    """Decode what `pack_state` encoded, with tensors on the CPU. It runs no code."""

    def insert_tensors(value: Any) -> Any:
        if isinstance(value, dict):
            parts = cast("dict[str, Any]", value)
            if list(parts) == [_TENSOR_KEY]:
                return tensors[parts[_TENSOR_KEY]]
            return {key: insert_tensors(part) for key, part in parts.items()}
        return [insert_tensors(part) for part in cast("list[Any]", value)] if isinstance(value, list) else value

    try:
        tensors = decode_tensors(packed.numpy(force=True).tobytes())
        return insert_tensors(json.loads(tensors[_JSON_NAME].numpy().tobytes()))
    except (KeyError, ValueError, RecursionError) as error:
        raise CheckpointError("the saved state of growth is damaged: use an earlier checkpoint") from error
