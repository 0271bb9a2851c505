"""Training runs so small that a test can afford them."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from esper.config.loading import dump_settings, load_settings
from esper.runs.reader import RunReader
from esper.runs.run_directory import RunDirectory
from esper.runs.store import RunStore
from esper.tasks import registry
from esper.tasks.token_suite import TokenSuite
from esper.train.iteration import Iteration
from esper.train.settings import TrainSettings
from esper.train.trainer import Trainer
from esper.train.workers import LocalWorkers

TINY = (
    "suite=short",
    "environments=8",
    "shards=1",
    "probe_instances=2",
    "policy.hidden=16",
    "policy.width=16",
    "ppo.group=4",
    "ppo.minibatches=2",
    "ppo.epochs=2",
)
"""Overrides of the default settings; they need `short_suite`."""


def tiny(*overrides: str) -> TrainSettings:
    return load_settings(TrainSettings, None, (*TINY, *overrides))


@contextmanager
def started(path: Path, settings: TrainSettings) -> Iterator[Trainer]:
    run = RunDirectory.create(path)
    dump_settings(settings, run.config)
    with RunStore.create(run.store) as store, LocalWorkers(settings.shards) as workers:
        yield Trainer.open(run, settings, store, workers)


def create_untrained_run(path: Path, *overrides: str) -> str:
    """The directory of a run whose policy has learned nothing yet, on the token suite."""
    with started(path, tiny("suite=tokens", *overrides)):
        return str(path)


@contextmanager
def resumed(path: Path) -> Iterator[Trainer]:
    run = RunDirectory.open(path)
    settings = load_settings(TrainSettings, run.config)
    with RunStore.open(run.store) as store, LocalWorkers(settings.shards) as workers:
        yield Trainer.open(run, settings, store, workers)


def ignore(iteration: Iteration) -> None:
    """A report of an iteration that nobody reads."""


def at(number: int, act: Callable[[], None]) -> Callable[[Iteration], None]:
    """A report that acts once, after that iteration."""

    def report(iteration: Iteration) -> None:
        if iteration.number == number:
            act()

    return report


# The token suite with episodes so short that a test can afford many.


class ShortSuite(TokenSuite):
    name = "short"
    steps = 8
    batches_per_step = 1
    validation_size = 32
    test_size = 64


@contextmanager
def short_suite() -> Iterator[None]:
    """While active, suite ``short`` is registered by its name, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry._suites, ShortSuite.name, ShortSuite)
        yield


# Runs in processes of their own, and whether two of them came to the same end.


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
        self._server.stdin.write(f"{json.dumps(request)}\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline()), self._output.read_text()


@contextmanager
def launcher(folder: Path) -> Iterator[Launcher]:
    words = [sys.executable, str(DOOMED), "serve"]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, env=ENVIRONMENT, stdin=pipe, stdout=pipe, text=True) as server:
        yield Launcher(server, folder / "output.txt")
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
