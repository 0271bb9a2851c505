"""A run store that takes its time."""

from threading import Event

import pytest

from esper.runs.reader import RunReader


def slow_reader(monkeypatch: pytest.MonkeyPatch) -> tuple[Event, Event]:
    """Readers say that they are asked for the newest event, and answer when they are told to."""
    asked, answer, real = Event(), Event(), RunReader.last_id

    def last_id(reader: RunReader) -> int:
        asked.set()
        answer.wait()
        return real(reader)

    monkeypatch.setattr(RunReader, "last_id", last_id)
    return asked, answer
