"""What TensorBoard, W&B and MLflow read is the run: nothing missing, nothing twice; and no tool stops training."""

import importlib.util
import json
import math
import struct
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboardX import SummaryWriter
from wandb.proto.wandb_internal_pb2 import Record

from dash.planted_run import Plan, plant
from esper.cli import main
from esper.errors import ConfigError, RunError
from esper.extras import find_install_command
from esper.runs.loggers import LIBRARIES, Logger, open_loggers, read_metrics
from esper.runs.reader import RunReader
from factories import Loop
from train.runs import TINY, short_suite

pytestmark = pytest.mark.landing

SETTINGS = {"ppo": {"gamma": 1.0}, "slots": ["layer0", "layer1"], "nothing": None}
TOOLS = [pytest.param(tool, marks=[pytest.mark.slow] if tool == "wandb" else []) for tool in LIBRARIES]
_FILE_HEADER, _BLOCK, _CHUNK_HEADER = 7, 32768, 7
_WHOLE_OR_LAST = (1, 4)
"""Kinds of chunks that end a record."""


@pytest.fixture(autouse=True)
def _no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_PROJECT", "WANDB_ENTITY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")


def send(tool: str, folder: Path, steps: Mapping[int, float]) -> None:
    with closing(Logger(tool, folder, "mine")) as logger:
        logger.log_settings(SETTINGS)
        for step, value in steps.items():
            logger.log_metrics({"objective": value, "objective/plain": 1.0}, step)


def read_tensorboard(folder: Path) -> tuple[dict[int, float], str]:
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"tensors": 0, "scalars": 0})
    events.Reload()
    (settings,) = events.Tensors("settings/text_summary")
    points = [(one.step, one.tensor_proto.float_val[0]) for one in events.Tensors("objective")]
    assert len(dict(points)) == len(points) == len(events.Tensors("objective/plain"))
    return dict(points), settings.tensor_proto.string_val[0].decode()


def read_mlflow(folder: Path) -> tuple[dict[int, float], str]:
    client = MlflowClient(f"file:{folder / 'mlflow'}")
    (run,) = client.search_runs([client.get_experiment_by_name("esper").experiment_id])
    assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")
    points = client.get_metric_history(run.info.run_id, "objective")
    assert len(points) == len({point.step for point in points})
    assert len(points) == len(client.get_metric_history(run.info.run_id, "objective.plain"))
    return {point.step: point.value for point in points}, str(run.data.params)


def read_wandb(folder: Path) -> tuple[dict[int, float], str]:
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    records = [record for path in files for record in wandb_records(path)]
    runs = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert {(run.project, run.display_name) for run in runs} == {("esper", "mine")}
    assert len({run.run_id for run in runs}) == 1
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    points = [(row["_step"], float(row["objective"])) for row in rows]
    assert len(dict(points)) == len(points)
    configured = [record.config for record in records if record.WhichOneof("record_type") == "config"]
    return dict(points), str([(item.key, item.value_json) for one in configured for item in one.update])


def wandb_records(path: Path) -> Iterator[Record]:
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


READ = {"tensorboard": read_tensorboard, "mlflow": read_mlflow, "wandb": read_wandb}


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_has_settings_and_every_step_once_across_openings(tool: str, tmp_path: Path):
    send(tool, tmp_path / "loggers", {1: 0.5, 2: math.nan, 3: 0.25})
    send(tool, tmp_path / "loggers", {2: 7.0, 3: 7.0, 4: 0.125})  # as a resumed run makes steps 2 and 3 anew
    points, settings = READ[tool](tmp_path / "loggers")
    assert list(points) == [1, 2, 3, 4]
    assert math.isnan(points.pop(2))
    assert points == {1: 0.5, 3: 0.25, 4: 0.125}
    assert all(word in settings for word in ("ppo.gamma", "1.0", "layer0, layer1"))
    assert "nothing" not in settings


def test_a_tool_that_fails_warns_once_and_gets_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise ConnectionError("no network")

    logger = Logger("tensorboard", tmp_path)
    logger.log_metrics({"objective": 0.5}, 1)
    monkeypatch.setattr(SummaryWriter, "add_scalar", fail)
    with pytest.warns(UserWarning, match=r"tensorboard gets no more metrics of this run \(no network\)") as warned:
        logger.log_metrics({"objective": 0.5}, 2)
    logger.log_metrics({"objective": 0.5}, 3)
    logger.close()
    assert len(warned) == 1


def test_a_tool_that_cannot_be_opened_warns_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "carrier-pigeon://coop")
    with pytest.warns(UserWarning, match="mlflow gets no more metrics of this run") as warned:
        send("mlflow", tmp_path, {1: 0.5})
    assert len(warned) == 1


def test_mistakes_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ConfigError, match="there is no logger 'abacus': choose one of tensorboard, wandb, mlflow"):
        Logger("abacus", tmp_path)
    (tmp_path / "wandb.json").write_text("{'step'")
    with pytest.raises(RunError, match=r"wandb\.json cannot be read: remove it"):
        Logger("wandb", tmp_path)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else find_spec(name))
    assert main(["train", "--run-dir", str(tmp_path / "run"), "--logger", "wandb"]) == 2
    assert capsys.readouterr().err == f"error: the logger wandb needs wandb: {find_install_command('wandb')}\n"
    assert not (tmp_path / "run").exists()


def test_a_failed_run_is_shown_as_failed(tmp_path: Path):
    with pytest.raises(RunError), open_loggers(["mlflow"], tmp_path, "mine", {}):
        raise RunError("the disk is full")
    client = MlflowClient(f"file:{tmp_path / 'mlflow'}")
    (run,) = client.search_runs([client.get_experiment_by_name("esper").experiment_id])
    assert run.info.status == "FAILED"


def test_the_figures_of_an_iteration_are_its_scalars_and_the_stages_that_seeds_entered(tmp_path: Path):
    with RunReader.open(plant(tmp_path / "run", Plan(networks=3, slots=1, steps=8))) as reader:
        metrics, scalars = read_metrics(reader, 1), reader.scalars_at(1)
    assert {name: metrics[name] for name in scalars} == scalars
    counts = {name: count for name, count in metrics.items() if name not in scalars}
    assert counts["lifecycle/germinated"] == 3
    assert set(counts) == {
        f"lifecycle/{stage}" for stage in ("germinated", "training", "blending", "holding", "fossilized", "pruned")
    }


def test_training_sends_every_iteration_as_it_ends(tmp_path: Path):
    run = tmp_path / "run"
    words = [word for override in (*TINY, "iterations=2") for word in ("--set", override)]
    with short_suite():
        assert main(["train", "--run-dir", str(run), *words, "--logger", "tensorboard"]) == 0
        assert main(["train", "--resume", str(run), "--logger", "tensorboard"]) == 0
    points, settings = read_tensorboard_scalars(run / "loggers")
    with RunReader.open(run / "run.db") as reader:
        for step in (1, 2):
            sent = {name: values[step] for name, values in points.items() if step in values}
            assert sent == pytest.approx(read_metrics(reader, step), nan_ok=True)
    assert "| ppo.epochs | 2 |" in settings


def test_decisions_of_a_grower_are_logged_in_three_lines(tmp_path: Path):
    loop = Loop("heuristic")
    with closing(Logger("tensorboard", tmp_path)) as logger:
        logger.log_settings({"controller": "heuristic"})
        decisions = [loop.epoch() for _ in range(4)]
        for decision in decisions:
            logger.log_metrics(decision.metrics, decision.number)
    points, _ = read_tensorboard_scalars(tmp_path)
    assert list(points["validation_loss"].values()) == pytest.approx([decision.loss for decision in decisions])
    assert sum(points["lifecycle/germinated"].values()) >= 1


def read_tensorboard_scalars(folder: Path) -> tuple[dict[str, dict[int, float]], str]:
    events: Any = EventAccumulator(str(folder / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    tags = [tag for tag in events.Tags()["tensors"] if tag != "settings/text_summary"]
    settings = events.Tensors("settings/text_summary")[0].tensor_proto.string_val[0].decode()
    return {tag: {one.step: one.tensor_proto.float_val[0] for one in events.Tensors(tag)} for tag in tags}, settings
