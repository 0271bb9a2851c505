"""A run in MLflow's tracking store.

A step of MLflow is an iteration, and its timestamp the time at which that was finished. Metrics cannot be taken back,
and a store of files keeps a second one of the same step beside the first. So iterations that a resumed run makes anew
are not written again, and of the first iteration after an opening only what the store does not have yet.
Tags and artifacts are replaced. MLflow has no histograms.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager

from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from esper.errors import ConfigError
from esper.runs.bridges.bridge import Address, Logger, Opening, Value
from esper.runs.bridges.tail import Figures

EXPERIMENT = "esper"
_MOST_AT_ONCE = 100
"""Parameters in one request; tags too."""
_LONGEST = 5000
"""Characters of a tag or parameter."""


def open_logger(opening: Opening) -> Logger:
    """Go on with a run in the store at the destination, a URI; by default that of the environment, or files."""
    address = opening.address
    files = f"file:{(opening.folder / 'mlflow').absolute()}"
    asked = opening.destination or os.environ.get("MLFLOW_TRACKING_URI") or files
    uri = address.destination if address else asked
    if uri.startswith("file:"):
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    with _explain_errors(uri):
        client = MlflowClient(uri)
        if address is None:
            address = Address(uri, _begin_run(client, opening))
        client.update_run(address.run, status="RUNNING")
    return MLflowLogger(client, address, opening.address is not None)


def _begin_run(client: MlflowClient, opening: Opening) -> str:
    known = client.get_experiment_by_name(EXPERIMENT)
    experiment = client.create_experiment(EXPERIMENT) if known is None else known.experiment_id
    run = client.create_run(experiment, run_name=opening.name).info.run_id
    for part in _in_parts(opening.settings):
        client.log_batch(run, params=[Param(_key(name), value) for name, value in part])
    for part in _in_parts(opening.description):
        client.log_batch(run, tags=[RunTag(_key(f"esper.{name}"), value) for name, value in part])
    return run


class MLflowLogger(Logger):
    """Metrics by iteration, notes and history as artifacts."""

    def __init__(self, client: MlflowClient, address: Address, suspicious: bool) -> None:
        self.address = address
        self._client = client
        self._suspicious = suspicious
        """The next iteration may be there already, or a part of it."""

    def log_iteration(self, figures: Figures) -> None:
        run, step, moment = self.address.run, figures.number, round(figures.time * 1000)
        with _explain_errors(self.address.destination):
            metrics = [Metric(_key(name), value, moment, step) for name, value in figures.scalars.items()]
            missing = [metric for metric in metrics if not (self._suspicious and self._has(metric.key, step))]
            self._client.log_batch(run, metrics=missing)
            if figures.notes:
                self._client.log_text(run, "\n".join(figures.notes), f"notes/iteration-{step:08d}.txt")
        self._suspicious = False

    def log_history(self, lines: Sequence[str], iteration: int) -> None:
        with _explain_errors(self.address.destination):
            self._client.log_text(self.address.run, "\n".join(lines), "history.txt")

    def close(self, outcome: str | None) -> None:
        if outcome is not None:
            with _explain_errors(self.address.destination):
                self._client.set_terminated(self.address.run, outcome.upper())

    def _has(self, name: str, step: int) -> bool:
        return any(metric.step == step for metric in self._client.get_metric_history(self.address.run, name))


def _key(name: str) -> str:
    """The name without what MLflow refuses, and without slashes: a store of files makes folders of them."""
    return re.sub(r"[^\w\-. ]", "_", name.replace("/", "."))


def _in_parts(values: Mapping[str, Value]) -> Iterator[list[tuple[str, str]]]:
    pairs = [(name, str(value)[:_LONGEST]) for name, value in values.items()]
    return (pairs[start : start + _MOST_AT_ONCE] for start in range(0, len(pairs), _MOST_AT_ONCE))


@contextmanager
def _explain_errors(uri: str) -> Generator[None]:
    try:
        yield
    except MlflowException as error:
        raise ConfigError(f"MLflow cannot write to {uri}: {str(error).splitlines()[0]}") from error
