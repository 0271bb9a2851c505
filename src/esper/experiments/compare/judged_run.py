"""A training run and what its policy comes to on given instances. Stopped, it goes on; done, it is only read."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from esper.config import dump_settings, load_settings
from esper.errors import ConfigError, RunError
from esper.experiments.arms.outcome import Outcome, shown
from esper.experiments.crew import exhausted
from esper.experiments.evaluate import load_policy
from esper.experiments.evaluation_files import read_json
from esper.experiments.iteration import Iteration
from esper.experiments.play import play, terms_of
from esper.experiments.run_directory import RunDirectory
from esper.experiments.settings import TrainSettings
from esper.experiments.trainer import Trainer
from esper.experiments.workers import Workers
from esper.files import write_atomically
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite

_RECORDS = TypeAdapter(list[Outcome])


@dataclass(frozen=True)
class JudgedRun:
    """A run at a path, with these settings; ``what`` is the command that holds it meanwhile."""

    path: Path
    settings: TrainSettings
    what: str

    def outcomes(
        self, instances: Sequence[Instance], workers: Workers, report: Callable[[Iteration], None]
    ) -> list[Outcome]:
        """Of the run's policy on each instance; ``report`` is called after each iteration.

        Raises:
            ConfigError: the path holds a run of other settings.
            RunError: it cannot be written.
        """
        return exhausted(self.judged(instances, workers), report)

    def judged(self, instances: Sequence[Instance], workers: Workers) -> Generator[Iteration, None, list[Outcome]]:
        """As `outcomes`; tells of each iteration."""
        new = not (self.path / "config.yaml").exists()
        run = RunDirectory.create(self.path) if new else RunDirectory(self.path)
        with run.locked(self.what):
            self._settle(run, new)
            records = _known(run, instances)
            if records is None:
                yield from self._trained(run, workers)
                policy = load_policy(run, self.settings).controller
                played = play(workers, [policy], terms_of(self.settings), instances)[0]
                records = shown(played, get_suite(self.settings.suite)).outcomes
                write_atomically(_file(run), json.dumps([asdict(record) for record in records]))
        return records

    def _settle(self, run: RunDirectory, new: bool) -> None:
        """Write a new run's settings; those of one that is there already must be the same."""
        if new:
            run.require_new()
            dump_settings(self.settings, run.config)
        elif load_settings(TrainSettings, run.config) != self.settings:
            raise ConfigError(f"{run.path} was trained with other settings: choose another --run-dir for this")

    def _trained(self, run: RunDirectory, workers: Workers) -> Generator[Iteration]:
        with run.open_store() as store:
            trainer = Trainer.opened(run, self.settings, store, workers)
            if trainer.done < self.settings.iterations:
                yield from trainer.iterations()


def _known(run: RunDirectory, instances: Sequence[Instance]) -> list[Outcome] | None:
    """The records of a run that is done, if they are of these instances."""
    try:
        records: list[Outcome] = read_json(_file(run), _RECORDS)
    except RunError:
        return None
    same = [record.instance for record in records] == [instance.name for instance in instances]
    return records if same else None


def _file(run: RunDirectory) -> Path:
    return run.path / "contest.json"
