"""What happens in a run, as typed, versioned records.

An event is a frozen dataclass of JSON values. `register` files it under a name and a version, and `decode` brings a
stored one back; both refuse what they do not know. Change a record's fields only together with its version.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, TypeVar

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
    """The event's fields as JSON; non-finite numbers become strings, which `decode` turns back."""
    return _adapter(type(event)).dump_json(event).decode()


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


@cache
def _adapter(event_type: type[Event]) -> TypeAdapter[Any]:
    return TypeAdapter(event_type)


@register("run_started")
@dataclass(frozen=True, slots=True)
class RunStarted(Event):
    """A new run begins."""

    history = True

    esper_version: str
    seed: int


@register("run_interrupted")
@dataclass(frozen=True, slots=True)
class RunInterrupted(Event):
    """The run stopped before its end, for instance by Ctrl-C."""

    history = True

    reason: str


@register("run_resumed")
@dataclass(frozen=True, slots=True)
class RunResumed(Event):
    """The run goes on after the checkpoint of `iteration`."""

    history = True

    esper_version: str


@register("run_ended")
@dataclass(frozen=True, slots=True)
class RunEnded(Event):
    """All iterations are done; `seconds` counts the last process only."""

    history = True

    seconds: float


@register("lifecycle_transition")
@dataclass(frozen=True, slots=True)
class LifecycleTransition(Event):
    """A slot changed its stage; stages, blueprint, cause and reason are given by name."""

    environment: int
    step: int
    slot: int
    before: str
    after: str
    blueprint: str | None
    cause: str
    reason: str


@register("decided")
@dataclass(frozen=True, slots=True)
class Decided(Event):
    """A controller of one model decided; `slot` is where and `blueprint` what germinated, both by name."""

    op: str
    slot: str | None
    blueprint: str | None


@register("rolled_back")
@dataclass(frozen=True, slots=True)
class RolledBack(Event):
    """The governor returned a network to its last good state; losses in nats, accuracies on validation data."""

    environment: int
    step: int
    trouble: str
    loss_before: float
    accuracy_before: float
    loss_after: float
    accuracy_after: float
    pruned: tuple[int, ...]
    ended: bool


@register("ppo_updated")
@dataclass(frozen=True, slots=True)
class PPOUpdated(Event):
    """A policy update is done; `anomalies` names the health checks it failed."""

    epochs: int
    stopped_early: bool
    kl: float
    anomalies: tuple[str, ...]


@register("checkpoint_written")
@dataclass(frozen=True, slots=True)
class CheckpointWritten(Event):
    """A checkpoint is safe on disk; `file` is relative to the run directory."""

    file: str
    sha256: str
