"""Runs in processes of their own, and whether two of them came to the same end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file

from esper.runs.reader import RunReader
from esper.runs.run_directory import RunDirectory
from train.runs import TINY

DOOMED = Path(__file__).with_name("doomed.py")
_PATHS = os.pathsep.join([str(DOOMED.parent.parent), os.environ.get("PYTHONPATH", "")])
ENVIRONMENT = {**os.environ, "PYTHONPATH": _PATHS, "OMP_NUM_THREADS": "1"}


def train_words(path: Path, *overrides: str) -> list[str]:
    settings = [word for override in (*TINY, *overrides) for word in ("--set", override)]
    return ["train", "--run-dir", str(path), *settings]


def resume_words(path: Path) -> list[str]:
    return ["train", "--resume", str(path)]


def launch(words: Sequence[str]) -> subprocess.Popen[str]:
    """`esper ...` with the short suite, in a process (and process group) of its own."""
    return subprocess.Popen(
        [sys.executable, str(DOOMED), *words],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )


class Launcher:
    """Forks a process per command, of one that has imported everything."""

    def __init__(self, server: subprocess.Popen[str], output: Path) -> None:
        self._server = server
        self._output = output

    def run(
        self, words: Sequence[str], place: str | None = None, count: int = 1, seconds: float | None = None
    ) -> tuple[int, str]:
        """Exit status (-9: killed) and output of a command that is to die at a place, or after some time."""
        request = {"words": words, "place": place, "count": count, "seconds": seconds, "output": str(self._output)}
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(f"{json.dumps(request)}\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline()), self._output.read_text()


@contextmanager
def launcher(folder: Path) -> Iterator[Launcher]:
    words = [sys.executable, str(DOOMED), "serve"]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, env=ENVIRONMENT, stdin=pipe, stdout=pipe, text=True) as server:
        yield Launcher(server, folder / "output.txt")
        assert server.stdin is not None
        server.stdin.close()


def newest_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Those of the newest file, whatever else is there."""
    return load_file(max(RunDirectory(path).checkpoints.glob("iteration-*.safetensors")))


def figures(path: Path) -> dict[str, list[tuple[int, float]]]:
    """All scalars of a run but those that measure time."""
    with RunReader.open(RunDirectory(path).store) as reader:
        return {name: reader.series(name) for name in reader.scalar_names() if name != "seconds"}


def assert_same_end(path: Path, whole: Path) -> None:
    """Every tensor of the newest checkpoint, every figure and every baseline's level agree exactly."""
    found, expected = newest_tensors(path), newest_tensors(whole)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert figures(path) == figures(whole)
    with RunReader.open(RunDirectory(path).store) as one, RunReader.open(RunDirectory(whole).store) as other:
        assert one.metadata() == other.metadata()
