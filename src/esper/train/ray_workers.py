"""Workers on Ray, on this machine or a cluster; Ray does retries, placement and transport."""

import logging
import os
import signal
import socket
from collections.abc import Callable
from typing import Any, TypeVar, cast

import ray
from ray.exceptions import RayError, RayTaskError

from esper.errors import ConfigError, RunError
from esper.train.workers import Shared, Workers, compute_task, find_device, prepare_process

Task = TypeVar("Task")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

RETRIES = 3
"""How often a task is restarted after its worker died."""
SECONDS_BETWEEN_LINES = 30.0
"""Seconds between warnings that no CPU or GPU is free."""
_NEW_CLUSTER = "local"
"""Ray's address for a new cluster on this machine, even if another one is running."""
_OWN_CLUSTER = "auto"
"""Ray's address for the cluster that this machine belongs to."""
_CONNECT_SECONDS = 10
_log = logging.getLogger(__name__)


class Stored(Shared[T_co]):
    """A shared value in Ray's object store, which is sent to each machine once."""

    def get(self) -> T_co:
        """The value."""
        return cast("T_co", ray.get(self.value))


class RayWorkers(Workers):
    """Computes tasks as Ray tasks, each on one CPU and in one thread, and with its own GPU if it needs CUDA.

    If a worker dies, its task is restarted, on another machine if necessary. Creating these workers limits this process
    to one thread.
    """

    def __init__(self, max_tasks: int, address: str | None = None) -> None:
        """Compute at most ``max_tasks`` tasks at a time, with a Ray started here or in the cluster at ``address``."""
        prepare_process()
        super().__init__(max_tasks)
        _connect(max_tasks, address)
        # Tasks, not actors: an actor would occupy its CPU, and a small machine might have none left for tasks.
        # One remote function per number of GPUs. Ray ends a process that has used a GPU, because a context stays on the
        # first GPU assigned to it, but only if the number is set here and not by `options`.
        self._tasks: list[Any] = [
            ray.remote(num_cpus=1, num_gpus=gpus, max_retries=RETRIES)(_compute) for gpus in (0, 1)
        ]

    def share(self, value: T) -> Stored[T]:
        """Put a value into Ray's object store, from where it is sent to each machine once."""
        return Stored(ray.put(value))

    def end(self) -> None:
        """End Ray here, and all tasks with it."""
        ray.shutdown()

    def _submit(self, function: Callable[[Task], Any], task: Task) -> Any:
        # A CUDA device means one GPU, which Ray assigns to the task.
        gpus = int(find_device(task).partition(":")[0] == "cuda")
        if gpus and not ray.cluster_resources().get("GPU"):  # Ray would wait for one
            raise ConfigError("a task needs a GPU and Ray has none: set devices=[cpu], or add machines with GPUs")
        return self._tasks[gpus].remote(function, task)

    def _wait(self, handles: list[Any]) -> list[Any]:
        # Wait without a limit, but report from time to time why nothing happens.
        while True:
            done = cast("list[Any]", ray.wait(handles, timeout=SECONDS_BETWEEN_LINES, fetch_local=False)[0])
            if done:
                return done
            total = cast("dict[str, float]", ray.cluster_resources())
            free = cast("dict[str, float]", ray.available_resources())
            counts = {name: (free.get(name, 0.0), total.get(name, 0.0)) for name in ("CPU", "GPU")}
            # Every task needs a CPU; a GPU is missing only where the cluster has any.
            if any(available < 1 and (name == "CPU" or size) for name, (available, size) in counts.items()):
                free_counts = " and ".join(
                    f"{available:g} of {size:g} {name}s" for name, (available, size) in counts.items()
                )
                _log.warning("%s, or waiting: Ray has %s free (`ray status`)", self.describe_progress(), free_counts)

    def _fetch(self, handle: Any) -> Any:
        # Errors of a task are returned as values, so errors that Ray raises are about the worker.
        try:
            result, error = ray.get(handle)
        except RayTaskError as error:
            raise RunError(
                f"a Ray worker could not start a task ({error.cause!r}): install the same Esper and torch on all "
                "machines"
            ) from error
        except RayError as error:
            reason = " ".join(str(error).split())
            raise RunError(
                f"a Ray task died {1 + RETRIES} times, perhaps out of memory: free memory and run it again "
                f"(continue training with --resume), or lower `environments`; Ray reports: {reason}"
            ) from error
        if error is not None:
            raise error
        return result

    def _cancel(self, handles: list[Any]) -> None:
        if ray.is_initialized():  # else all have ended
            for task in handles:
                ray.cancel(task, force=True)


def _connect(max_tasks: int, address: str | None) -> None:
    # Ray itself would try for many minutes to reach an address without a cluster.
    if address is not None and address != _OWN_CLUSTER:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise ConfigError(f"--address {address}: write it as host:port, or {_OWN_CLUSTER}")
        try:
            socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"no Ray cluster is reachable at {address} ({error}): give its head's host:port"
            ) from error

    # Ray would report usage over the network, and replace the handler of SIGTERM.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    stopping = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address or _NEW_CLUSTER,
            num_cpus=None if address else max_tasks,
            include_dashboard=None if address else False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except Exception as error:  # Ray raises bare ones, too
        ray.shutdown()  # the part that has started
        reason = " ".join(str(error).split())
        if address is None:
            raise RunError(f"Ray cannot be started ({reason}): try again, or use --backend local") from error
        raise ConfigError(
            f"no Ray cluster accepts this command at {address} ({reason}): give its head's host:port, and set "
            "RAY_AUTH_MODE=token if it needs a token"
        ) from error
    finally:
        signal.signal(signal.SIGTERM, stopping)  # Ray's own handler would end the process without closing anything


def _compute(function: Callable[[Any], Any], task: Any) -> tuple[Any, Exception | None]:
    """Compute a task in a Ray worker: its result, or its error."""
    prepare_process()
    return compute_task(function, task)
