"""Exported events are those of the store, in every format."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from esper.errors import RunError
from esper.extras import install_command
from esper.runs.events import AnomalyRaised, PolicyProbed, PPOUpdated, RunStarted
from esper.runs.export import EventFormat, export_events
from esper.runs.reader import RunReader
from esper.runs.store import RunStore

HUGE = 2**62
EVENTS = [
    RunStarted(iteration=0, esper_version="0.1.0", seed=HUGE),
    PolicyProbed(
        iteration=1, score=math.inf, baselines={"none": -math.inf, "random": math.nan, "tiny": 5e-324, "large": 1.7e308}
    ),
    AnomalyRaised(iteration=2, anomaly='quotes " and, commas', meaning="lines\r\nand 😀\u2028, and \\ backslashes"),
    PPOUpdated(
        iteration=3, optimizer_steps=1, stopped_early=True, kl=0.1, anomalies=("kl",), metrics={"x" * 100_000: 1.0}
    ),
]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    with RunStore.create(tmp_path / "run.db") as store:
        for event in EVENTS:
            store.emit(event)
        store.flush()
        yield store


@pytest.fixture
def reader(store: RunStore) -> Iterator[RunReader]:
    with RunReader.open(store.path) as reader:
        yield reader


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8", newline="\n") as file:
        return [json.loads(line) for line in file]


def read_csv(path: Path) -> list[dict[str, Any]]:
    csv.field_size_limit(10**9)
    with path.open(encoding="utf-8", newline="") as file:
        return [
            {
                **row,
                **{name: int(row[name]) for name in ("id", "version", "iteration")},
                "time": float(row["time"]),
                "payload": json.loads(row["payload"]),
            }
            for row in csv.DictReader(file)
        ]


def read_parquet(path: Path) -> list[dict[str, Any]]:
    return [{**row, "payload": json.loads(row["payload"])} for row in pq.read_table(path).to_pylist()]


READERS: dict[EventFormat, Callable[[Path], list[dict[str, Any]]]] = {
    EventFormat.JSONL: read_jsonl,
    EventFormat.CSV: read_csv,
    EventFormat.PARQUET: read_parquet,
}


@pytest.mark.parametrize("to", list(EventFormat))
@pytest.mark.parametrize("chunk", [1, 3, 5000])
def test_all_events_come_back(reader: RunReader, tmp_path: Path, to: EventFormat, chunk: int, monkeypatch):
    monkeypatch.setattr(RunReader, "all_records", lambda self: all_records(self, chunk))
    out = tmp_path / "events"
    assert export_events(reader, to, out) == len(EVENTS)
    expected = [{**record._asdict(), "payload": json.loads(record.payload)} for record in reader.records()]
    assert READERS[to](out) == expected
    assert expected[0]["payload"]["seed"] == HUGE
    assert expected[1]["payload"]["score"] == "Infinity"
    assert expected[1]["payload"]["baselines"] == {
        "none": "-Infinity",
        "random": "NaN",
        "tiny": 5e-324,
        "large": 1.7e308,
    }


all_records = RunReader.all_records


@pytest.mark.parametrize("to", list(EventFormat))
def test_a_run_without_events_gives_a_file_without_rows(tmp_path: Path, to: EventFormat):
    with RunStore.create(tmp_path / "run.db") as store:
        assert export_events(store, to, tmp_path / "events") == 0
    assert READERS[to](tmp_path / "events") == []


def test_what_a_live_run_writes_meanwhile_is_left_for_the_next_export(store: RunStore, tmp_path: Path, monkeypatch):
    def with_writer(reader: RunReader):
        for chunk in all_records(reader, 2):
            store.emit(RunStarted(iteration=9, esper_version="later", seed=0))
            store.flush()
            yield chunk

    monkeypatch.setattr(RunReader, "all_records", with_writer)
    with RunReader.open(store.path) as reader:
        assert export_events(reader, EventFormat.JSONL, tmp_path / "events") == len(EVENTS)
        assert reader.last_id() == len(EVENTS) + 2
    assert [row["iteration"] for row in read_jsonl(tmp_path / "events")] == [0, 1, 2, 3]


def test_a_failed_export_leaves_the_old_file(store: RunStore, tmp_path: Path):
    store._connection.execute("UPDATE events SET payload = '{' WHERE id = 3")
    out = tmp_path / "events"
    out.write_text("old")
    with RunReader.open(store.path) as reader, pytest.raises(RunError, match="in event 3: export it as csv"):
        export_events(reader, EventFormat.JSONL, out)
    assert out.read_text() == "old"
    assert not list(tmp_path.glob(".events*"))


def test_the_store_is_not_replaced(reader: RunReader):
    with pytest.raises(RunError, match="is the run store itself"):
        export_events(reader, EventFormat.CSV, reader.path)
    assert reader.last_id() == len(EVENTS)


def test_a_folder_that_is_missing_is_named(reader: RunReader, tmp_path: Path):
    with pytest.raises(RunError, match=r"cannot write .*events"):
        export_events(reader, EventFormat.CSV, tmp_path / "nowhere" / "events")


def test_without_pyarrow_parquet_is_refused(reader: RunReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RunError, match=re.escape(install_command("parquet"))):
        export_events(reader, EventFormat.PARQUET, tmp_path / "events")
