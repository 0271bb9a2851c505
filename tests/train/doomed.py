"""The command line with the short suite, in processes that kill themselves, or are killed, on request.

``python doomed.py train ...`` is ``esper train ...``. ``python doomed.py serve`` imports everything once and then forks
a process for each request, a line of JSON on stdin, answering with its exit status; so a kill costs no import of torch.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch

from esper import serialization
from esper.cli import main
from esper.commands import evaluate, train
from esper.control.learned import LearnedController
from esper.control.rules import Heuristic
from esper.rl.ppo import PolicyOptimizer
from esper.runs import database
from esper.runs.store import RunStore
from esper.tasks.registry import register
from esper.train import results, trainer
from train.runs import ShortSuite

# At import, so that workers, which import this module too, know the suite.
register(ShortSuite)

COMMANDS = (train, evaluate)  # imported for `serve`


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


def before(owner: Any, name: str) -> Callable[[int], None]:
    """Die at a call of a function."""

    def arm(count: int) -> None:
        original, calls = getattr(owner, name), iter(range(1, count))

        def deadly(*arguments: Any, **more: Any) -> Any:
            if next(calls, None) is None:
                die()
            return original(*arguments, **more)

        setattr(owner, name, deadly)

    return arm


def writing(owner: Any, suffix: str, share: float) -> Callable[[int], None]:
    """Die when so much of a file is written; 1: it is there under its own name."""

    def arm(count: int) -> None:
        original, calls = owner.write_atomically, iter(range(1, count))

        def deadly(path: Path, content: bytes | str) -> None:
            mine = path.name.endswith(suffix) and next(calls, None) is None
            data = content.encode() if isinstance(content, str) else content
            if mine and share < 1:
                path.with_name(f".{path.name}.partial").write_bytes(data[: int(len(data) * share)])
                die()
            original(path, content)
            if mine:
                die()

        owner.write_atomically = deadly

    return arm


def committing(count: int) -> None:
    """Die in the middle of a transaction of the store."""
    original, calls = RunStore._transaction, iter(range(1, count))

    @contextmanager
    def deadly(store: RunStore) -> Iterator[None]:
        with original(store):
            yield
            if next(calls, None) is None:
                die()

    RunStore._transaction = deadly


PLACES: dict[str, Callable[[int], None]] = {
    "making the store": before(database, "open_for_writing"),
    "in the store's schema": before(database, "closing"),
    "baselines": before(Heuristic, "act"),
    "rollout": before(trainer.RolloutBuffer, "add"),
    "update": before(PolicyOptimizer, "step"),
    "probe": before(LearnedController, "act"),
    "store's flush": committing,
    "half the tensors": writing(serialization, ".safetensors", 0.5),
    "no manifest": writing(serialization, ".safetensors", 1),
    "half the manifest": writing(serialization, ".json", 0.5),
    "fresh checkpoint": writing(serialization, ".json", 1),
    "half a cohort": writing(results, ".json", 0.5),
    "whole cohort": writing(results, ".json", 1),
}
"""Where a process can be made to die, at the n-th time that it gets there."""


def _child(request: dict[str, Any]) -> NoReturn:
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if request["place"] is not None:
        PLACES[request["place"]](request["count"])
    try:
        code = main(request["words"])
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    sys.stdout.flush()
    os._exit(code)


def _status(process: int, seconds: float | None) -> int:
    """The exit code of a process, or less the signal that ended it; it is killed after so many seconds."""
    end = None if seconds is None else time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(process, 0 if end is None else os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if end is not None and time.monotonic() > end:
            os.kill(process, signal.SIGKILL)
            end = None
        time.sleep(0.002)


def serve() -> None:
    torch.optim.SGD([torch.zeros(1)])  # imports much, which a fork should find done
    for line in sys.stdin:
        request = json.loads(line)
        process = os.fork()
        if not process:
            _child(request)
        sys.stdout.write(f"{_status(process, request['seconds'])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        sys.exit(main())
