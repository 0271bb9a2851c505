"""Ray's workers, on this machine or on a cluster: retries, placement and transport are Ray's."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, TypeVar, cast

import ray
from ray.exceptions import RayError, RayTaskError

from esper.errors import ConfigError, RunError
from esper.train.process_pool import Failed, Finished, Said, Word, prepare_process, stream_words
from esper.train.workers import DeviceTask, Shared, Workers

Task = TypeVar("Task")
Result = TypeVar("Result")
Message = TypeVar("Message")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

RETRIES = 3
"""How often a task is begun anew whose worker died."""
_NEW = "local"
"""Ray's word for a cluster of its own on this machine, even where another one is running."""
_RUNNING = "auto"
"""Ray's word for the cluster that this machine belongs to."""
_REACH_SECONDS = 10


class Stored(Shared[T_co]):
    """A shared value in Ray's object store: it reaches each machine once."""

    def get(self) -> T_co:
        """The value."""
        return cast("T_co", ray.get(self.value))


class RayWorkers(Workers):
    """Computes tasks as Ray tasks, each on one CPU and in one thread, and with a GPU of its own if it asks for CUDA.

    A task whose worker dies is begun anew, elsewhere if need be. As many of its words as were heard already are not
    heard again, so it has to say the same again. This process computes in one thread from then on.
    """

    def __init__(self, most: int, address: str | None = None) -> None:
        """Compute at most ``most`` tasks at a time: in a Ray started here, or in the cluster at ``address``.

        Raises:
            ConfigError: there is no such cluster.
            RunError: Ray cannot be started.
        """
        prepare_process()
        self.most = most
        """Tasks computed at a time; fewer later leave the other CPUs idle."""
        _connect(most, address)
        # Only tasks hold CPUs, so all CPUs compute.
        self._task: Any = ray.remote(num_cpus=1, num_returns="streaming", max_retries=RETRIES)(_stream)

    def stream(
        self,
        function: Callable[[Task], Generator[Message, None, Result]],
        tasks: Sequence[Task],
        hear: Callable[[Message], None],
    ) -> Iterator[tuple[int, Result]]:
        """As in the base; a call that is given up leaves no task behind."""
        waiting, going = deque(enumerate(tasks)), dict[Any, int]()
        try:
            while waiting or going:
                while waiting and len(going) < self.most:
                    index, task = waiting.popleft()
                    going[self._task.options(num_gpus=_gpus(task)).remote(function, task)] = index
                # One of those that have something to say, of which there is one in the end.
                ready = cast("list[Any]", ray.wait(list(going), num_returns=1, fetch_local=False)[0])
                stream = ready[0]
                match _next(stream):
                    case Said(what):
                        hear(what)
                    case Finished(result):
                        yield going.pop(stream), result
                    case Failed(error):
                        raise error
        finally:
            if ray.is_initialized():  # else all have ended
                for stream in going:
                    ray.cancel(stream, force=True)

    def share(self, value: T) -> Stored[T]:
        """Put it into Ray's object store."""
        return Stored(ray.put(value))

    def end(self) -> None:
        """End Ray here, and all tasks with it."""
        ray.shutdown()


def _connect(most: int, address: str | None) -> None:
    if address is not None:
        _reach(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    stopping = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address or _NEW,
            num_cpus=None if address else most,
            include_dashboard=None if address else False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except Exception as error:  # Ray raises bare ones, too
        ray.shutdown()  # what has started of it
        reason = " ".join(str(error).split())
        if address is None:
            raise RunError(f"Ray cannot be started ({reason}): try again, or use --backend local") from error
        raise ConfigError(
            f"no Ray cluster takes this command at {address} ({reason}): give its head's host:port, and set "
            "RAY_AUTH_MODE=token if it wants a token"
        ) from error
    finally:
        signal.signal(signal.SIGTERM, stopping)  # Ray's own handler would end the process without closing anything


def _reach(address: str) -> None:
    """ConfigError if nobody listens there: Ray itself would try for many minutes."""
    if address == _RUNNING:
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"--address {address}: write it as host:port, or {_RUNNING}")
    try:
        socket.create_connection((host, int(port)), _REACH_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"no Ray cluster answers at {address} ({error}): give its head's host:port") from error


def _gpus(task: object) -> int:
    """How many a task needs; ConfigError if it needs one and the cluster has none, which Ray would wait for."""
    needed = int(isinstance(task, DeviceTask) and task.device.partition(":")[0] == "cuda")
    if needed and not ray.cluster_resources().get("GPU"):
        raise ConfigError("a task is to run on a GPU and Ray has none: set devices=[cpu], or add machines with GPUs")
    return needed


def _next(stream: Any) -> Word:
    """What a task says next."""
    try:
        return cast("Word", ray.get(next(stream)))
    except RayTaskError as error:
        raise RunError(
            f"a Ray worker could not take up a task ({error.cause!r}): install the same Esper and torch on all machines"
        ) from error
    except RayError as error:
        reason = " ".join(str(error).split())
        raise RunError(
            f"a Ray task died {1 + RETRIES} times, perhaps for want of memory: free some and run it again (training "
            f"goes on with --resume), or lower `environments`; Ray says: {reason}"
        ) from error


def _stream(function: Callable[[Any], Generator[Any, None, Any]], task: Any) -> Generator[Word]:
    """All that a task says; a worker's life."""
    prepare_process()
    yield from stream_words(function, task)
