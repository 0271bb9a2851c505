"""What MLflow's client reads in a store of files is the run: nothing missing, nothing twice."""

from __future__ import annotations

import json
import math
from contextlib import closing
from pathlib import Path

import pytest
from mlflow.entities import Metric
from mlflow.tracking import MlflowClient

from esper.errors import ConfigError
from esper.runs.bridges import mlflow
from esper.runs.bridges.bridge import Bridge
from esper.runs.bridges.tail import Tail
from esper.runs.store import RunStore
from runs.bridges.stored_run import NAN_AT, begin, end, iterate, resume


def carry(store: RunStore, destination: str | None = None) -> int:
    folder = store.path.parent
    settings = {f"ppo.{number}": number for number in range(150)}
    with Tail.open(store.path) as tail:
        bridge = Bridge("mlflow", mlflow.open_logger, tail, folder, "run", settings, destination)
        with closing(bridge):
            return bridge.carry()


def found(store: RunStore) -> tuple[MlflowClient, str]:
    address = json.loads((store.path.parent / "mlflow.json").read_text())["address"]
    return MlflowClient(address["destination"]), address["run"]


def history(store: RunStore, key: str) -> list[Metric]:
    client, run = found(store)
    return client.get_metric_history(run, key)


@pytest.fixture(autouse=True)
def _no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


def test_mlflow_reads_the_run(tmp_path: Path) -> None:
    with begin(tmp_path / "run.db") as store:
        for number in (1, 2, 3):
            iterate(store, number)
        end(store, 3)
        assert carry(store) == 3
        client, run = found(store)
        data = client.get_run(run)
        assert data.info.run_name == "run"
        assert data.info.status == "FINISHED"
        assert data.data.params == {f"ppo.{number}": str(number) for number in range(150)}
        assert data.data.tags["esper.slots"] == "layer0, layer1"
        points = history(store, "objective")
        assert [(one.step, one.value) for one in points] == [(1, 1 / 7), (2, 2 / 7), (3, 3 / 7)]
        assert [one.step for one in history(store, "value") if math.isnan(one.value)] == [NAN_AT]
        assert [one.value for one in history(store, "objective.plain")] == [1, 1, 1]
        assert [one.value for one in history(store, "lifecycle.germinated")] == [2, 2, 2]
        assert len(client.list_artifacts(run, "notes")) == 3


def test_an_iteration_of_which_a_part_was_written_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = MlflowClient.log_batch

    def dying(client: MlflowClient, run_id: str, metrics: list[Metric] = (), **others: object) -> None:
        if metrics and metrics[0].step == 2:
            write(client, run_id, metrics=metrics[:2])
            raise KeyboardInterrupt
        write(client, run_id, metrics=metrics, **others)

    with begin(tmp_path / "run.db") as store:
        for number in range(1, 5):
            iterate(store, number)
        with monkeypatch.context() as patch:
            patch.setattr(MlflowClient, "log_batch", dying)
            with pytest.raises(KeyboardInterrupt):
                carry(store)
        client, run = found(store)
        assert client.get_run(run).info.status == "RUNNING"
        assert len(history(store, "objective")) == 2
        assert len(history(store, "lifecycle.germinated")) == 1
        carry(store)
        for key in ("objective", "value", "lifecycle.germinated"):
            assert [one.step for one in history(store, key)] == [1, 2, 3, 4]


def test_iterations_made_anew_are_not_written_twice(tmp_path: Path) -> None:
    with begin(tmp_path / "run.db") as store:
        for number in range(1, 6):
            iterate(store, number)
        carry(store)
        resume(store, 2)
        for number in range(3, 8):
            iterate(store, number)
        carry(store)
        assert [one.step for one in history(store, "objective")] == [1, 2, 3, 4, 5, 6, 7]


def test_a_store_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    with begin(tmp_path / "run.db") as store:
        iterate(store, 1)
        with pytest.raises(ConfigError, match="MLflow cannot write to carrier-pigeon:"):
            carry(store, "carrier-pigeon://coop")
