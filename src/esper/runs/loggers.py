"""Live metrics for TensorBoard, Weights & Biases and MLflow, sent through the tools' own libraries.

A file keeps the run's address at the tool and the last step sent, so that a resumed run sends no step twice.
"""

from __future__ import annotations

import os
import re
import secrets
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, ValidationError

from esper import __version__
from esper.errors import ConfigError, RunError
from esper.extras import require_extra
from esper.files import write_atomically
from esper.runs.events import LifecycleTransition
from esper.runs.reader import RunReader

Tool = Literal["tensorboard", "wandb", "mlflow"]
"""Supported tools; the extra that installs a tool's library has the same name."""
Value = str | int | float | bool

_STAGES = ("germinated", "training", "blending", "holding", "fossilized", "pruned")
LIBRARIES: Mapping[str, str] = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}
_PROJECT = "esper"
"""The project at W&B and MLflow, unless an environment variable names another."""
_MLFLOW_PARAMETERS, _MLFLOW_CHARACTERS = 100, 5000
"""MLflow's limits: parameters in a request, and characters in a value."""


def require_logger(tool: str) -> None:
    """Raise ConfigError if the tool does not exist or its library is not installed."""
    if tool not in LIBRARIES:
        raise ConfigError(f"there is no logger {tool!r}: choose one of {', '.join(LIBRARIES)}")
    require_extra(tool, f"the logger {tool}", LIBRARIES[tool])


@contextmanager
def open_loggers(
    tools: Sequence[str], folder: Path, name: str, settings: Mapping[str, Any]
) -> Generator[Callable[[RunReader, int], None]]:
    """Context manager of a run's loggers: a function that sends an iteration's metrics from the store."""
    loggers = [Logger(tool, folder, name) for tool in dict.fromkeys(tools)]
    for logger in loggers:
        logger.log_settings(settings)

    def log_iteration(reader: RunReader, iteration: int) -> None:
        metrics = read_metrics(reader, iteration) if loggers else {}
        for logger in loggers:
            logger.log_metrics(metrics, iteration)

    failed = False
    try:
        yield log_iteration
    except Exception:
        failed = True
        raise
    finally:
        for logger in loggers:
            logger.close(failed=failed)


def read_metrics(reader: RunReader, iteration: int) -> dict[str, float]:
    """The scalars of an iteration, and the seeds that entered each stage, as ``lifecycle/STAGE``."""
    entered = dict(
        reader.rows(
            "SELECT json_extract(payload, '$.after') AS stage, count(*) AS seeds FROM events "
            "WHERE type = ? AND iteration = ? GROUP BY stage",
            LifecycleTransition.name,
            iteration,
        )
    )
    counts = {f"lifecycle/{stage}": float(entered.get(stage, 0)) for stage in _STAGES}
    return {**reader.scalars_at(iteration), **counts}


class _LoggerState(BaseModel):
    """What a later process needs to continue a run at a tool, kept in a file."""

    model_config = ConfigDict(extra="forbid")

    address: dict[str, str] | None = None
    """None until the run has been opened at the tool."""
    step: int = -1
    """The last one that was sent."""


class Logger:
    """A tool's logger, which sends a run's settings, and each step once; if the tool fails, it warns and sends no more.

    TensorBoard's files are in ``folder/tensorboard``. The project at W&B is ``WANDB_PROJECT``, by default ``esper``.
    MLflow's store is ``MLFLOW_TRACKING_URI``, by default files in ``folder/mlflow``, and its experiment is
    ``MLFLOW_EXPERIMENT_NAME``, by default ``esper``.

    Args:
        tool: ``tensorboard``, ``wandb`` or ``mlflow``.
        folder: Where the run's address is kept. A logger with the same folder continues that run.
        name: The run's name at the tool; by default the folder's name.

    Raises:
        ConfigError: the tool does not exist, or its library is not installed.
        RunError: the folder cannot be written, or the logger's file in it cannot be read.
    """

    def __init__(self, tool: str, folder: str | Path, name: str | None = None) -> None:
        require_logger(tool)
        folder = Path(folder)
        self._name, self._file = tool, folder / f"{tool}.json"
        self._tool: _TensorBoard | _WandB | _MLflow | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            content = self._file.read_bytes() if self._file.exists() else b"{}"
            self._state = _LoggerState.model_validate_json(content)
        except OSError as error:
            raise RunError(f"cannot use the folder {folder} ({error.strerror}): choose another") from error
        except ValidationError as error:
            raise RunError(f"{self._file} cannot be read: remove it to start a new run in the tool") from error
        with self._warn_of_failure():
            self._tool = _TOOLS[tool](folder, name or folder.absolute().name, self._state.address)
            self._save(address=self._tool.address)

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        """Send the run's settings, nested or flat, unless a resumed run has sent them."""
        with self._warn_of_failure():
            if self._tool is not None and self._state.step < 0:
                self._tool.log_settings(dict(_flatten(settings)))

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Send the metrics of a step, unless it was sent before a resumption."""
        with self._warn_of_failure():
            if self._tool is not None and step > self._state.step:
                # Saved before sending: if the process is killed in between, the step is lost but never sent twice.
                self._save(step=step)
                self._tool.log_metrics(metrics, step)

    def close(self, *, failed: bool = False) -> None:
        """Send everything that is pending, and end the run at the tool."""
        with self._warn_of_failure():
            tool, self._tool = self._tool, None
            if tool is not None:
                tool.close(failed)

    def _save(self, **changes: object) -> None:
        self._state = self._state.model_copy(update=changes)
        write_atomically(self._file, self._state.model_dump_json())

    @contextmanager
    def _warn_of_failure(self) -> Generator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 (whatever a tool raises, training goes on)
            self._tool = None
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            warnings.warn(f"{self._name} gets no more metrics of this run ({reason}); training continues", stacklevel=4)


# A run at a tool, opened at the ``address`` of an earlier process or anew.


class _TensorBoard:
    def __init__(self, folder: Path, name: str, address: dict[str, str] | None) -> None:
        from tensorboardX import SummaryWriter  # noqa: PLC0415

        self.address = address or {"folder": str((folder / "tensorboard").absolute())}
        events = Path(self.address["folder"])
        # Two files made in the same second need different names.
        count = len(list(events.glob("*tfevents*")))
        self._writer = SummaryWriter(str(events), filename_suffix=f".{count:06d}")

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        rows = "\n".join(f"| {key} | {value} |" for key, value in settings.items())
        self._writer.add_text("settings", f"| name | value |\n|---|---|\n{rows}", 0)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, failed: bool) -> None:
        self._writer.close()


class _WandB:
    """Sends one row per step. Offline, each process writes a folder for the same run, which ``wandb sync`` uploads."""

    def __init__(self, folder: Path, name: str, address: dict[str, str] | None) -> None:
        import wandb  # noqa: PLC0415

        project = os.environ.get("WANDB_PROJECT", _PROJECT)
        self.address = address or {"project": project, "run": secrets.token_hex(4)}
        # No code, no machine statistics, no console output.
        settings = wandb.Settings(
            console="off",
            disable_git=True,
            quiet=True,
            save_code=False,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        self._run = wandb.init(
            project=self.address["project"],
            id=self.address["run"],
            name=name,
            resume="allow",
            dir=folder,
            config={"esper_version": __version__},
            settings=settings,
        )

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        self._run.config.update(dict(settings))

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step, commit=True)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)


class _MLflow:
    """Sends metrics to a tracking store. Names get dots for slashes, which would become folders in a file store."""

    def __init__(self, folder: Path, name: str, address: dict[str, str] | None) -> None:
        from mlflow.tracking import MlflowClient  # noqa: PLC0415

        # A resumed run stays where it is, even if the environment has changed.
        files = f"file:{(folder / 'mlflow').absolute()}"
        uri = address["uri"] if address else os.environ.get("MLFLOW_TRACKING_URI") or files
        if uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = MlflowClient(uri)
        if address is None:
            title = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
            existing = self._client.get_experiment_by_name(title)
            experiment = self._client.create_experiment(title) if existing is None else existing.experiment_id
            address = {"uri": uri, "run": self._client.create_run(experiment, run_name=name).info.run_id}
        self.address = address
        self._client.update_run(address["run"], status="RUNNING")

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        from mlflow.entities import Param  # noqa: PLC0415

        pairs = [Param(_mlflow_key(name), str(value)[:_MLFLOW_CHARACTERS]) for name, value in settings.items()]
        for start in range(0, len(pairs), _MLFLOW_PARAMETERS):
            self._client.log_batch(self.address["run"], params=pairs[start : start + _MLFLOW_PARAMETERS])

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric  # noqa: PLC0415

        now = round(time.time() * 1000)
        entries = [Metric(_mlflow_key(name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self.address["run"], metrics=entries)

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self.address["run"], "FAILED" if failed else "FINISHED")


_TOOLS = {"tensorboard": _TensorBoard, "wandb": _WandB, "mlflow": _MLflow}


def _mlflow_key(name: str) -> str:
    return re.sub(r"[^\w\-. ]", "_", name.replace("/", "."))


def _flatten(value: Any, path: str = "") -> Iterator[tuple[str, Value]]:
    """Nested values by path, such as ``ppo.gamma``; a list of plain values is one text, None is left out."""
    if isinstance(value, Value):
        yield path, value
    elif isinstance(value, Mapping):
        for key, part in cast("Mapping[str, Any]", value).items():
            yield from _flatten(part, f"{path}.{key}" if path else key)
    elif isinstance(value, list | tuple):
        parts = cast("Sequence[Any]", value)
        if all(isinstance(part, Value) for part in parts):
            yield path, ", ".join(map(str, parts))
        else:
            for index, part in enumerate(parts):
                yield from _flatten(part, f"{path}.{index}")
