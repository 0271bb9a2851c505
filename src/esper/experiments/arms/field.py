"""Let the policies of a contest's first configuration and all other arms play the same instances, and keep it all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from esper.control.controller import Controller
from esper.control.learned import LearnedController
from esper.control.rules.simple import SHUFFLED
from esper.experiments.arms.outcome import ArmRecords, circumstances, kept, shown
from esper.experiments.arms.trained import NONE_EQUAL_FLOPS, SEQUENCE, STATIC, STATIC_EQUAL_FLOPS, Trained
from esper.experiments.backend import LOCAL, Backend
from esper.experiments.baselines import baseline_settings, baselines
from esper.experiments.compare.trials import WHAT, Contest, Trial
from esper.experiments.lock import locked
from esper.experiments.play import play, terms_of
from esper.experiments.run_directory import RunDirectory
from esper.experiments.settings import TrainSettings
from esper.experiments.workers import Workers
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite

POLICY = LearnedController.name
_FOLDER = "arms"

Progress = Callable[[int, int, str], None]
"""Told the environment steps done, of how many, and what is under way (empty at the end)."""


@dataclass(frozen=True)
class Arm:
    """One arm on the instances of a contest."""

    name: str
    seeds: Sequence[ArmRecords]
    """One per training seed; one in all where the arm does not depend on them."""


@dataclass(frozen=True)
class _Job:
    """An arm, of one training seed if it depends on them."""

    arm: str
    what: str
    steps: int
    """Environment steps that it takes, about."""
    place: Path
    """Where its file lies."""
    lock: Path
    under: str
    """The circumstances."""
    compute: Callable[[], ArmRecords]


class _Meter:
    """Adds up the steps of jobs."""

    def __init__(self, tell: Progress) -> None:
        self._tell, self._begun, self._total, self._what = tell, 0, 0, ""

    def begin(self, what: str, begun: int, total: int) -> None:
        self._what, self._begun, self._total = what, begun, total
        self.add(0)

    def add(self, steps: int) -> None:
        self._begun += steps
        self._tell(self._begun, self._total, self._what)


def run_arms(contest: Contest, progress: Progress, backend: Backend = LOCAL) -> list[Arm]:
    """The policy first, then all other arms; what is done already is only read.

    The contest's trials must be done.

    Raises:
        CheckpointError, RunError: a trial has no usable policy, or a file cannot be written.
    """
    instances, name = contest.played(), next(iter(contest.arms))
    meter, settings = _Meter(progress), contest.arms[name]
    with backend.open(settings.shards) as workers:
        folder, controllers = contest.folder / name, baselines(get_suite(contest.suite))
        jobs = [_of_baseline(one, folder, settings, instances, workers) for one in controllers]
        for seed in range(contest.seeds):
            run, own = RunDirectory(contest.path(Trial(name, seed))), contest.settings(Trial(name, seed))
            jobs += _of_policy(Trained(run, own, instances, workers, meter.add), run, own, instances)
        total, begun = sum(job.steps for job in jobs), 0
        found: dict[str, list[ArmRecords]] = {}
        for job in jobs:
            meter.begin(job.what, begun, total)
            with locked(job.lock, WHAT):
                records = kept(job.place / _FOLDER / f"{job.arm}.json", job.under, instances, job.compute)
            found.setdefault(job.arm, []).append(records)
            begun += job.steps
    progress(total, total, "")
    return [Arm(POLICY, found.pop(POLICY)), *(Arm(arm, records) for arm, records in found.items())]


def _of_policy(
    policy: Trained, run: RunDirectory, settings: TrainSettings, instances: Sequence[Instance]
) -> Iterator[_Job]:
    """The policy of one training seed, and the arms that follow from it."""
    ways = {
        POLICY: policy.policy,
        SHUFFLED: policy.shuffled,
        SEQUENCE: policy.sequence,
        STATIC: policy.static,
        STATIC_EQUAL_FLOPS: policy.static_equal_flops,
        NONE_EQUAL_FLOPS: policy.none_equal_flops,
    }
    played = _played_steps(settings, instances)
    for arm, compute in ways.items():
        under = circumstances(arm, policy.sha256, settings.model_dump(mode="json"), _described(instances))
        steps = played + (policy.environment_steps if arm == SEQUENCE else 0)
        yield _Job(arm, f"{arm}, seed {settings.seed}", steps, run.path, run.lock, under, compute)


def _of_baseline(
    controller: Controller, folder: Path, settings: TrainSettings, instances: Sequence[Instance], workers: Workers
) -> _Job:
    """An arm that does not depend on training seeds."""
    suite, terms, arm = get_suite(settings.suite), terms_of(settings), controller.name
    known = baseline_settings(suite)

    def compute() -> ArmRecords:
        played = play(workers, [controller], terms, instances)[0]
        return ArmRecords(known.environment_steps.get(arm, 0), shown(played, suite).outcomes)

    facts = [part.model_dump(mode="json") for part in (known, terms.rules, terms.conduct)]
    under = circumstances(arm, facts, _described(instances))
    return _Job(arm, arm, _played_steps(settings, instances), folder, folder / "arms.lock", under, compute)


def _played_steps(settings: TrainSettings, instances: Sequence[Instance]) -> int:
    return len(instances) * get_suite(settings.suite).steps


def _described(instances: Sequence[Instance]) -> list[object]:
    return [instance.to_json() for instance in instances]
