"""All that a watcher knows of a run."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Any

from esper.telemetry.metric import Metric
from esper.telemetry.reader import EventRecord
from esper.telemetry.run_directory import RunProgress
from esper.ui.listing import printable
from esper.ui.watch.feed import News
from esper.ui.watch.networks import Episodes, Network
from esper.ui.watch.queries import RECENT

Points = list[tuple[int, float]]
"""(iteration, value)."""


class Known:
    """Grows with the news."""

    def __init__(self) -> None:
        self.metadata: dict[str, Any] = {}
        self.progress: RunProgress | None = None
        self.trouble: str | None = None
        self.curves: dict[str, Points] = {}
        self._episodes = Episodes()
        self._events: dict[str, deque[EventRecord]] = {}

    def take(self, news: News) -> bool:
        """Add what is new, and return whether that changes anything; what was known stays while there is trouble."""
        before = (self.trouble, self.progress, self.metadata)
        self.trouble = news.trouble
        if news.trouble is None:
            self._learn(news)
        return news.anew or bool(news.records) or before != (self.trouble, self.progress, self.metadata)

    def _learn(self, news: News) -> None:
        if news.anew:
            self._episodes, self._events, self.curves = Episodes(), {}, {}
        self.metadata, self.progress = news.metadata, news.progress
        for record in news.records:
            self._events.setdefault(record.type, deque(maxlen=RECENT)).append(record)
        self._episodes.take(news.events)
        for name, points in news.points.items():
            self.curves.setdefault(name, []).extend(points)

    @property
    def episode(self) -> int | None:
        """Number of the newest episode with decisions; None before the first."""
        return self._episodes.shown

    @property
    def networks(self) -> list[Network]:
        """Those of the newest episode with decisions, by number."""
        return self._episodes.networks

    @property
    def metric(self) -> str:
        """Name of what growth is about."""
        return printable(Metric.of(self.metadata).metric)

    @property
    def steps(self) -> int:
        """Decisions per episode."""
        planned = self.metadata.get("steps")
        return planned if isinstance(planned, int) else max((len(one.steps) for one in self.networks), default=0)

    @property
    def event_types(self) -> list[str]:
        """Types of events that have occurred, sorted."""
        return sorted(self._events)

    def events(self, types: Collection[str]) -> list[EventRecord]:
        """Recent events of some types, the newest first."""
        found = [record for name in types for record in self._events.get(name, ())]
        return sorted(found, key=lambda record: record.id, reverse=True)[:RECENT]

    def slot(self, index: int | None) -> str:
        """The name of a slot, nothing for None."""
        if index is None:
            return ""
        names = self.metadata.get("slots", [])
        return printable(str(names[index])) if 0 <= index < len(names) else str(index)
