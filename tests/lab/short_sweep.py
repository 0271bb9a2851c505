"""A sweep of the short suite; Ray finds its tasks by import. `python short_sweep.py FOLDER` runs it on Ray."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path

import pytest

from esper.lab.sweep import RankedTrial, Sweep, TrialProgress, _compute_trial, _TrialTask, load_space, run_sweep
from esper.train.results import ArmResults
from esper.train.workers import Backend, Workers
from train.ray_tasks import die_once
from train.short_suite import short_suite

ITERATIONS = 4
SPACE = f"""
base:
  suite: short
  environments: 8
  probe_instances: 2
  iterations: {ITERATIONS}
  checkpoint_every: 1
  shards: 1
  policy: {{hidden: 16, width: 16}}
  ppo: {{group: 4, minibatches: 2, epochs: 2}}
grid: {{seed: [0, 1]}}
"""
DOOMED = 1
"""The trial that may have to die."""
LAST_WORD = 3
"""The iteration of which it tells before it dies; its checkpoint is not written yet."""


def computed_short(mark: str, task: _TrialTask) -> Generator[TrialProgress, None, ArmResults]:
    """A trial, whose process dies once if there is a mark."""
    with short_suite():
        course = _compute_trial(task)
        while True:
            try:
                told = next(course)
            except StopIteration as end:
                return end.value
            yield told
            if task.number == DOOMED and told.done == LAST_WORD:
                die_once(mark)


def sweep_short(
    folder: Path, workers: Workers, hear: Callable[[TrialProgress], None], mark: str = ""
) -> list[RankedTrial]:
    """Two trials, ranked."""
    file = folder / "space.yaml"
    file.write_text(SPACE)
    with pytest.MonkeyPatch.context() as patch, short_suite():
        patch.setattr("esper.lab.sweep._compute_trial", partial(computed_short, mark))
        trials = load_space(file).trials(None, 0)
        return run_sweep(Sweep(folder, trials, instances=4), workers, hear, lambda _number, _ranked: None)


def main(folder: Path) -> None:
    def hear(told: TrialProgress) -> None:
        sys.stdout.write(f"{told.number} {told.done}\n")
        sys.stdout.flush()

    with Backend("ray", workers=2).open(2) as workers:
        sweep_short(folder, workers, hear)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
