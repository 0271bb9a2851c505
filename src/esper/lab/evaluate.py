"""Compare a run's policy, or a controller given by name, with the baselines on new instances."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple

import numpy as np
from pydantic import AfterValidator, ConfigDict, TypeAdapter

from esper.config.loading import compare_settings, dump_settings, load_settings
from esper.config.settings import Settings
from esper.control.controller import Controller, is_in_file, load_controller
from esper.control.learned import POLICY, SAMPLED, UNTRAINED, LearnedController, open_policy, restore_policy
from esper.control.rules import SHUFFLED, Replay, shuffle_actions
from esper.errors import ConfigError, RunError, plural
from esper.files import lock_folder, write_atomically
from esper.lab.analysis import Claim, Comparison, compare_controllers, mean_interval
from esper.lab.exhibit import Row, read_numbers
from esper.lifecycle.actions import Head, Op
from esper.lifecycle.rules import Rules
from esper.lifecycle.table import Stage
from esper.numerics.devices import describe_platform
from esper.numerics.random_streams import Stream, numpy_generator
from esper.runs.events import LifecycleTransition, RunEnded, RunStarted
from esper.runs.reader import LOSS_REDUCTION
from esper.runs.run_directory import PLAYED, RunDirectory
from esper.serialization import Checkpoints
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite
from esper.tasks.suite import Split, Suite
from esper.train.evaluation import (
    COHORT,
    CohortTask,
    EvaluationConfig,
    EvaluationProgress,
    EvaluationResult,
    create_baselines,
    describe_evaluation_inputs,
    evaluate_cohort,
    evaluate_controllers,
    join_cohorts,
    load_baseline_settings,
    make_evaluation_config,
    split_into_cohorts,
)
from esper.train.iteration import summarise_logs
from esper.train.recorder import EpisodeLog, describe_suite, stack_actions
from esper.train.results import SPLITS, Result, SeedShapley, read_evaluation, read_json, select_split, write_results
from esper.train.settings import TrainSettings
from esper.train.trainer import create_controller, create_policy
from esper.train.workers import Workers

_STAGES = {stage.name.lower() for stage in Stage}
_GERMINATED, _KEPT = Stage.GERMINATED.name.lower(), Stage.FOSSILIZED.name.lower()
FEWEST_EPISODES = 8
"""Smallest number of episodes for an interval; fewer values do not show how much they vary."""


@dataclass(frozen=True)
class Plant:
    """How often a blueprint was used in a slot, per episode."""

    slot: int
    blueprint: str
    germinated: float
    kept: float


@dataclass(frozen=True)
class Usage:
    """The behaviour of a controller on one family."""

    family: str
    split: Split
    episodes: int
    operations: dict[str, float]
    """Fraction of decisions for each operation."""
    plants: tuple[Plant, ...]
    """Combinations of slot and blueprint that were used."""


@dataclass(frozen=True)
class EpisodeTimeline:
    """The episode of one network."""

    instance: str
    family: str
    variant: str
    split: Split
    score: float
    growth: float
    """Committed parameters divided by the host's."""
    drift_step: int | None
    accuracy: tuple[float, ...]
    changes: tuple[LifecycleTransition, ...]


@dataclass(frozen=True)
class Behaviour:
    """The behaviour of a run's policy in its evaluation."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(allow_inf_nan=False)  # older files have more fields

    iteration: int
    """Number of training iterations of the policy."""
    sites: tuple[str, ...]
    blueprints: tuple[str, ...]
    usage: tuple[Usage, ...]
    episodes: tuple[EpisodeTimeline, ...]
    """The first episode of each family."""
    earnings: tuple[SeedShapley, ...] | None = None
    """Shapley values of the seeds kept in each episode; None in older files."""


def describe_behaviour(suite: Suite, iteration: int, played: Mapping[Split, EvaluationResult]) -> Behaviour:
    """Summarise a policy's episodes on the instances of each split."""
    parts: list[tuple[str, Split, EvaluationResult]] = [
        (family, split, result)
        for split, result in played.items()
        for family in sorted({record.family for record in result.records})
    ]
    return Behaviour(
        iteration,
        suite.slot_names,
        suite.blueprints,
        usage=tuple(_count_usage(family, split, result.logs) for family, split, result in parts),
        episodes=tuple(_describe_first_episode(*part) for part in parts),
        earnings=tuple(values for result in played.values() for values in result.earnings),
    )


def _count_usage(family: str, split: Split, logs: Sequence[EpisodeLog]) -> Usage:
    operations = np.zeros(len(Op))
    germinated: Counter[tuple[int, str]] = Counter()
    kept: Counter[tuple[int, str]] = Counter()
    episodes = 0
    for log in logs:
        rows = {row for row, instance in enumerate(log.instances) if instance.family == family}
        episodes += len(rows)
        chosen = log.actions[:, sorted(rows), Head.OP]
        operations += np.bincount(chosen.ravel(), minlength=len(Op))
        for change in log.changes:
            if change.environment in rows and change.blueprint is not None:
                place = (change.slot, change.blueprint)
                germinated[place] += change.after == _GERMINATED
                kept[place] += change.after == _KEPT
    shares = operations / operations.sum()
    plants = [Plant(*place, germinated[place] / episodes, kept[place] / episodes) for place in sorted(germinated)]
    return Usage(family, split, episodes, {op.name.lower(): float(shares[op]) for op in Op}, tuple(plants))


def _describe_first_episode(family: str, split: Split, played: EvaluationResult) -> EpisodeTimeline:
    # Records are in the order of the cohorts' logs.
    places = [(log, row) for log in played.logs for row in range(len(log.instances))]
    (log, row), record = next(
        (place, record) for place, record in zip(places, played.records, strict=True) if record.family == family
    )
    instance = log.instances[row]
    accuracies = log.accuracies[np.stack(log.running)[:, row], row]
    drift = instance.drift_step
    return EpisodeTimeline(
        instance=instance.name,
        family=instance.family,
        variant=instance.variant,
        split=split,
        score=record.score,
        growth=record.growth,
        drift_step=drift if drift is not None and drift < len(accuracies) else None,
        accuracy=tuple(accuracies.tolist()),
        changes=tuple(change for change in log.changes if change.environment == row),
    )


# On disk


def write_behaviour(path: Path, behaviour: Behaviour) -> None:
    write_atomically(path, _FILE.dump_json(behaviour, indent=1, exclude_defaults=True).decode())


def read_behaviour(path: Path) -> Behaviour:
    return read_json(path, _FILE)


def _require_coherent(behaviour: Behaviour) -> Behaviour:
    """Reject files that a report could not show."""
    slots, usage = range(len(behaviour.sites)), behaviour.usage
    if not usage or any(entry.operations.keys() != usage[0].operations.keys() for entry in usage):
        raise ValueError("the use of operations is incomplete")
    if any(plant.slot not in slots for entry in usage for plant in entry.plants):
        raise ValueError("a seed lies in a slot that does not exist")
    for episode in behaviour.episodes:
        steps = range(len(episode.accuracy))
        if not steps or not (episode.drift_step is None or episode.drift_step in steps):
            raise ValueError("an episode's drift lies outside it")
        if any(
            change.slot not in slots or change.step not in steps or change.after not in _STAGES
            for change in episode.changes
        ):
            raise ValueError("an episode has an impossible change of stage")
    for values in behaviour.earnings or ():
        kept = [seed.slot for seed in values.seeds]
        if not set(kept) <= set(slots) or len(set(kept)) < len(kept):
            raise ValueError("an episode kept seeds that there cannot be")
        if any(pair.first >= pair.second or not {pair.first, pair.second} <= set(kept) for pair in values.pairs):
            raise ValueError("an episode has an interaction of seeds that it did not keep")
    return behaviour


_FILE = TypeAdapter(Annotated[Behaviour, AfterValidator(_require_coherent)])


# What kept seeds earned


def summarise_blueprints(shapley: Sequence[SeedShapley]) -> list[Row]:
    """A row per blueprint, the most often kept first."""
    episodes: dict[str, list[tuple[str, list[float]]]] = defaultdict(list)
    for episode in shapley:
        for blueprint in {seed.blueprint for seed in episode.seeds}:
            values = [seed.value for seed in episode.seeds if seed.blueprint == blueprint]
            episodes[blueprint].append((episode.family, values))
    rows: list[Row] = []
    for blueprint, families in sorted(episodes.items()):
        seeds = np.concatenate([values for _, values in families])
        rows.append(
            {
                "blueprint": blueprint,
                "kept": len(seeds),
                "episodes": len(families) / len(shapley),
                # First the mean within each episode: seeds of one network are not independent.
                **_average([(family, float(np.mean(values))) for family, values in families]),
                "negative": float((seeds < 0).mean()),
            }
        )
    return sorted(rows, key=lambda row: -read_numbers([row], "kept")[0])


def summarise_pairs(shapley: Sequence[SeedShapley], sites: Sequence[str]) -> list[Row]:
    """A row per pair of slots: episodes that kept seeds in both, and their mean interaction."""
    interactions: dict[tuple[int, int], list[tuple[str, float]]] = defaultdict(list)
    for episode in shapley:
        for pair in episode.pairs:
            interactions[pair.first, pair.second].append((episode.family, pair.interaction))
    return [
        {"slots": f"{sites[first]}, {sites[second]}", "episodes": len(episodes), **_average(episodes)}
        for (first, second), episodes in sorted(interactions.items())
    ]


def _average(episodes: Sequence[tuple[str, float]]) -> Row:
    """The mean over episodes, each with its family, and its interval if there are enough."""
    families, values = zip(*episodes, strict=True)
    if len(values) < FEWEST_EPISODES:
        return {"value": float(np.mean(values)), "value_low": None, "value_high": None}
    interval = mean_interval(np.array([values]), families)
    return {"value": interval.estimate, "value_low": interval.low, "value_high": interval.high}


# Evaluations

_STREAMS: dict[Split, Stream] = {"heldout": Stream.HELDOUT_INSTANCES, "transfer": Stream.TRANSFER_INSTANCES}
HELDOUT_INSTANCES = 256
TRANSFER_INSTANCES = 64
FEWEST_INSTANCES = 2
"""Smallest number of instances in an evaluation; a single one has no interval."""


class LoadedPolicy(NamedTuple):
    """A run's newest policy, acting greedily, its training iterations, and its checkpoint's hash."""

    controller: LearnedController
    iteration: int
    sha256: str


def load_policy(run: RunDirectory, settings: TrainSettings) -> LoadedPolicy:
    """The policy of the newest checkpoint."""
    checkpoint = Checkpoints(run.checkpoints).latest()
    policy = restore_policy(checkpoint.tensors, settings.policy, settings.promise, settings.rules)
    return LoadedPolicy(create_controller(policy, settings), checkpoint.iteration, checkpoint.sha256)


def find_controller(name: str, suite: Suite) -> tuple[Controller, EvaluationConfig]:
    """A baseline by name, a run's policy by directory or ``FILE.py:NAME``, and its configuration."""
    rules = {rule.name: rule for rule in create_baselines(suite)}
    if name in rules or is_in_file(name):
        controller = rules.get(name) or load_controller(name, suite.steps, (*rules, POLICY))
        return controller, EvaluationConfig(suite.name, Rules())
    run = open_policy(name, tuple(rules))
    # The rule that advises a policy depends on the horizon of the suite on which it runs.
    settings = load_settings(TrainSettings, run.config, [f"suite={suite.name}"])
    return load_policy(run, settings).controller, make_evaluation_config(settings)


def count_trainings(name: str, suite: Suite) -> float:
    """The cost of learning or tuning a controller for this suite, in complete trainings of networks.

    A policy's cost includes its baseline episodes and the policy that it started from, not those among which it was
    selected. A controller in a file costs 0.
    """
    if name in {rule.name for rule in create_baselines(suite)}:
        return load_baseline_settings(suite).environment_steps.get(name, 0) / suite.steps
    if is_in_file(name):
        return 0.0
    run = open_policy(name)
    settings = load_settings(TrainSettings, run.config)
    # Episodes of an iteration, including those of the no-growth baseline.
    baselines = settings.environments // settings.ppo.group if settings.ppo.no_growth_baseline else 0
    each = settings.environments + baselines
    return Checkpoints(run.checkpoints).latest().iteration * each + count_pretraining(settings, suite)


def count_pretraining(settings: TrainSettings, suite: Suite) -> float:
    """The cost of the policy from which a run with these settings starts."""
    return 0.0 if settings.start_from is None else count_trainings(settings.start_from, suite)


def sample_for_evaluation(suite: Suite, split: Split, count: int, seed: int) -> list[Instance]:
    """Draw the instances of a split, for all controllers."""
    return suite.sample(count, split, numpy_generator(seed, _STREAMS[split]))


def _require_interval(count: int, name: str, alternative: str = "") -> None:
    if count < FEWEST_INSTANCES:
        least = f"{FEWEST_INSTANCES}{alternative}"
        raise ConfigError(f"{plural(count, name)} cannot give an interval: give at least {least}")


def evaluate_run(
    run: RunDirectory,
    workers: Workers,
    heldout: int = HELDOUT_INSTANCES,
    transfer: int = TRANSFER_INSTANCES,
    progress: Callable[[int, int, str], None] = lambda _done, _total, _current: None,
    taken_over: Callable[[int, int], None] = lambda _cohorts, _total: None,
) -> tuple[list[Result], Behaviour]:
    """Evaluate the policy and all baselines on the same instances, and write the results into the run.

    Three more arms are of the policy itself. ``untrained`` is the same policy with its first weights: if the policy
    scores higher, it has learned. ``sampled`` draws its choices instead of taking the likeliest. ``shuffled`` applies
    its actions on each instance to another one: if the policy scores higher, the difference is due to its observations.

    Args:
        run: A trained run. Results of the same evaluation from before an interruption are reused.
        workers: Compute the cohorts.
        heldout: Instances of the families trained on.
        transfer: Instances of other families; 0 omits them.
        progress: Gets the numbers of finished and of all cohorts, and the current controller.
        taken_over: Gets the number of cohorts that an earlier evaluation has finished, and that of all.

    Returns:
        The scores of all controllers, and the behaviour of the policy.
    """
    _require_interval(heldout, "instance")
    if transfer:
        _require_interval(transfer, "transfer instance", ", or 0")
    settings = load_settings(TrainSettings, run.config)
    suite, config = get_suite(settings.suite), make_evaluation_config(settings)
    policy = load_policy(run, settings)

    # Every controller runs on every split; the actions to shuffle are known once the policy has run.
    samples: dict[Split, list[Instance]] = {
        split: sample_for_evaluation(suite, split, count, settings.seed)
        for split, count in zip(SPLITS, (heldout, transfer), strict=True)
        if count
    }
    # The statistics of observations are those of the trained policy, so that only what was learned differs.
    first = create_policy(settings)
    first.normaliser.load_state_dict(policy.controller.policy.normaliser.state_dict())
    untrained = create_controller(first, settings, UNTRAINED)
    sampled = create_controller(policy.controller.policy, settings, SAMPLED, greedy=False)
    controllers = (policy.controller, untrained, sampled, *create_baselines(suite), Replay({}, SHUFFLED))
    games: dict[tuple[Split, str], list[CohortTask]] = {
        (split, one.name): split_into_cohorts([one], config, chosen, shapley="orders" if one.name == POLICY else None)
        for split, chosen in samples.items()
        for one in controllers
    }
    tasks = [task for cohorts in games.values() for task in cohorts]
    finished = EvaluationProgress(run.evaluation_progress, describe_evaluation_inputs(settings, policy.sha256), tasks)
    taken_over(finished.cached_count, len(tasks))
    done = finished.cached_count
    played: dict[tuple[Split, str], EvaluationResult] = {}

    def play(name: str, chosen: Sequence[tuple[Split, str]]) -> None:
        # The cohorts of all games are one list, so that no worker waits for the end of a game.
        before = done

        def report(computed: int, _: int) -> None:
            nonlocal done
            done = before + computed
            progress(done, len(tasks), f"{name}, in cohorts")

        with workers.report_to(report):
            cohorts = iter(finished.evaluate_cohorts(workers, [task for game in chosen for task in games[game]]))
        for game in chosen:
            played[game] = join_cohorts(1, list(islice(cohorts, len(games[game]))))[0]

    play("policy and baselines", [game for game in games if game[1] != SHUFFLED])
    for split, instances in samples.items():
        rng = numpy_generator(settings.seed, _STREAMS[split], Stream.SHUFFLED_EVALUATION)
        seeds = [instance.seed for instance in instances]
        replay = shuffle_actions(stack_actions(played[split, POLICY].logs), seeds, rng)
        games[split, SHUFFLED] = split_into_cohorts([replay], config, instances)
    play("shuffled", [(split, SHUFFLED) for split in samples])

    results = [replace(record, split=split) for split, name in games for record in played[split, name].records]
    behaviour = describe_behaviour(suite, policy.iteration, {split: played[split, POLICY] for split in samples})
    with lock_folder(run.path):
        run.verdicts.unlink(missing_ok=True)  # from an earlier evaluation; the report writes new ones
        write_results(run.evaluation, results)
        write_behaviour(run.behaviour, behaviour)
    finished.remove()
    return results, behaviour


class PlaySettings(Settings):
    """Which controller plays which instances, as `esper evaluate --suite` is told."""

    controller: str
    """Name of a baseline, directory of a run on this or another suite, or ``FILE.py:NAME``."""
    suite: str
    split: Split
    instances: int
    seed: int
    """Random seed of the instances."""


def evaluate_by_name(play: PlaySettings, workers: Workers, run: RunDirectory | None = None) -> Comparison:
    """Compare a controller with the suite's baselines on the same instances, and record its episodes in a new run."""
    _require_interval(play.instances, "instance")
    suite, began = get_suite(play.suite), time.perf_counter()
    controller, config = find_controller(play.controller, suite)
    others = [rule for rule in create_baselines(suite) if rule.name != controller.name]
    instances = sample_for_evaluation(suite, play.split, play.instances, play.seed)
    if run is None:
        played = evaluate_controllers(workers, [controller, *others], config, instances)
    else:
        cohorts = split_into_cohorts([controller], config, instances, shapley="orders")
        tasks = [replace(task, first_environment=number * COHORT) for number, task in enumerate(cohorts)]
        played = join_cohorts(1, workers.map(evaluate_cohort, tasks))
        played += evaluate_controllers(workers, others, config, instances)
    records = [record for result in played for record in result.records]
    if run is not None:
        behaviour = describe_behaviour(suite, 0, {play.split: played[0]})
        with lock_folder(run.path):
            dump_settings(play, run.config)
            write_results(run.evaluation, [replace(record, split=play.split) for record in records])
            write_behaviour(run.behaviour, behaviour)
        with run.open_store() as store:
            about = {"command": PLAYED, "controller": controller.name, "seed": play.seed, "iterations": 1}
            loss = asdict(LOSS_REDUCTION) if suite.objective == "loss" else {}
            store.set_metadata({**about, "environments": play.instances, **describe_suite(suite), **loss})
            store.emit(RunStarted(iteration=0, platform=describe_platform({config.device}), seed=play.seed))
            store.append(played[0].events)
            store.record_scalars(1, summarise_logs(suite.name, played[0].logs))
            store.emit(RunEnded(iteration=1, seconds=time.perf_counter() - began))
            store.flush()
    return compare_controllers([records], controller.name, Claim.CONTROLLER)


def read_over_seeds(paths: Sequence[Path]) -> dict[Split, Comparison]:
    """Compare controllers over evaluated runs that differ only in their training seed, on the splits of all."""
    # One way of training: the same settings except for the seed.
    runs = [RunDirectory.open_training_run(path) for path in paths]
    settings = [load_settings(TrainSettings, run.config) for run in runs]
    for path, other in zip(paths, settings, strict=True):
        keys = [difference.key for difference in compare_settings(other, settings[0]) if difference.key != "seed"]
        if keys:
            raise ConfigError(
                f"{path} was trained with other settings than {paths[0]} ({', '.join(keys)}): give runs that "
                "differ in their seed alone, or compare ways of training with `esper compare`"
            )
    for seed, count in Counter(trained.seed for trained in settings).items():
        if count > 1:
            raise ConfigError(f"two of the runs have training seed {seed}: give every seed once")

    iterations = [read_behaviour(run.behaviour).iteration for run in runs]
    for run, iteration in zip(runs, iterations, strict=True):
        if iteration != iterations[0]:
            raise RunError(
                f"{run.path} was evaluated after iteration {iteration}, {runs[0].path} after {iterations[0]}: train "
                "them equally long and evaluate them again"
            )

    results = [read_evaluation(run.evaluation) for run in runs]
    comparisons: dict[Split, Comparison] = {}
    for split in SPLITS:
        played = [select_split(evaluated, split) for evaluated in results]
        if all(played):
            try:
                comparisons[split] = compare_controllers(played, claim=Claim.TRAINING)
            except ValueError as error:
                raise RunError(f"{error}: evaluate them all with the same --instances and --transfer") from error
    return comparisons
