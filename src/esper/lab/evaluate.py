"""Compare a run's policy, or a controller given by name, with the baselines on instances that were not trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from esper.config.loading import compare_settings, load_settings
from esper.control.controller import Controller
from esper.control.learned import POLICY, LearnedController, open_policy, restore_policy
from esper.control.own import is_in_file, load_controller
from esper.control.rules import SHUFFLED, Replay, shuffle_actions
from esper.errors import ConfigError, RunError, plural
from esper.files import lock_folder
from esper.lab.analysis import Claim
from esper.lab.behaviour import Behaviour, describe_behaviour, read_behaviour, write_behaviour
from esper.lab.comparison import Comparison, compare_controllers
from esper.lifecycle.rules import Rules
from esper.numerics.random_streams import Stream, numpy_generator
from esper.runs.run_directory import RunDirectory
from esper.serialization.checkpoints import Checkpoints
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite
from esper.tasks.suite import Split, Suite
from esper.train.collect import create_greedy_controller
from esper.train.episode_log import stack_actions
from esper.train.evaluation import (
    CohortTask,
    EvaluationConfig,
    EvaluationProgress,
    EvaluationResult,
    create_baselines,
    describe_evaluation_inputs,
    evaluate_controllers,
    join_cohorts,
    load_baseline_settings,
    make_evaluation_config,
    split_into_cohorts,
)
from esper.train.results import SPLITS, Result, read_evaluation, select_split, write_results
from esper.train.settings import TrainSettings
from esper.train.workers import Workers

_STREAMS: dict[Split, Stream] = {"heldout": Stream.HELDOUT_INSTANCES, "transfer": Stream.TRANSFER_INSTANCES}
HELDOUT_INSTANCES = 256
TRANSFER_INSTANCES = 64
FEWEST_INSTANCES = 2
"""Smallest number of instances in an evaluation; a single one has no interval."""

Progress = Callable[[int, int, str], None]
"""Called with the number of finished cohorts, the number of all cohorts, and the current controller."""

TakenOver = Callable[[int, int], None]
"""Called once with the number of cohorts that an earlier evaluation has finished, and the number of all cohorts."""


class LoadedPolicy(NamedTuple):
    """A run's newest policy, acting greedily, the number of its training iterations, and its checkpoint's hash."""

    controller: LearnedController
    iteration: int
    sha256: str


class _Game(NamedTuple):
    """A controller on the instances of a split."""

    split: Split
    controller: str
    instances: Sequence[Instance]
    cohorts: list[CohortTask]


@dataclass(frozen=True)
class RunEvaluation:
    """The scores of all controllers, and the behaviour of the policy."""

    results: list[Result]
    behaviour: Behaviour


def load_policy(run: RunDirectory, settings: TrainSettings) -> LoadedPolicy:
    """The policy of the newest checkpoint."""
    checkpoint = Checkpoints(run.checkpoints).latest()
    policy = restore_policy(checkpoint.tensors, settings.policy, settings.promise, settings.rules)
    return LoadedPolicy(create_greedy_controller(policy, settings), checkpoint.iteration, checkpoint.sha256)


def find_controller(name: str, suite: Suite) -> tuple[Controller, EvaluationConfig]:
    """A baseline by name, a run's policy by directory or a controller in a ``FILE.py:NAME``, and its configuration."""
    rules = {rule.name: rule for rule in create_baselines(suite)}
    if name in rules:
        return rules[name], EvaluationConfig(suite.name, Rules())
    if is_in_file(name):
        return load_controller(name, suite.steps, (*rules, POLICY)), EvaluationConfig(suite.name, Rules())
    run = open_policy(name, tuple(rules))
    # The rule that advises a policy depends on the horizon of the suite on which it runs.
    settings = load_settings(TrainSettings, run.config, [f"suite={suite.name}"])
    return load_policy(run, settings).controller, make_evaluation_config(settings)


def count_trainings(name: str, suite: Suite) -> float:
    """The cost of learning a controller or tuning it for this suite, in complete trainings of networks.

    For a policy, this includes its own training with all baseline episodes, and the current cost of the policy that it
    started from. Policies among which it was selected are not counted. For a controller in a file, the cost is 0.
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
    """Cost of the policy from which a run with these settings starts, in complete trainings of networks."""
    return 0.0 if settings.start_from is None else count_trainings(settings.start_from, suite)


def sample_for_evaluation(suite: Suite, split: Split, count: int, seed: int) -> list[Instance]:
    """Draw ``count`` instances of the split with this seed, for all controllers."""
    return suite.sample(count, split, numpy_generator(seed, _STREAMS[split]))


def _check_counts(heldout: int, transfer: int) -> None:
    if heldout < FEWEST_INSTANCES:
        raise ConfigError(f"{plural(heldout, 'instance')} cannot give an interval: give at least {FEWEST_INSTANCES}")
    if transfer != 0 and transfer < FEWEST_INSTANCES:
        raise ConfigError(
            f"{plural(transfer, 'transfer instance')} cannot give an interval: give at least {FEWEST_INSTANCES}, or 0"
        )


def evaluate_run(
    run: RunDirectory,
    workers: Workers,
    heldout: int = HELDOUT_INSTANCES,
    transfer: int = TRANSFER_INSTANCES,
    progress: Progress = lambda _done, _total, _current: None,
    taken_over: TakenOver = lambda _cohorts, _total: None,
) -> RunEvaluation:
    """Evaluate the policy and all baselines on the same instances, and write the results into the run.

    Another arm is ``shuffled``: the policy's own actions, with those of each instance applied to another instance. If
    the policy scores higher than this arm, the difference is due to its observations.

    ``heldout`` is the number of instances of the families trained on, ``transfer`` that of other families; 0 omits
    transfer. Results of the same evaluation from before an interruption are reused.
    """
    _check_counts(heldout, transfer)
    settings = load_settings(TrainSettings, run.config)
    suite, config = get_suite(settings.suite), make_evaluation_config(settings)
    policy = load_policy(run, settings)

    # Every controller runs on every split. The actions to shuffle are known once the policy has run.
    games: list[_Game] = []
    for split, count in zip(SPLITS, (heldout, transfer), strict=True):
        if count:
            instances = sample_for_evaluation(suite, split, count, settings.seed)
            for controller in (policy.controller, *create_baselines(suite), Replay({}, SHUFFLED)):
                shapley = "orders" if controller.name == POLICY else None
                cohorts = split_into_cohorts([controller], config, instances, shapley=shapley)
                games.append(_Game(split, controller.name, instances, cohorts))
    tasks = [task for game in games for task in game.cohorts]
    finished = EvaluationProgress(run.evaluation_progress, describe_evaluation_inputs(settings, policy.sha256), tasks)
    taken_over(finished.cached_count, len(tasks))
    done = finished.cached_count

    def play(name: str, played_games: Sequence[_Game]) -> list[EvaluationResult]:
        """The result of each game; all cohorts form one list, so that no worker waits for the end of a game."""
        before = done

        def report(computed: int, _: int) -> None:
            nonlocal done
            done = before + computed
            progress(done, len(tasks), f"{name}, in cohorts")

        with workers.report_to(report):
            cohorts = iter(finished.evaluate_cohorts(workers, [task for game in played_games for task in game.cohorts]))
        return [join_cohorts(1, list(islice(cohorts, len(game.cohorts))))[0] for game in played_games]

    first_games = [game for game in games if game.controller != SHUFFLED]
    played = {
        (game.split, game.controller): result
        for game, result in zip(first_games, play("policy and baselines", first_games), strict=True)
    }
    shuffled_games: list[_Game] = []
    for game in games:
        if game.controller == SHUFFLED:
            rng = numpy_generator(settings.seed, _STREAMS[game.split], Stream.SHUFFLED_EVALUATION)
            seeds = [instance.seed for instance in game.instances]
            replay = shuffle_actions(stack_actions(played[game.split, POLICY].logs), seeds, rng)
            shuffled_games.append(game._replace(cohorts=split_into_cohorts([replay], config, game.instances)))
    for game, result in zip(shuffled_games, play("shuffled", shuffled_games), strict=True):
        played[game.split, SHUFFLED] = result

    results = [
        replace(record, split=game.split) for game in games for record in played[game.split, game.controller].records
    ]
    policy_results: dict[Split, EvaluationResult] = {
        game.split: played[game.split, POLICY] for game in games if game.controller == POLICY
    }
    behaviour = describe_behaviour(suite, policy.iteration, policy_results)
    with lock_folder(run.path):
        run.verdicts.unlink(missing_ok=True)  # from an earlier evaluation; the report writes new ones
        write_results(run.evaluation, results)
        write_behaviour(run.behaviour, behaviour)
    finished.remove()
    return RunEvaluation(results, behaviour)


def evaluate_by_name(name: str, suite: Suite, split: Split, count: int, seed: int, workers: Workers) -> Comparison:
    """Compare a controller with the suite's baselines on ``count`` instances, which are drawn with ``seed``.

    ``name`` is the name of a baseline, the directory of a run on this or another suite, or ``FILE.py:NAME``.
    """
    _check_counts(count, 0)
    controller, config = find_controller(name, suite)
    # A baseline is not compared with itself.
    others = [rule for rule in create_baselines(suite) if rule.name != controller.name]
    instances = sample_for_evaluation(suite, split, count, seed)
    played = evaluate_controllers(workers, [controller, *others], config, instances)
    records = [record for result in played for record in result.records]
    return compare_controllers([records], controller.name, Claim.CONTROLLER)


def read_over_seeds(paths: Sequence[Path]) -> dict[Split, Comparison]:
    """Compare controllers over evaluated runs that differ only in their training seed, by split common to all."""
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
    seeds = [trained.seed for trained in settings]
    for seed in seeds:
        if seeds.count(seed) > 1:
            raise ConfigError(f"two of the runs have training seed {seed}: give every seed once")

    # All trainings must have the same length.
    results = [read_evaluation(run.evaluation) for run in runs]
    iterations = [read_behaviour(run.behaviour).iteration for run in runs]
    for run, iteration in zip(runs, iterations, strict=True):
        if iteration != iterations[0]:
            raise RunError(
                f"{run.path} was evaluated after iteration {iteration}, {runs[0].path} after {iterations[0]}: train "
                "them equally long and evaluate them again"
            )

    comparisons: dict[Split, Comparison] = {}
    for split in SPLITS:
        played = [select_split(evaluated, split) for evaluated in results]
        if all(played):
            try:
                comparisons[split] = compare_controllers(played, claim=Claim.TRAINING)
            except ValueError as error:
                raise RunError(f"{error}: evaluate them all with the same --instances and --transfer") from error
    return comparisons
