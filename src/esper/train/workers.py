"""Workers that compute tasks: processes of this machine or of Ray, on a CPU or a GPU.

A task is a pure function of its argument, so it does not matter where or how often it is computed: all workers return
the same results.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import platform
import shutil
import signal
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

import torch
import tyro

from esper.errors import ConfigError, RunError, plural
from esper.extras import require_extra
from esper.numerics.devices import CPU, require_device

Task = TypeVar("Task")
Result = TypeVar("Result")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

ReportTasks = Callable[[int, int], None]
"""Called with the number of finished tasks and the number of all tasks."""

# Options of mallopt, as glibc's malloc.h numbers them.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 512 * 2**20
_MAPPED_BYTES = 32 * 2**20
"""The largest value that glibc allows."""
_STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM}


def prepare_process() -> None:
    """Limit this process to one thread, and keep freed memory for the next step.

    With several threads, the rounding of sums depends on the machine. Memory that glibc returned to the system comes
    back by page faults, a tenth of the time of training and a fifth of that of validation.
    """
    torch.set_num_threads(1)
    if platform.libc_ver()[0] == "glibc":
        allocator = ctypes.CDLL(None)
        allocator.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
        allocator.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


@dataclass(frozen=True)
class Shared(Generic[T_co]):
    """A value that many tasks use; it is sent only once to each place where they are computed."""

    value: Any
    """The value itself, or a reference to it in the workers' store."""

    def get(self) -> T_co:
        """The value, for reading."""
        return self.value


def _report_nothing(_done: int, _total: int) -> None:
    pass


class Workers(ABC):
    """Compute tasks in other processes; use them as a context manager.

    Functions and tasks must be picklable. Leaving the context ends the processes at once, whatever they are doing.
    """

    def __init__(self, max_tasks: int) -> None:
        self.max_tasks = max_tasks
        """Largest number of tasks computed at a time. Lowering it leaves some processes idle."""
        self._done = self._total = 0
        self._start_times: dict[int, float] = {}
        """Start times of the running tasks, by index."""
        self._report = _report_nothing

    def map(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> list[Result]:
        """The results in the order of the tasks; raises the same errors as `as_completed`."""
        return [result for _, result in sorted(self.as_completed(function, tasks), key=lambda pair: pair[0])]

    def as_completed(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[tuple[int, Result]]:
        """Yield each task's index and result as soon as it is done; the iterator may be abandoned half-way.

        Errors of tasks are raised here.
        """
        # At most `max_tasks` run at a time; whenever one is done, the next one starts.
        waiting, running = list(enumerate(tasks)), dict[Any, int]()
        self._done, self._total, self._start_times = 0, len(tasks), {}
        self._report(0, len(tasks))
        try:
            while waiting or running:
                while waiting and len(running) < self.max_tasks:
                    index, task = waiting.pop(self._find_next(waiting))
                    self._start_times[index] = time.monotonic()
                    running[self._submit(function, task)] = index
                for handle in self._wait(list(running)):
                    result = self._fetch(handle)
                    index = running.pop(handle)
                    del self._start_times[index]
                    self._done += 1
                    yield index, result
                    self._report(self._done, self._total)  # once the caller has kept the result
        finally:
            self._cancel(list(running))

    def describe_progress(self) -> str:
        """A phrase that describes the progress of the running call of `as_completed`."""
        oldest = min(self._start_times.values(), default=time.monotonic())
        running = f"{len(self._start_times)} under way, for up to {time.monotonic() - oldest:.0f} s"
        return f"{self._done} of {plural(self._total, 'task')} done, {running}"

    @contextmanager
    def report_to(self, report: ReportTasks) -> Generator[None]:
        """Context manager in which calls of `as_completed` report at their start and whenever a task is done."""
        self._report = report
        try:
            yield
        finally:
            self._report = _report_nothing

    def share(self, value: T) -> Shared[T]:
        """Wrap a value that many tasks use; it must not change before they are done."""
        return Shared(value)

    @abstractmethod
    def end(self) -> None:
        """End the processes at once."""

    def _find_next(self, waiting: Sequence[tuple[int, Any]]) -> int:
        """Position of the next task to start in the list ``waiting`` of tasks with their indices."""
        del waiting
        return 0

    @abstractmethod
    def _submit(self, function: Callable[[Task], Any], task: Task) -> Any:
        """Start a task and return its handle."""

    @abstractmethod
    def _wait(self, handles: list[Any]) -> Iterable[Any]:
        """Wait until at least one task is done, and return the handles of all finished tasks."""

    @abstractmethod
    def _fetch(self, handle: Any) -> Any:
        """The result of a finished task; raises the task's error."""

    @abstractmethod
    def _cancel(self, handles: list[Any]) -> None:
        """Abandon tasks."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class LocalWorkers(Workers):
    """Computes tasks in at most one process per core, or in this process if one is enough.

    A process computes on the CPU and at most one other device, as a CUDA context takes hundreds of MB of its memory for
    good. Creating these workers limits this process to one thread, so that its own results are the same everywhere.
    """

    def __init__(self, max_tasks: int) -> None:
        prepare_process()
        super().__init__(min(max_tasks, os.cpu_count() or 1))
        self._most = self.max_tasks
        self._processes: list[_Process] = []
        self._folder: TemporaryDirectory[str] | None = None
        if self._most > 1:
            # Tasks and results are passed as files, and the executors' pipes transmit only their paths. If a process is
            # killed in the middle of a long message, its reader waits for ever; short messages are never cut.
            self._folder = TemporaryDirectory(prefix="esper-workers-", ignore_cleanup_errors=True)
            self._numbers = count()

    def end(self) -> None:
        """End the processes at once, whatever they are doing."""
        for process in self._processes:
            process.kill()
        if self._folder is not None:
            self._folder.cleanup()

    def _find_next(self, waiting: Sequence[tuple[int, Any]]) -> int:
        # Prefer a task for a device that a free process has already opened.
        opened = {process.device for process in self._processes if process.running.done()}
        return next((place for place, (_, task) in enumerate(waiting) if find_device(task) in opened), 0)

    def _submit(self, function: Callable[[Task], Any], task: Task) -> Future[Any]:
        if self._folder is None:
            computed = Future[Any]()
            computed.set_result(function(task))
            return computed
        path = Path(self._folder.name, str(next(self._numbers)))
        _write_value(path, (function, task))
        # New processes inherit the blocked signals, so a signal to the whole group cannot end them prematurely.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
        try:
            return self._choose_process(find_device(task), self._folder.name).submit(path)
        except BrokenProcessPool as error:
            raise self._explain_death() from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _choose_process(self, device: str, folder: str) -> _Process:
        """A free process that has used no device other than this one and the CPU."""
        # All processes may be busy if an earlier call was abandoned.
        if len(self._processes) == self._most and not any(process.running.done() for process in self._processes):
            wait([process.running for process in self._processes], return_when=FIRST_COMPLETED)
        free = [process for process in self._processes if process.running.done()]
        suited = [process for process in free if device in (CPU, process.device)]
        suited += [process for process in free if process.device == CPU]
        if suited:
            chosen = suited[0]
        else:
            if len(self._processes) == self._most:  # the free processes have opened other devices
                self._processes.remove(free[0])
                free[0].kill()
            chosen = _Process(folder)
            self._processes.append(chosen)
        if device != CPU:
            chosen.device = device
        return chosen

    def _wait(self, handles: list[Future[Any]]) -> Iterable[Future[Any]]:
        return wait(handles, return_when=FIRST_COMPLETED).done

    def _fetch(self, handle: Future[Any]) -> Any:
        if self._folder is None:
            return handle.result()
        try:
            path: Path = handle.result()
        except BrokenProcessPool as error:
            raise self._explain_death() from error
        # The outcome has replaced the task in its file.
        result, error = _read_value(path)
        path.unlink()
        if error is not None:
            raise error
        return result

    def _cancel(self, handles: list[Future[Any]]) -> None:
        for future in handles:
            future.cancel()

    def _explain_death(self) -> RunError:
        system_processes = [one for process in self._processes for one in process.context.processes]
        for process in system_processes:
            process.join(0.1)  # the executor's thread may be about to take the exit code
        # The signal or exit code of the first process that has ended.
        codes = [process.exitcode for process in system_processes if process.exitcode is not None]
        cause = next((signal.Signals(-code).name if code < 0 else f"exit code {code}" for code in codes), "killed")
        return RunError(
            f"a worker process ended unexpectedly ({cause}), perhaps out of memory: free memory and run it again "
            "(continue training with --resume), or lower `environments` or `shards`"
        )


class _SpawnContext(SpawnContext):
    """Keeps a list of its processes, because before Python 3.14 an executor cannot end them at once."""

    def __init__(self) -> None:
        self.processes: list[SpawnProcess] = []

    def Process(self, *arguments: Any, **options: Any) -> SpawnProcess:  # noqa: N802 # pyright: ignore[reportIncompatibleVariableOverride]
        """Create a process without starting it."""
        self.processes.append(SpawnProcess(*arguments, **options))
        return self.processes[-1]


class _Process:
    """One worker process, which computes one task after the other."""

    def __init__(self, folder: str) -> None:
        self.context = _SpawnContext()
        self.device = CPU
        """The device that the process has opened; ``cpu`` if none besides the CPU."""
        self.running: Future[Path] = Future()
        """The newest task of the process."""
        self._executor = ProcessPoolExecutor(1, self.context, _prepare_worker, (folder,))

    def submit(self, path: Path) -> Future[Path]:
        """Start to compute the task in a file."""
        self.running = self._executor.submit(_compute_file, path)
        return self.running

    def kill(self) -> None:
        """End the process at once, whatever it is doing."""
        for process in self.context.processes:
            if process.is_alive():
                process.kill()  # it has nothing to save, and ignores milder signals
        self._executor.shutdown(cancel_futures=True)


def _prepare_worker(folder: str) -> None:
    """Ignore Ctrl-C and SIGTERM, which the parent handles, end together with the parent, and use one thread."""
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    prepare_process()


def _end_with_parent(folder: str) -> None:
    """End this worker and delete its files if the parent was killed and can do neither."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _compute_file(path: Path) -> Path:
    """Compute the task in a file, and replace it by the outcome."""
    function, task = _read_value(path)
    _write_value(path, compute_task(function, task))
    return path


def _read_value(path: Path) -> Any:
    return pickle.loads(path.read_bytes())  # noqa: S301 (nobody else can write into the folder)


def _write_value(path: Path, value: object) -> None:
    try:
        path.write_bytes(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
    except OSError as error:
        raise RunError(
            f"cannot write {path.parent}, where workers get their tasks ({error.strerror}): free some space there, or "
            "set TMPDIR to another folder"
        ) from error


def compute_task(function: Callable[[Task], Result], task: Task) -> tuple[Result | None, Exception | None]:
    """The task's result, or its error with this worker's traceback as a note."""
    try:
        return function(task), None
    except Exception as error:  # noqa: BLE001 (the caller handles it, whatever it is)
        error.add_note(f"in a worker process:\n{traceback.format_exc()}")
        return None, error


MOST_WORKERS = 10_000
"""Largest number of tasks computed at a time, in a cluster of any size."""
_NO_DEFAULT_HINT = tyro.conf.arg(help_behavior_hint="")
"""For options whose descriptions state their defaults."""


@dataclass(frozen=True)
class Backend:
    """Where tasks are computed, and how many at a time. This affects only the time that results take."""

    backend: Literal["local", "ray"] = "local"
    """Compute in local processes, or with Ray (extra ``ray``)."""
    workers: Annotated[int | None, _NO_DEFAULT_HINT] = None
    """Tasks computed at a time (default: all; locally at most one per core)."""
    address: Annotated[str | None, _NO_DEFAULT_HINT] = None
    """Address of a Ray cluster: host:port or "auto" (default: Ray is started for this command)."""

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise ConfigError(f"--workers {self.workers}: give at least 1")
        if self.workers is not None and self.workers > MOST_WORKERS:
            raise ConfigError(f"--workers {self.workers}: give at most {MOST_WORKERS}")
        if self.address is not None and self.backend != "ray":
            raise ConfigError("--address is that of a Ray cluster: add --backend ray")
        if self.backend == "ray":
            require_extra("ray", "--backend ray", "ray")

    def open_workers(self, tasks: int) -> Workers:
        """Start workers for at most ``tasks`` tasks at a time; use them as a context manager."""
        # A cluster has more cores than this machine, so there all tasks may run at the same time.
        cores = tasks if self.address else os.cpu_count() or 1
        max_tasks = max(min(tasks, cores), 1) if self.workers is None else self.workers
        if self.backend == "local":
            return LocalWorkers(max_tasks)
        from esper.train.ray_workers import RayWorkers  # noqa: PLC0415 (an extra, and seconds to import)

        return RayWorkers(max_tasks, self.address)


Computing = Annotated[Backend, tyro.conf.arg(name=""), tyro.conf.OmitArgPrefixes]
"""The type of a command's `--backend`, `--workers` and `--address`: `computing: Computing = LOCAL`."""
LOCAL = Backend()
"""Processes of this machine."""


class DeviceTask(ABC):
    """A task that is computed on one device."""

    @property
    @abstractmethod
    def device(self) -> str:
        """The device on which the task is computed, as torch names it."""


def find_device(task: object) -> str:
    """The device on which a task is computed: the CPU, unless the task names another one."""
    return task.device if isinstance(task, DeviceTask) else CPU


@contextmanager
def explain_device_errors() -> Generator[None]:
    """Turn errors of a device (no memory left, no deterministic kernel) into a RunError with advice."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RunError(
            "the device's memory ran out: set networks_per_pass to some of the networks, examples_per_pass to some of "
            "the examples, or lower environments"
        ) from error
    except RuntimeError as error:
        if torch.use_deterministic_algorithms.__name__ not in str(error):
            raise
        operation = str(error).partition(" ")[0]
        raise RunError(
            f"{operation} has no kernel that sums in a fixed order on this device: use another layer in hosts and "
            "blueprints, or set deterministic=false, with which a run cannot be repeated to the last bit"
        ) from error


def require_devices(names: Iterable[str], workers: Workers) -> None:
    """Check that workers have the devices on which they will compute."""
    workers.map(_require_device, [_DeviceCheck(name) for name in sorted(set(names) - {CPU})])


@dataclass(frozen=True)
class _DeviceCheck(DeviceTask):
    name: str

    @property
    def device(self) -> str:
        return self.name


def _require_device(task: DeviceTask) -> None:
    require_device(task.device)
