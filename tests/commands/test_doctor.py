"""The doctor finds what is wrong, says what to do about it, and is content with a sound machine."""

import json
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

import esper
from esper import extras
from esper.cli import main
from esper.commands import doctor
from esper.growth.model import GrowingModel
from esper.tasks.registry import FILE_SUITES, get_suite, suite_names
from esper.tasks.suite import Source

pytestmark = pytest.mark.landing


def examine(capsys: pytest.CaptureFixture[str], code: int) -> dict[str, Any]:
    assert main(["doctor", "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_a_real_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    record = examine(capsys, 0)
    assert record["versions"] == {
        "esper": esper.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    assert record["extras"].keys() == extras.EXTRAS.keys()
    assert record["extras"]["train"] == []
    assert 0 <= record["devices"]["cpu"] < doctor.TOLERANCE
    assert record["data"].keys() == {*suite_names(), *FILE_SUITES}
    assert record["problems"] == []
    assert list(tmp_path.iterdir()) == []


def test_a_finalized_model_that_computes_otherwise_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    finalize = GrowingModel.finalize

    def finalize_wrongly(model: GrowingModel) -> torch.nn.Module:
        plain = finalize(model)
        next(plain.parameters()).data += 1e-2
        return plain

    monkeypatch.setattr(GrowingModel, "finalize", finalize_wrongly)
    (problem,) = examine(capsys, 1)["problems"]
    assert problem.startswith("on cpu a finalized model computes otherwise than it grew (a difference of ")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch):
    """Without the growth run."""
    monkeypatch.setattr(doctor, "grow_small_model", lambda *_: 1e-8)


@pytest.mark.usefixtures("quick")
def test_without_a_problem_all_is_well_and_a_lacking_extra_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(f"torch {torch.__version__}")
    assert {"extra train: complete", "suite digits: shipped with scikit-learn", "cpu: grew a small model"} <= {*lines}
    assert lines[-1] == "no problems found"
    monkeypatch.setattr(doctor, "EXTRAS", {"ui": ("json", "no_such_thing")})
    assert main(["doctor"]) == 0
    assert f"extra ui: lacks no_such_thing: {extras.find_install_command('ui')}" in capsys.readouterr().out


@pytest.mark.usefixtures("quick")
def test_a_device_that_fails_and_a_missing_data_set_are_problems(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def grow(device: str) -> float:
        if device.startswith("cuda"):
            raise RuntimeError("no kernel image is available\nmore of that")
        return 1e-8

    monkeypatch.setattr(doctor, "grow_small_model", grow)
    monkeypatch.setattr(doctor, "list_devices", lambda: ("cuda:0", "cpu"))
    gone = Source("shipped with scikit-learn", tmp_path / "gone.csv")
    monkeypatch.setattr(type(get_suite("digits")), "source", gone)
    record = examine(capsys, 1)
    assert record["devices"] == {"cpu": 1e-8}
    assert record["problems"] == [
        f"suite digits: {tmp_path}/gone.csv is missing (shipped with scikit-learn): reinstall it",
        "torch cannot compute on cuda:0 (no kernel image is available): use another device, or repair its driver",
    ]
