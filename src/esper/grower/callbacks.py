"""Callbacks of a grower, which print its decisions or record them in a run."""

from __future__ import annotations

import json
import math
import secrets
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary, finalize

import numpy as np

from esper.config.arguments import FilePath, check_arguments
from esper.config.settings import Settings
from esper.engine.recorder import DecisionRecorder
from esper.errors import ConfigError, RunError
from esper.files import print_line, write_atomically
from esper.grower.decision import Decision, Ending
from esper.grower.evaluation import ModelEvaluation
from esper.lifecycle.rules import GATES, Reason
from esper.lifecycle.table import OWNING, Stage, format_signed
from esper.lifecycle.transitions import Cause, concatenate_transitions
from esper.numerics.devices import describe_platform
from esper.runs.events import (
    GateChecked,
    LifecycleTransition,
    NetworkStep,
    RunEnded,
    RunFailed,
    RunResumed,
    RunStarted,
    StepTaken,
)
from esper.runs.reader import SCORE, RunReader
from esper.runs.run_directory import GROWER, RunDirectory, RunState, read_state
from esper.runs.store import RunStore, encode_events

if TYPE_CHECKING:
    from esper.grower.grower import Grower


class GrowerCallback:
    """Base class of callbacks: override the methods you need. With several processes, only the first calls them."""

    def on_start(self, grower: Grower) -> None:
        """Called when the grower was made; a saved state may be loaded later."""

    def on_resume(self, grower: Grower, state: dict[str, Any] | None) -> None:
        """Called when a saved state was loaded; ``state`` is this callback's saved `state_dict`, if any."""

    def on_step_start(self, grower: Grower) -> None:
        """Called before each decision."""

    def on_decision(self, grower: Grower, decision: Decision) -> None:
        """Called after each decision was applied; `Grower.engine` has what it was based on."""

    def on_failure(self, grower: Grower, error: Exception) -> None:
        """Called when training diverged and no rollbacks are left."""

    def on_finish(self, grower: Grower, ending: Ending) -> None:
        """Called by `Grower.finish`, after unfinished modules were kept or pruned."""

    def on_close(self, grower: Grower) -> None:
        """Called by `Grower.close`; no more decisions follow."""

    def state_dict(self) -> dict[str, Any]:
        """State to save with the grower, as plain values."""
        return {}


class PrintDecisions(GrowerCallback):
    """Prints one line per decision, and at the end one line per module tried."""

    def on_decision(self, grower: Grower, decision: Decision) -> None:
        # decision 7: germinate mlp in layer2; loss 0.4123 (training 0.3987), accuracy 0.873; layer1 +0.012
        train_loss = float(grower.engine.assessed.training.loss[0])
        loss = f"loss {decision.loss:.4g} (training {train_loss:.4g}){decision.measured}"
        contributions = ", ".join(f"{slot} {format_signed(value)}" for slot, value in decision.contributions.items())
        print_line("; ".join(filter(None, [f"decision {decision.number}: {decision.what}", loss, contributions])))

    def on_finish(self, grower: Grower, ending: Ending) -> None:
        print_line("\n".join(ending.lines))


COMMAND = "grow"
"""The command in the metadata of runs of a `Grower`."""
_ADDED = "added_parameters"
"""Scalar: parameters of all modules in the model."""
_ID = "id"
"""Metadata that identify the run of a saved grower."""
_writers: WeakValueDictionary[Path, RunRecorder] = WeakValueDictionary()
"""Recorders of this process by folder."""


class RunRecorder(GrowerCallback):
    """Records a grower's decisions in a folder. Each decision is on disk when `Grower.step` returns.

    A new folder starts a run. With the folder of a saved grower, the run continues once that grower's state is loaded.

    Args:
        path: A new folder, or that of the saved grower.

    Raises:
        ConfigError: ``path`` is not a path.
        RunError: raised when the grower is made, if the folder holds something else, is in use, or cannot be written.
    """

    @check_arguments(ConfigError)
    def __init__(self, path: FilePath) -> None:
        self.path = Path(path).resolve()
        self.id: str | None = None
        """ID of the run; None before `on_start`."""
        self._directory = RunDirectory(self.path)
        self._resources = ExitStack()
        finalize(self, _close_silently, self._resources)
        self._store: RunStore | None = None
        self._started, self._ended, self._released = 0.0, False, False

    def on_start(self, grower: Grower) -> None:
        """Start the run, unless the folder has decisions already: then a saved state must be loaded first."""
        # The run's ``config.yaml``, in JSON, which is YAML.
        plain = {
            name: value.model_dump(mode="json") if isinstance(value, Settings) else value
            for name, value in {**grower.config.to_dict(), **grower.criterion.to_dict()}.items()
        }
        slots = {slot.name: list(slot.blueprints) for slot in grower.model.slots.values()}
        self._config: dict[str, Any] = {"host": type(grower.model.host).__name__, "slots": slots, **plain}
        self.id, recorded = self._find_run(grower)
        if not recorded:
            self._open(grower)

    def on_resume(self, grower: Grower, state: dict[str, Any] | None) -> None:
        """Continue the run that the grower was saved in; another one, or fewer decisions, are refused."""
        decisions, saved_in = grower.decisions, None if state is None else state.get(_ID)
        present, recorded = self._find_run(grower)
        if recorded and saved_in != present:
            raise RunError(
                f"{self.path} holds a different run than the one this grower was saved with: give that run's folder, "
                "or a new one"
            )
        if recorded and recorded < decisions:
            raise RunError(
                f"{self.path} ends after decision {recorded}, but the grower is at {decisions}: give a new folder"
            )
        self._open(grower)

    def on_step_start(self, grower: Grower) -> None:
        self._require_open()

    def on_decision(self, grower: Grower, decision: Decision) -> None:
        """Record a decision. The run ends with the last planned one, and restarts if there is another."""
        store, number, model, engine = self._require_open(), decision.number, grower.model, grower.engine
        if self._ended:
            self._start_run(grower, store, number - 1)

        # The metric, which is known only once it is first measured, under its own name; and the score if it differs.
        train_accuracy, metric = float(engine.assessed.training.accuracy[0]), grower.backend.scores.metric_spec()
        measured: dict[str, float] = {}
        if metric is not None:
            store.set_metadata(asdict(metric))
            measured = {metric.train_scalar: train_accuracy, metric.scalar: decision.value}
            measured |= {} if metric.higher_is_better else {SCORE: decision.score}
        store.record_scalars(
            number,
            {
                **{name: value for name, value in measured.items() if not math.isnan(value)},
                "train_loss": float(engine.assessed.training.loss[0]),
                "validation_loss": decision.loss,
                _ADDED: model.added_parameters,
                **{f"contribution/{slot}": value for slot, value in decision.contributions.items()},
            },
        )

        # The events in the order in which they happened: rollback, gates, transitions, step.
        rollback, recorder, slots = decision.rollback, self._recorder, list(model.slots)
        if rollback is not None:
            before = engine.assessed.before_rollback
            metrics = before.metrics if isinstance(before, ModelEvaluation) else {}
            own = {
                "loss_before": rollback.loss,
                "metric_before": grower.backend.scores.get_value(metrics) if metrics else math.nan,
                "loss_after": rollback.loss_restored,
                "metric_after": decision.value,
            }
            store.append(encode_events(recorder.record_rollbacks(**own)))
        everyone = np.ones(1, np.bool_)
        store.append(encode_events(recorder.record_gates(everyone)))
        changes = concatenate_transitions([engine.assessed.intervention.transitions, engine.applied.transitions])
        ratings = [change.rating for change in decision.changes]
        store.append(encode_events(recorder.record_transitions(changes, everyone, ratings)))
        owned = [Stage(stage) in OWNING for stage in engine.applied.stages[0].tolist()]
        figures = [grower.ratings[slot] if occupied else None for slot, occupied in zip(slots, owned, strict=True)]
        charge, table = grower.network.charge, grower.network.table
        rent = grower.config.rent * math.log1p(float(charge.added(table, table.owning)[0]))
        steps = recorder.record_steps(
            [0],
            blueprint=[decision.blueprint],
            metric=[decision.value],
            objective=[decision.score - rent],
            added=[model.added_parameters / model.host_parameters],
            contribution_errors=[tuple(None if one is None else one.error for one in figures)],
            thresholds=[tuple(None if one is None else one.threshold for one in figures)],
        )
        store.append(encode_events(steps))
        store.flush()
        if decision.finished or number == grower.config.horizon:
            self._end_run(store, number)

    def on_finish(self, grower: Grower, ending: Ending) -> None:
        """Record what became of unfinished modules, and end the run; it restarts if there is another decision."""
        if self._store is None and not ending.changes:
            return
        store, decisions = self._require_open(), grower.decisions
        # A process that was killed after that and resumes from an earlier state does not record it twice.
        finish, transitions = Cause.FINISH.name.lower(), store.events(LifecycleTransition)
        if ending.changes and not any(each.cause == finish and each.iteration == decisions for each in transitions):
            contributions = np.array([[ending.contributions.get(slot, math.nan) for slot in grower.model.slots]])
            ratings, everyone = [change.rating for change in ending.changes], np.ones(1, np.bool_)
            events = self._recorder.record_transitions(ending.transitions, everyone, ratings, contributions)
            store.append(encode_events(events))
            store.record_scalars(decisions, {_ADDED: grower.model.added_parameters})
            store.flush()
        if not self._ended:
            self._end_run(store, decisions)

    def on_failure(self, grower: Grower, error: Exception) -> None:
        store = self._require_open()
        store.emit(RunFailed(iteration=grower.decisions, reason=str(error)))
        store.flush()

    def on_close(self, grower: Grower) -> None:
        if self._store is None:
            return
        if not self._ended:
            self._end_run(self._store, grower.decisions)
        self.release()

    def state_dict(self) -> dict[str, Any]:
        return {_ID: self.id}

    def release(self) -> None:
        """Release the folder for good."""
        self._store = None
        self._released = True
        self._resources.close()
        _writers.pop(self.path, None)

    def _require_open(self) -> RunStore:
        if self._store is not None:
            return self._store
        if self._released:
            raise RunError(f"this grower no longer writes to {self.path}: it was closed, or another one continued it")
        raise RunError(
            f"{self.path} already holds a run: continue it by load_state_dict with a grower state saved for it, or "
            "give a new folder"
        )

    def _find_run(self, grower: Grower) -> tuple[str, int]:
        """Id and decisions of the run in the folder, which must fit the grower; those of a new run if it is empty."""
        new = secrets.token_hex(8), 0
        store = self._directory.store
        if not store.is_file() or not store.stat().st_size:
            try:
                if self.path.exists():
                    self._directory.require_empty()
            except OSError as error:
                raise RunError(f"cannot write a run to {self.path} ({error.strerror}): give a new folder") from error
            except RunError:
                raise RunError(f"{self.path} is not empty and is not a run: give a new folder") from None
            return new
        with RunReader.open(store) as reader:
            metadata, decisions = reader.metadata(), reader.last_iteration()
        if not metadata:  # it was killed in its first moment
            return new
        if _ID not in metadata:
            raise RunError(f"{self.path} holds a run that was not written by `{GROWER}`: give a new folder")
        expected = self._describe_run(grower)
        for key in ("slots", "blueprints"):
            if metadata.get(key) != expected[key]:
                raise RunError(
                    f"{self.path} has another run, with {key} {metadata.get(key)!r} instead of {expected[key]!r}: "
                    "give a new folder"
                )
        return str(metadata[_ID]), decisions

    def _open(self, grower: Grower) -> None:
        """Take the folder, and start or continue the run."""
        if self._store is None:
            # An earlier grower of this process, as in a notebook, gives the folder up.
            holder = _writers.get(self.path)
            if holder is not None:
                holder.release()
            try:
                self.path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise RunError(f"cannot make the folder {self.path} ({error.strerror}): give another") from error
            self._resources.enter_context(self._directory.locked(GROWER))
            self.id, _ = self._find_run(grower)  # its former holder may have written
            self._store = self._resources.enter_context(self._directory.open_store())
            _writers[self.path] = self
        # A run that ended with the saved decision stays finished until there is another one.
        ends = [event.iteration for event in self._store.events(RunEnded)]
        if grower.decisions in ends[-1:] and read_state(self._directory, self._store) is RunState.FINISHED:
            self._ended = True
        else:
            self._start_run(grower, self._store, grower.decisions)
        write_atomically(self._directory.config, json.dumps(self._config, indent=2))

    def _start_run(self, grower: Grower, store: RunStore, decisions: int) -> None:
        """Start the run, or continue it after that many decisions, without records of later ones."""
        engine = grower.engine
        store.rewind(decisions)
        store.set_metadata(self._describe_run(grower))
        platform = describe_platform({str(parameter.device) for parameter in grower.model.parameters()})
        if not decisions and not store.newest(RunStarted.name):
            store.emit(RunStarted(iteration=0, platform=platform, seed=grower.config.seed))
        else:
            store.emit(RunResumed(iteration=decisions, platform=platform))
        store.flush()

        def locate(_row: int) -> NetworkStep:
            # One episode of one environment; the engine's first application is before the first decision.
            number = int(engine.decisions[0]) - 1
            return NetworkStep(iteration=number, episode=1, environment=0, step=number - 1)

        self._recorder = DecisionRecorder(engine, grower.network.blueprints, locate)
        # It continues with the gates of the last decision, which were ahead of the stages after the one before it: the
        # newest of each gate that is still ahead.
        last_step = [step.stages for step in store.events(StepTaken) if step.iteration == decisions - 1]
        for event in store.events(GateChecked) if last_step else ():
            stage = Stage[last_step[0][event.slot].upper()]
            if GATES.get(stage) == event.gate:
                self._recorder.reasons[0, event.slot] = Reason[event.reason.upper()]
                self._recorder.gated_stages[0, event.slot] = stage
        self._started, self._ended = time.perf_counter(), False

    def _end_run(self, store: RunStore, decisions: int) -> None:
        store.emit(RunEnded(iteration=decisions, seconds=time.perf_counter() - self._started))
        store.flush()
        self._ended = True

    def _describe_run(self, grower: Grower) -> dict[str, Any]:
        horizon = grower.config.horizon
        return {
            "command": COMMAND,
            "seed": grower.config.seed,
            "environments": 1,
            "slots": list(grower.model.slots),
            "blueprints": grower.network.blueprints,
            "host_parameters": grower.model.host_parameters,
            _ID: self.id,
            **{name: self._config[name] for name in ("host", "controller", "refit")},
            **({} if horizon is None else {"iterations": horizon, "steps": horizon}),
        }


def _close_silently(resources: ExitStack) -> None:
    """Close what a collected recorder held; it has raised already if it could not write."""
    with suppress(RunError):
        resources.close()
