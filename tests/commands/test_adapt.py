"""`esper adapt` from the command line."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from esper.adaptation.report import Adaptation, Trial
from esper.adaptation.trainer import Figures, Retention
from esper.cli import main
from esper.commands import adapt as command
from esper.errors import ConfigError
from esper.practice import shifts
from esper.practice.shifts import BATCH
from esper.practice.training import HostTraining
from esper.tasks.practice.registry import DataAccess, get_task

Capture = pytest.CaptureFixture[str]
QUICK = ("--task", "mnist1d", "--host", "conv1d", "--epochs", "3", "--examples", "100", "--seconds", "1")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_it_tells_what_was_tried_and_what_that_is_worth(capsys: Capture) -> None:
    assert main(["adapt", *QUICK, "--shift", "inversion", "--json"]) == 0
    captured = capsys.readouterr()
    record = json.loads(captured.out.splitlines()[-1])
    assert record["trials"]
    assert record["kept"] in [trial["structure"] for trial in record["trials"]]
    assert record["accuracy"] > record["host_accuracy"]
    assert record["source_loss"] is None
    assert record["retention"] == {"share": 1.0, "rise": 0.0}
    assert "test data with inversion: accuracy" in captured.err
    assert "structures tried" in captured.err


def test_what_measures_the_host_leaves_it_as_it_was(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """A host that normalises by statistics does not gather those of test data."""
    seen: dict[str, Any] = {}

    def adapt(training: HostTraining, *_: Any, **__: Any) -> Any:
        seen["state"] = training.model.state_dict()
        seen["accuracy"] = training.test().accuracy
        raise ConfigError("enough")

    def measure(model: nn.Module, batches: Any) -> float:
        seen["before"] = copy.deepcopy(model.state_dict())
        return shifts.measure_accuracy(model, batches)

    monkeypatch.setattr(command, "adapt_to_shift", adapt)
    monkeypatch.setattr(command, "measure_accuracy", measure)
    assert main(["adapt", "--task", "digits", "--host", "resnet", "--epochs", "1"]) == 2
    assert all(torch.equal(value, seen["before"][key]) for key, value in seen["state"].items())
    assert f"test accuracy {seen['accuracy']:.3f}" in capsys.readouterr().out


def test_old_data_are_protected_if_asked(capsys: Capture) -> None:
    assert main(["adapt", *QUICK, "--shift", "cycled", "--protect", "0.05", "--json"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["source_loss"] > 0
    assert record["retention"]["rise"] <= 0.05


def test_what_is_protected_is_what_the_host_has_not_learned(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    seen: dict[str, Any] = {}

    def adapt(*_: Any, source: Any, **__: Any) -> Any:
        seen["source"] = source
        raise ConfigError("enough")

    monkeypatch.setattr(shifts, "adapt", adapt)
    assert main(["adapt", *QUICK, "--protect", "0.05"]) == 2
    assert "enough" in capsys.readouterr().err
    splits = get_task("mnist1d").load(DataAccess())
    spare = list(splits.validation.in_order(BATCH))[2:4]
    assert all(torch.equal(one.inputs, other.inputs) for one, other in zip(seen["source"], spare, strict=True))


def test_what_diverged_is_null_for_machines(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    before, worst = Figures(0.5, 1.0, 100), Figures(-math.inf, math.inf, 100)
    failed = Trial({"0": "mlp"}, worst, Retention(0.0, 0.0), {"0": 0.0}, 9)
    told = Adaptation((failed,), 0, before, None, (), Retention(1.0, 0.0), math.nan, None, 1.0)
    monkeypatch.setattr(shifts, "adapt", lambda *_, **__: told)
    assert main(["adapt", *QUICK, "--json"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    record = json.loads(line, parse_constant=pytest.fail)
    assert record["trials"][0]["found"] == [None, None, 100]


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (("--shift", "invresion"), "did you mean 'inversion'"),
        (("--examples", "50"), "examples is 50"),
        (("--protect", "-1"), "--protect -1"),
        (("--protect", "nan"), "--protect nan"),
        (("--epochs", "0"), "--epochs 0"),
        (("--seconds", "0"), "--seconds 0"),
        (("--seconds", "inf"), "--seconds inf"),
        (("--protect", "0.1", "--examples", "450"), "give 400 at most"),
        (("--task", "charlm", "--host", "gpt"), "this task is text"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(words: tuple[str, ...], wrong: str, capsys: Capture) -> None:
    assert main(["adapt", *QUICK, *words]) == 2
    error = capsys.readouterr().err
    assert wrong in error
    assert "Traceback" not in error
