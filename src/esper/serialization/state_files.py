"""State in files: tensors as safetensors, everything else as JSON, and nothing in them is run or believed.

A saved state is two files: the tensors, and a JSON manifest with their hash, which is written last. So a state is there
exactly when its manifest is. Nothing that a file says is used as a path.
"""

from __future__ import annotations

import hashlib
import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
import torch
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from esper.config.loading import parse_json
from esper.config.settings import Settings
from esper.errors import CheckpointError
from esper.files import UnsuitableFileError, read_bounded


@runtime_checkable
class Stateful(Protocol):
    """Whatever has a state of its own that it can give away as plain values and take back."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values only."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        ...


def to_plain(value: Any) -> Any:
    """A copy of arrays, tensors, numbers, text, and lists, tuples, dictionaries, dataclasses and `Stateful` of them.

    Raises:
        CheckpointError: there is something else in it.
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
    if value is None or type(value) in (bool, int, float, str):  # of subclasses, torch.load reads none
        return value
    raise CheckpointError(
        f"a state holds a {type(value).__name__}, which cannot be saved: make it of arrays, tensors, numbers, text, "
        "lists and dictionaries, or give it state_dict and load_state_dict"
    )


def from_plain(like: Any, plain: Any, name: str) -> Any:
    """What `to_plain` made ``plain`` of. ``like`` is a value of the same make, and says the types, shapes and devices.

    A `Stateful` ``like`` takes its state back itself. ``name`` says in errors what is being restored.

    Raises:
        CheckpointError: ``plain`` is of another make.
    """
    if isinstance(like, Tensor):
        return _check_tensor(like, plain, name).to(like.device, copy=True)
    if isinstance(like, np.ndarray):
        tensor = torch.from_numpy(cast("np.ndarray[Any, Any]", like))
        return _check_tensor(tensor, plain, name).numpy(force=True).copy()
    if isinstance(like, Stateful):
        like.load_state_dict(_check_type(dict, plain, name))
        return like
    if is_dataclass(like) and not isinstance(like, type):
        parts = from_plain({field.name: vars(like)[field.name] for field in fields(like)}, plain, name)
        return type(like)(**parts)
    if isinstance(like, dict):
        return _from_mapping(cast("dict[Any, Any]", like), _check_type(dict, plain, name), name)
    if isinstance(like, list | tuple):
        return _from_sequence(cast("list[Any]", like), _check_type(list, plain, name), name)
    return _check_type(cast("type[Any]", type(like)), plain, name)


def _from_mapping(like: dict[Any, Any], plain: dict[str, Any], name: str) -> dict[Any, Any]:
    keys = {str(key): key for key in like}
    if keys.keys() != plain.keys():
        raise CheckpointError(f"{name} has {_list_keys(plain)} in the saved state, but {_list_keys(keys)} here")
    return {key: from_plain(like[key], plain[part], f"{name}.{part}") for part, key in keys.items()}


def _from_sequence(like: list[Any], plain: list[Any], name: str) -> Any:
    if len(like) != len(plain):
        raise CheckpointError(f"{name} has {len(plain)} parts in the saved state, but {len(like)} here")
    parts = [from_plain(value, plain[index], f"{name}[{index}]") for index, value in enumerate(like)]
    if not isinstance(like, tuple):
        return parts
    kind = cast("type[Any]", type(like))
    return tuple(parts) if kind is tuple else kind(*parts)


def _check_tensor(like: Tensor, plain: Any, name: str) -> Tensor:
    saved = _check_type(Tensor, plain, name)
    if saved.shape != like.shape or saved.dtype != like.dtype:
        raise CheckpointError(
            f"{name} is {saved.dtype} {tuple(saved.shape)} in the saved state, "
            f"but {like.dtype} {tuple(like.shape)} here"
        )
    return saved


def _check_type(kind: type[Any], plain: Any, name: str) -> Any:
    if type(plain) is not kind:
        raise CheckpointError(f"{name} is a {type(plain).__name__} in the saved state, but must be a {kind.__name__}")
    return plain


def _list_keys(mapping: dict[str, Any]) -> str:
    return ", ".join(sorted(mapping)) or "nothing"


Count = Annotated[int, Field(strict=True, ge=0)]
Hash = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]

MOST_HEADER_BYTES = 4 * 2**20
MOST_ELEMENTS = 2**40
"""Of a tensor, empty axes counted as one: larger products may overflow."""
MOST_MANIFEST_BYTES = 8 * 2**20
"""More than this is no manifest."""
_LENGTH_BYTES = 8


class DamagedError(CheckpointError):
    """A state that was ours and whole once; one that was saved before it may serve."""


class Manifest(Settings):
    """What the JSON file of every saved state says."""

    tensors_bytes: Count
    tensors_sha256: Hash

    def encode(self) -> str:
        """The manifest as JSON."""
        return self.model_dump_json(indent=2)


M = TypeVar("M", bound=Manifest)


@dataclass(frozen=True)
class StateFormat(Generic[M]):
    """A kind of saved state: what its manifest says, and what helps where it cannot be read."""

    name: str
    """The manifest's field ``format``."""
    versions: tuple[int, ...]
    """Of those that can be read, in its field ``version``."""
    manifest: type[M]
    what: str
    """What such a state is, for sentences."""
    damaged_advice: str = ""
    missing_advice: str = ""
    foreign_advice: str = ""

    def read_manifest(self, path: Path) -> M:
        """The manifest in the file ``path``.

        Raises:
            CheckpointError: it is missing or damaged (then DamagedError), foreign or of another format version.
        """
        what = f"{self.what} manifest {path}"
        try:
            content = parse_json(self._read(path, MOST_MANIFEST_BYTES, what))
        except ValueError as error:
            raise DamagedError(f"{what} is torn or corrupt{self.damaged_advice}") from error
        self._check_version(content, path)
        try:
            return self.manifest.model_validate(content)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise DamagedError(f"{what} is corrupt at {place} ({first['msg']}){self.damaged_advice}") from error
        except RecursionError as error:
            raise DamagedError(f"{what} is nested too deeply{self.damaged_advice}") from error

    def read_tensors(self, path: Path, manifest: Manifest) -> dict[str, Tensor]:
        """The tensors that a manifest speaks of, in the file ``path``, on the CPU.

        Raises:
            CheckpointError: the file is missing, damaged (then DamagedError) or no safetensors file.
        """
        data = self._read(path, manifest.tensors_bytes, f"{self.what} file {path}")
        if len(data) < manifest.tensors_bytes or hashlib.sha256(data).hexdigest() != manifest.tensors_sha256:
            raise DamagedError(
                f"{self.what} file {path} is torn or corrupt (its size or its hash differs){self.damaged_advice}"
            )
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

    def _check_version(self, content: Any, path: Path) -> None:
        match content:
            case {"format": self.name, "version": int(version)}:
                if version not in self.versions:
                    raise CheckpointError(
                        f"{path} has format version {reprlib.repr(version)}, this Esper reads "
                        f"{', '.join(map(str, self.versions))}: use the Esper that wrote it"
                    )
            case _:
                raise CheckpointError(f"{path} {self.foreign_advice}")


def copy_to_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies that share nothing and are contiguous, as safetensors wants them."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def describe_tensors(data: bytes) -> dict[str, Any]:
    """What a `Manifest` says of a tensors file."""
    return {"tensors_bytes": len(data), "tensors_sha256": hashlib.sha256(data).hexdigest()}


def _sizeable(shape: tuple[int, ...]) -> tuple[int, ...]:
    if math.prod(max(length, 1) for length in shape) > MOST_ELEMENTS:
        raise ValueError("a tensor is too large")
    return shape


class _Entry(Settings):
    """What the header says of a tensor."""

    dtype: Literal["BOOL", "U8", "I8", "I16", "I32", "I64", "F16", "BF16", "F32", "F64", "U16", "U32", "U64", "C64"]
    shape: Annotated[tuple[Count, ...], Field(max_length=16), AfterValidator(_sizeable)]
    data_offsets: tuple[Count, Count]


_HEADER = TypeAdapter(dict[str, _Entry])


def decode_tensors(data: bytes) -> dict[str, Tensor]:
    """The tensors in ``data``, on the CPU.

    Raises:
        ValueError: it is not a whole safetensors file with tensors of ordinary types.
    """
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if length > min(len(data) - _LENGTH_BYTES, MOST_HEADER_BYTES):
        raise ValueError("its header is too long")
    try:
        _HEADER.validate_python(parse_json(data[_LENGTH_BYTES : _LENGTH_BYTES + length]))
        return load(data)
    except ValidationError as error:
        raise ValueError(f"its header is wrong: {error.errors()[0]['msg']}") from error
    except SafetensorError as error:
        raise ValueError("its header does not suit its contents") from error


def strip_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those whose names begin with ``prefix``, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


_REST = "rest"
"""Name of the JSON beside the numbered tensors."""
_TENSOR = "tensor"
"""Only key of the object that stands for a tensor in the JSON."""


def pack(state: Any) -> Tensor:
    """What `to_plain` returned, as uint8 ``[n]``: a safetensors file whose one odd tensor is JSON."""
    tensors: dict[str, Tensor] = {}
    rest = json.dumps(_without_tensors(state, tensors)).encode()
    tensors[_REST] = torch.frombuffer(bytearray(rest), dtype=torch.uint8)
    return torch.frombuffer(bytearray(save(tensors)), dtype=torch.uint8)


def unpack(packed: Tensor) -> Any:
    """What `pack` packed, with tensors on the CPU. Nothing in it is run.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        tensors = decode_tensors(packed.numpy(force=True).tobytes())
        rest = json.loads(tensors[_REST].numpy().tobytes())
        return _with_tensors(rest, tensors)
    except (KeyError, ValueError, RecursionError) as error:
        raise CheckpointError("the saved state of growth is damaged: use an earlier checkpoint") from error


def _without_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.contiguous()
        return {_TENSOR: name}
    if isinstance(value, dict):
        return {key: _without_tensors(part, tensors) for key, part in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_without_tensors(part, tensors) for part in cast("list[Any]", value)]
    return value


def _with_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, dict):
        parts = cast("dict[str, Any]", value)
        if list(parts) == [_TENSOR]:
            return tensors[parts[_TENSOR]]
        return {key: _with_tensors(part, tensors) for key, part in parts.items()}
    if isinstance(value, list):
        return [_with_tensors(part, tensors) for part in cast("list[Any]", value)]
    return value
