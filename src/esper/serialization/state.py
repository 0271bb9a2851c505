"""State as tensors, numbers, text, lists and dictionaries: what `torch.load` reads with ``weights_only=True``."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from esper.errors import CheckpointError


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
        usual = torch.from_numpy(cast("np.ndarray[Any, Any]", like))
        return _check_tensor(usual, plain, name).numpy(force=True).copy()
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
