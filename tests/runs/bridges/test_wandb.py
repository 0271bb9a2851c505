"""What W&B keeps offline is the run: nothing missing, nothing twice."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from wandb.proto.wandb_internal_pb2 import Record

from esper.errors import ConfigError
from esper.runs.bridges import wandb
from esper.runs.bridges.bridge import Bridge
from esper.runs.bridges.tail import Tail
from esper.runs.store import RunStore
from runs.bridges.stored_run import NAN_AT, begin, end, iterate, resume

_FILE_HEADER, _BLOCK, _CHUNK_HEADER = 7, 32768, 7
_WHOLE_OR_LAST = (1, 4)
"""Kinds of chunks that end a record."""


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")


def carry(store: RunStore) -> int:
    folder = store.path.parent
    with Tail.open(store.path) as tail:
        bridge = Bridge("wandb", wandb.open_logger, tail, folder, "run", {"ppo.gamma": 1.0}, "team/garden")
        with closing(bridge):
            return bridge.carry()


def records(path: Path) -> Iterator[Record]:
    """Of a `.wandb` file: the log format of LevelDB, with protocol buffers in it."""
    data, at, parts = path.read_bytes(), _FILE_HEADER, b""
    while at + _CHUNK_HEADER <= len(data):
        if _BLOCK - at % _BLOCK < _CHUNK_HEADER:
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + _CHUNK_HEADER : at + _CHUNK_HEADER + length]
        at += _CHUNK_HEADER + length
        if kind in _WHOLE_OR_LAST:
            yield Record.FromString(parts)
            parts = b""


def files(store: RunStore) -> list[Path]:
    """In the order in which they were begun."""
    return sorted(store.path.parent.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)


def of_kind(store: RunStore, kind: str) -> list[Any]:
    everything = [record for path in files(store) for record in records(path)]
    return [getattr(record, kind) for record in everything if record.WhichOneof("record_type") == kind]


def rows(store: RunStore) -> list[dict[str, Any]]:
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in history.item}
        for history in of_kind(store, "history")
    ]


@pytest.mark.slow
def test_wandb_keeps_the_run_across_openings_and_rewinds(tmp_path: Path) -> None:
    with begin(tmp_path / "run.db") as store:
        for number in (1, 2, 3):
            iterate(store, number)
        assert carry(store) == 3
        resume(store, 1)
        for number in (2, 3, 4):
            iterate(store, number)
        end(store, 4)
        assert carry(store) == 1
        assert carry(store) == 0
        found = rows(store)
        assert [row["_step"] for row in found] == [1, 2, 3, 4]
        assert [row["objective"] for row in found] == [1 / 7, 2 / 7, 3 / 7, 4 / 7]
        assert [row["_step"] for row in found if row["value"] == "NaN" or math.isnan(row["value"])] == [NAN_AT]
        assert found[0]["notes"] == "rolled back 1 times: exploded\nkl_high: the policy moved too far in 1"
        assert found[0]["seed/contribution/_type"] == "histogram"
        runs = of_kind(store, "run")
        assert {(run.entity, run.project, run.display_name) for run in runs} == {("team", "garden", "run")}
        assert len({run.run_id for run in runs}) == 1
        settings = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
        assert settings["ppo.gamma"] == 1.0
        assert settings["run"]["slots"] == "layer0, layer1"
        told = [item.value_json for summary in of_kind(store, "summary") for item in summary.update]
        assert any("run ended after iteration 4" in text for text in told)


def test_what_wandb_says_against_it_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: Any) -> Any:
        raise wandb.wandb.errors.UsageError("no API key configured")

    monkeypatch.setattr(wandb.wandb, "init", init)
    with begin(tmp_path / "run.db") as store:
        iterate(store, 1)
        with pytest.raises(ConfigError, match=r"no API key configured\): log in, or set WANDB_MODE=offline"):
            carry(store)
