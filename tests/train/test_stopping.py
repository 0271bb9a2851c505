"""Ctrl-C and SIGTERM end a run at once, with a checkpoint of its last whole iteration, and nothing changes by them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from esper import serialization
from esper.control.learned import LearnedController
from esper.rl.ppo import PolicyOptimizer
from esper.runs.events import RunInterrupted
from esper.runs.reader import RunReader
from esper.runs.run_directory import RunDirectory
from esper.serialization import Checkpoints
from esper.signals import Interrupts, Terminated
from esper.train import trainer
from train.runs import (
    ENVIRONMENT,
    Launcher,
    assert_same_end,
    ignore,
    launch,
    resume_words,
    resumed,
    short_suite,
    started,
    tiny,
    train_words,
)

pytestmark = pytest.mark.landing

Count = Callable[[str, int], None]

OVERRIDES = ("iterations=4", "checkpoint_every=4", "probe_every=2")
with short_suite():
    SETTINGS = tiny(*OVERRIDES)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stopping") / "whole"
    with started(path, SETTINGS) as trainer:
        trainer.measure_baseline_levels()
        trainer.train(ignore)
    return path


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_the_first_signal_is_only_noted_and_the_second_stops():
    with Interrupts() as interrupts:
        send(signal.SIGTERM)
        assert interrupts.requested == signal.SIGTERM
        with pytest.raises(Terminated) as stopped:
            interrupts.raise_if_requested()
        assert stopped.value.code == 143
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_in_a_region_the_first_signal_stops_at_once_even_one_from_before():
    with Interrupts() as interrupts:
        with pytest.raises(Terminated), interrupts.interruptible():
            send(signal.SIGTERM)
        with pytest.raises(Terminated), interrupts.interruptible():
            pass


def test_handlers_are_put_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Interrupts() as interrupts, interrupts.interruptible():
        pass
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


PLACES = {
    "rollout": (trainer.RolloutBuffer, "add", 20, 2),  # in the third iteration; there are 8 steps in each
    "update": (PolicyOptimizer, "step", 1, 1),
    "update before a probe": (PolicyOptimizer, "step", 6, 1),
    "probe": (LearnedController, "act", 3, 1),
    "checkpoint": (serialization, "write_atomically", 1, 4),  # of the last iteration, which ends the run anyway
}
"""What to interrupt, at which call, and which iteration is the last one whole then."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
@pytest.mark.parametrize("place", PLACES)
def test_a_run_stops_where_it_is_and_goes_on_exactly(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, place: str, number: int, count_figure: Count
):
    owner, name, call, done = PLACES[place]
    original, calls = getattr(owner, name), iter(range(1, call))

    def interrupted(*arguments: object, **more: object) -> object:
        if next(calls, None) is None:
            monkeypatch.undo()
            send(number)
        return original(*arguments, **more)

    path = tmp_path / "run"
    with started(path, SETTINGS) as trainer:
        trainer.measure_baseline_levels()
        monkeypatch.setattr(owner, name, interrupted)
        if place == "checkpoint":
            trainer.train(ignore)
        else:
            with pytest.raises(Terminated if number == signal.SIGTERM else KeyboardInterrupt):
                trainer.train(ignore)
    assert Checkpoints(RunDirectory(path).checkpoints).iterations() == [0, done]
    with resumed(path) as trainer:
        assert trainer.done == done
        trainer.train(ignore)
    assert_same_end(path, whole)
    with RunReader.open(RunDirectory(path).store) as reader:
        reason = "SIGTERM" if number == signal.SIGTERM else "Ctrl-C"
        assert [event.reason for event in reader.events(RunInterrupted)] == [reason] * (place != "checkpoint")
    count_figure("training runs stopped by a signal and resumed bit-exactly", 1)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_to_a_real_process(tmp_path: Path, whole: Path, fork: Launcher, number: int, code: int):
    path = tmp_path / "run"
    with launch(train_words(path, *OVERRIDES)) as process:
        while not process.stdout.readline().startswith("iteration 1/"):
            pass
        process.send_signal(number)
        output, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (code, "")
    assert output.splitlines()[-1] == f"resume with: esper train --resume {path}"
    with RunReader.open(RunDirectory(path).store) as reader:
        last = reader.last_iteration()
    assert last is not None
    assert last < 4
    assert Checkpoints(RunDirectory(path).checkpoints).iterations() == [0, last]
    assert fork.run(resume_words(path))[0] == 0
    assert_same_end(path, whole)


LARGE = ("suite=tokens", "environments=128", "shards=2")
SLOW_PLACES = {"baselines": (56, "measuring baselines"), "rollout": (2, "baselines: ")}
"""What takes long: instances for the baselines, and the line before it."""


@pytest.mark.slow
@pytest.mark.parametrize("place", SLOW_PLACES)
def test_stopping_does_not_wait_for_workers(tmp_path: Path, place: str):
    path = tmp_path / "run"
    instances, line = SLOW_PLACES[place]
    words = [sys.executable, "-m", "esper", *train_words(path, *LARGE, f"probe_instances={instances}")]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, env=ENVIRONMENT, stdout=pipe, stderr=pipe, text=True, process_group=0) as process:
        while not process.stdout.readline().startswith(line):
            pass
        time.sleep(3)  # workers have begun
        began = time.monotonic()
        os.killpg(process.pid, signal.SIGTERM)
        output, errors = process.communicate(timeout=30)
        took = time.monotonic() - began
    assert (process.returncode, errors) == (143, "")
    assert output.splitlines()[-1] == f"resume with: esper train --resume {path}"
    assert took < 3
