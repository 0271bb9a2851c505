"""What happens in a run, as typed, versioned records.

An event is a frozen dataclass of JSON values. `register` files it under a name and a version, and `decode` brings a
stored one back; both refuse what they do not know. Change a record's fields only together with its version.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, TypeVar, cast

from pydantic import ConfigDict, TypeAdapter, ValidationError

from esper.errors import RunError


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events; `iteration` is the trainer's iteration it belongs to."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", ser_json_inf_nan="strings")
    name: ClassVar[str]
    version: ClassVar[int]
    # History survives a rewind: that a run was interrupted stays true when the iterations after it are done again.
    history: ClassVar[bool] = False

    iteration: int


_registry: dict[str, type[Event]] = {}
E = TypeVar("E", bound=type[Event])


def register(name: str, version: int = 1) -> Callable[[E], E]:
    """Class decorator: store events of this class as `name`, at `version`."""

    def decorate(event_type: E) -> E:
        if name in _registry:
            raise ValueError(f"an event named {name!r} is registered already")
        event_type.name = name
        event_type.version = version
        _registry[name] = event_type
        return event_type

    return decorate


def event_types() -> dict[str, type[Event]]:
    """All registered event types by name."""
    return dict(_registry)


def encode(event: Event) -> str:
    """The event's fields as JSON, but for defaults; non-finite numbers become strings, which `decode` turns back."""
    return _adapter(type(event)).dump_json(event, exclude_defaults=True).decode()


def decode(name: str, version: int, payload: str) -> Event:
    """Rebuild a stored event.

    Raises:
        RunError: an unknown name or version, or a payload that does not fit them.
    """
    event_type = _registry.get(name)
    if event_type is None or event_type.version != version:
        raise RunError(f"event {name!r} version {version} is unknown here: read this run with the Esper that wrote it")
    try:
        return _adapter(event_type).validate_json(payload)
    except ValidationError as error:
        raise RunError(f"a stored event {name!r} is damaged: {error.errors()[0]['msg']}") from error


def fields(name: str, payload: str) -> dict[str, Any]:
    """A stored event's payload as it is, whatever its type and version; RunError if it is no JSON object."""
    try:
        found = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise RunError(f"a stored event {name!r} is damaged: its payload is not JSON") from error
    if not isinstance(found, dict):
        raise RunError(f"a stored event {name!r} is damaged: its payload is not a JSON object")
    return cast("dict[str, Any]", found)


@cache
def _adapter(event_type: type[Event]) -> TypeAdapter[Any]:
    return TypeAdapter(event_type)
