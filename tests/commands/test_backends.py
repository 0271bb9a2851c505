"""`esper train --backend ray` leaves the run that `--backend local` leaves, and mistakes are one sentence."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from esper.cli import main
from esper.extras import find_install_command
from esper.runs.run_directory import RunDirectory
from train.runs import ENVIRONMENT, TINY, assert_same_end

pytestmark = pytest.mark.landing

Capture = pytest.CaptureFixture[str]
SMALL = ("suite=digits", "iterations=2", *(one for one in TINY if not one.startswith(("suite=", "shards="))))
WORDS = ["train", *(word for override in SMALL for word in ("--set", override))]
RAY = ["--backend", "ray", "--workers", "2"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workers", "0"], "--workers 0: give at least 1"),
        (["--address", "auto"], "--address is that of a Ray cluster: add --backend ray"),
    ],
)
def test_options_that_mean_nothing_are_refused(tmp_path: Path, capsys: Capture, words: list[str], message: str):
    assert main(["train", "--run-dir", str(tmp_path / "run"), *words]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"
    assert not (tmp_path / "run").exists()


def test_without_ray_a_sentence_names_the_extra(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main([*WORDS, "--run-dir", str(tmp_path / "run"), "--backend", "ray"]) == 2
    assert capsys.readouterr().err == f"error: --backend ray needs ray: {find_install_command('ray')}\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_is_the_same_and_may_change_its_backend(tmp_path: Path):
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    run([*WORDS, "--run-dir", str(tmp_path / "local"), "--backend", "local"])
    run([*WORDS, "--run-dir", str(tmp_path / "ray"), *RAY])
    assert_same_end(tmp_path / "ray", tmp_path / "local")


@pytest.mark.slow
def test_ctrl_c_ends_the_run_with_a_checkpoint_and_its_ray(tmp_path: Path):
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    path = tmp_path / "run"
    words = [*WORDS, "--set", "iterations=1000", "--run-dir", str(path), *RAY]
    with subprocess.Popen(esper(words), env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        for line in process.stdout:
            if line.startswith("iteration 1/"):
                break
        os.killpg(process.pid, signal.SIGINT)
        assert f"resume with: esper train --resume {path}" in process.stdout.read()
        assert process.wait() == 130
    assert any(RunDirectory(path).checkpoints.glob("iteration-*1.json"))
    end = time.monotonic() + 60
    while helpers_of(process.pid):
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("address", "message"),
    [
        (
            "127.0.0.1:1",
            "no Ray cluster is reachable at 127.0.0.1:1 ([Errno 111] Connection refused): give its head's host:port",
        ),
        ("127.0.0.1", "--address 127.0.0.1: write it as host:port, or auto"),
    ],
)
def test_an_address_without_a_cluster_is_a_sentence(tmp_path: Path, capsys: Capture, address: str, message: str):
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    assert main([*WORDS, "--run-dir", str(tmp_path / "run"), "--backend", "ray", "--address", address]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def esper(words: list[str]) -> list[str]:
    return [sys.executable, "-m", "esper", *words]


def run(words: list[str]) -> None:
    subprocess.run(esper(words), env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)


def helpers_of(process: int) -> list[int]:
    """Processes of the Ray that a process started: they were told its process id."""
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if re.search(rf"/session_[0-9_-]+_{process}/", words):
            found.append(int(folder.name))
    return found
