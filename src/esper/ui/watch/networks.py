"""How the networks of the newest episode stand, as their events tell it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from esper.telemetry.events import (
    EpisodeEnded,
    EpisodeStarted,
    LifecycleTransition,
    NetworkEvent,
    RolledBack,
    StepTaken,
)

UNFINISHED = "unfinished"
_OUTCOMES = ("fossilized", "pruned")


@dataclass
class Life:
    """One seed's life."""

    slot: int
    blueprint: str | None
    began: int
    """The step at which it germinated."""
    reached: dict[str, int] = field(default_factory=dict[str, int])
    """The step at which it first came to each stage."""
    outcome: str = UNFINISHED
    cause: str = ""
    """Of the outcome."""
    contribution: float | None = None
    """As it was known at the outcome."""

    def take(self, change: LifecycleTransition) -> None:
        """The seed came to another stage."""
        self.reached.setdefault(change.after, change.step)
        if change.after in _OUTCOMES:
            self.outcome, self.cause, self.contribution = change.after, change.cause, change.contribution


@dataclass
class Network:
    """One network's episode so far."""

    number: int
    started: EpisodeStarted | None = None
    ended: EpisodeEnded | None = None
    steps: list[StepTaken] = field(default_factory=list[StepTaken])
    lives: list[Life] = field(default_factory=list[Life])
    rollbacks: list[RolledBack] = field(default_factory=list[RolledBack])
    _living: dict[int, Life] = field(default_factory=dict[int, Life])
    """The latest life in each slot."""

    def take(self, event: NetworkEvent) -> None:
        """Something happened to it."""
        match event:
            case StepTaken():
                self.steps.append(event)
            case LifecycleTransition():
                self._changed(event)
            case EpisodeStarted():
                self.started = event
            case EpisodeEnded():
                self.ended = event
            case RolledBack():
                self.rollbacks.append(event)
            case _:
                pass

    def _changed(self, change: LifecycleTransition) -> None:
        if change.after == "germinated" or change.cause == "start":
            life = self._living[change.slot] = Life(change.slot, change.blueprint, change.step)
            self.lives.append(life)
        if change.slot in self._living:
            self._living[change.slot].take(change)


class Episodes:
    """Networks by episode; only the newest one with decisions, and any later ones, are kept."""

    def __init__(self) -> None:
        self._episodes: dict[int, dict[int, Network]] = {}

    def take(self, events: Iterable[NetworkEvent]) -> None:
        """Follow what happened."""
        for event in events:
            networks = self._episodes.setdefault(event.episode, {})
            networks.setdefault(event.environment, Network(event.environment)).take(event)
        shown = self.shown
        self._episodes = {number: networks for number, networks in self._episodes.items() if number >= (shown or 0)}

    @property
    def shown(self) -> int | None:
        """The newest episode with decisions; None before the first."""
        told = [number for number, networks in self._episodes.items() if any(one.steps for one in networks.values())]
        return max(told, default=None)

    @property
    def networks(self) -> list[Network]:
        """Those of the episode that is shown, by number."""
        networks = self._episodes.get(self.shown or -1, {})
        return [networks[number] for number in sorted(networks)]
