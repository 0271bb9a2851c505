"""Does growth pay on models that nobody prepared for it? 28 small ones, trained in every way that there is.

    python benchmarks/foreign.py FOLDER --half building --workers 2
    python benchmarks/foreign.py FOLDER --half building --controller my_rule.py:MyRule

The models are in `foreign_models`, half of them for building rules and half for reporting. Each is trained bare, with
everything from the start, with a random candidate on the rule's own probation, by the rule, by ``--controller`` if
there is one, and bare once more for as many FLOPs as that rule (or else `look`) took. Growers have
their defaults, and a decision follows each epoch.

Every run is kept as a file in FOLDER. Stopped, the same command goes on: what is there is only read. Another version of
Esper, or of the models, needs another folder. Each run computes in one thread and follows from its random seed, which
fixes data, first weights, the order of minibatches and what grows.
"""

from __future__ import annotations

import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from foreign_models import BUILDING, PROBLEMS, REPORTING
from foreign_models.problem import Examples, Problem
from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Table
from torch import nn
from zoo.training import ORDER, plant_largest, torch_generator

import esper
from esper.control.controller import (
    Actions,
    Controller,
    SeedRater,
    UniformStreams,
    get_promise_settings,
    hash_file,
    is_in_file,
)
from esper.control.rules import LookRule
from esper.dash.output import print_line
from esper.engine.observation import FeatureReader, Observation
from esper.errors import ConfigError, EsperError, did_you_mean
from esper.files import write_atomically
from esper.grower.backend import ModelSpec
from esper.grower.config import choose_controller
from esper.grower.spending import Spending
from esper.lifecycle.actions import Op
from esper.lifecycle.rules import ActionMasks
from esper.lifecycle.table import Figures, SeedRating, Stage
from esper.train.workers import prepare_process

BARE, LONGER, EVERYTHING, RANDOM = "bare", "longer", "all_at_start", "random_candidate"
ARMS = (BARE, LONGER, EVERYTHING, RANDOM, LookRule.name)
"""Ways to train: the bare model, the bare model for as many FLOPs as the rule took, the largest module in every slot
before the first step, a random candidate with the rule's probation, and the rule."""
HALVES = {"building": BUILDING, "reporting": REPORTING, "all": (*BUILDING, *REPORTING)}
SILENCE = 20.0
"""Most seconds between two lines of output."""
TABLE_WIDTH = 160


@dataclass(frozen=True)
class Run:
    """One training to be done."""

    problem: str
    arm: str
    """One of `ARMS` but `LONGER`, which is the bare model for more epochs; or a controller, FILE.py:NAME."""
    seed: int
    epochs: int
    auto: bool = False
    """Whether to offer every blueprint that fits instead of the owner's."""

    def locate(self, folder: Path) -> Path:
        """The file of its result, which differs for every version of a controller's file."""
        arm = self.arm
        if is_in_file(arm):
            arm = f"{arm.rpartition(':')[2]}-{hash_file(arm)[:12]}"
        return folder / self.problem / ("auto" if self.auto else "") / f"{arm}-seed{self.seed}-epochs{self.epochs}.json"


@dataclass(frozen=True)
class Result:
    """One training that is done."""

    problem: str
    arm: str
    seed: int
    epochs: int
    metric: Literal["accuracy", "loss"]
    value: float
    """The metric on test data."""
    loss: float
    """On test data."""
    host_parameters: int
    added_parameters: int
    flops: float
    """Of training, of validation after each epoch, and of what growth measured."""
    tried: int
    """Modules that were planted."""
    kept: int
    seconds: float
    decisions: tuple[str, ...]
    """All but those to wait, and what became of unfinished modules at the end."""

    @property
    def score(self) -> float:
        """The metric, with a sign by which more is better."""
        return self.value if self.metric == "accuracy" else -self.value


_RESULT = TypeAdapter(Result)


def main(
    folder: tyro.conf.Positional[Path],
    half: Literal["building", "reporting", "all"] = "building",
    models: tuple[str, ...] = (),
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4),
    arms: tuple[str, ...] = ARMS,
    controller: str | None = None,
    workers: int = 1,
    auto: bool = False,
) -> None:
    """Train, compare, print.

    Args:
        folder: Keeps a file for every run.
        half: Which models: for building rules, for reporting, or all.
        models: Some of these models, by name; by default all of them.
        seeds: One run per seed, model and arm.
        arms: Ways to train; the bare model is always trained, since all others are compared with it.
        controller: Another arm: a controller, FILE.py:NAME.
        workers: Runs at a time, each in a process of its own.
        auto: Offer every blueprint that fits ("auto") in each slot instead of those that the model's owner would name.
    """
    names = models or HALVES[half]
    for what, given, known in (("model", names, HALVES[half]), ("arm", arms, ARMS)):
        for name in given:
            if name not in known:
                hint = did_you_mean(name, known) or f": choose from {', '.join(known)}"
                raise ConfigError(f"{what} {name!r} is not among those of this benchmark or half{hint}")
    if controller is not None and not is_in_file(controller):
        raise ConfigError(f"controller {controller!r} is in no file: give FILE.py:NAME")
    rule = controller or LookRule.name
    if LONGER in arms and rule != controller and rule not in arms:
        raise ConfigError(f"arm {LONGER!r} takes as many FLOPs as {rule!r} did: add that arm, or leave {LONGER!r} out")

    # First every arm for its own epochs, then the bare models that train for longer.
    ways = [arm for arm in (BARE, *arms) if arm != LONGER] + ([controller] if controller else [])
    planned = [
        Run(name, arm, seed, PROBLEMS[name].recipe.epochs, auto)
        for name in names
        for seed in seeds
        for arm in dict.fromkeys(ways)
    ]
    console = Console()
    results = do_runs(planned, folder, workers, console)
    if LONGER in arms:
        found = {(one.problem, one.arm, one.seed): one for one in results}
        longer = [
            Run(name, BARE, seed, match_epochs(found[name, BARE, seed], found[name, rule, seed]), auto)
            for name in names
            for seed in seeds
        ]
        results += [replace(one, arm=LONGER) for one in do_runs(longer, folder, workers, console)]
    summary = Console(width=TABLE_WIDTH)
    comparisons = compare(sorted(results, key=lambda one: names.index(one.problem)))
    summary.print(tabulate_models(comparisons))
    summary.print(tabulate_arms(summarise(comparisons)))


def match_epochs(bare: Result, rule: Result) -> int:
    """Epochs of the bare model that take at least the FLOPs of the rule."""
    return math.ceil(round(bare.epochs * rule.flops / bare.flops, 6))


def do_runs(runs: Sequence[Run], folder: Path, workers: int, console: Console) -> list[Result]:
    """The results of all runs in their order; those that have no file yet are done, ``workers`` at a time."""
    missing = [run for run in runs if not run.locate(folder).exists()]
    print_line(console, f"{len(runs)} runs, {len(runs) - len(missing)} of them there already")
    # Each worker is a fresh process: nothing that a run leaves behind can change another.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=prepare_process) as pool:
        pending: set[Future[Result]] = {pool.submit(train_once, run, folder) for run in missing}
        try:
            while pending:
                done, pending = wait(pending, SILENCE, FIRST_COMPLETED)
                left = f"{len(missing) - len(pending)} of {len(missing)}"
                for future in done:
                    print_line(console, f"{left}: {describe_result(future.result())}")
                if not done:
                    print_line(console, f"{left} done")
        except BaseException:
            # Without this, leaving the pool would first do all runs that are waiting.
            pool.shutdown(cancel_futures=True)
            raise
    return [read_result(run, folder) for run in runs]


def read_result(run: Run, folder: Path) -> Result:
    """The result that is kept for a run."""
    # A controller's name in the file is that of the command which made it.
    return replace(_RESULT.validate_json(run.locate(folder).read_bytes()), arm=run.arm)


def train_once(run: Run, folder: Path) -> Result:
    """Do a run and keep its result."""
    result, path = train(run), run.locate(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, _RESULT.dump_json(result, indent=2))
    return result


def train(run: Run) -> Result:
    """Train a model in one way, and measure it on test data."""
    problem, recipe = PROBLEMS[run.problem], PROBLEMS[run.problem].recipe
    splits = problem.data(run.seed)
    # First weights, dropout and other noise come from torch's global generator, as in any script.
    torch.manual_seed(run.seed)
    slots = dict.fromkeys(problem.slots, "auto") if run.auto else problem.slots
    model = esper.attach(problem.build(), slots, splits.train.select(slice(2)).inputs)
    if run.arm == EVERYTHING:
        plant_largest(model, run.seed)
    optimizer = recipe.make_optimizer(model.parameter_groups(lr=recipe.learning_rate))
    scheduler = None
    if recipe.cosine:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, run.epochs)
    validate = make_evaluation(problem, splits.validation)
    if run.arm in (BARE, EVERYTHING):
        grower, spending = None, Spending(model)
    else:
        controller: str | Controller = run.arm
        if run.arm == RANDOM:
            spec = ModelSpec(model, optimizer)
            parameters = spec.costs.parameters.blueprints[0]
            controller = RandomCandidate(
                choose_controller(LookRule.name, run.epochs, None, parameters, spec.compatible[0])[0]
            )
        grower = esper.Grower(model, optimizer, validate, controller=controller, horizon=run.epochs, seed=run.seed)
        spending = grower.spending

    # Bare or not, a model is validated after each epoch.
    began, tried, decisions = time.perf_counter(), 0, list[str]()
    for epoch in range(1, run.epochs + 1):
        model.train()
        losses = []
        for batch in splits.train.shuffle(recipe.batch_size, torch_generator(run.seed, ORDER, epoch)):
            loss = problem.loss(model(*batch.inputs), batch.targets)
            optimizer.zero_grad()
            loss.backward()
            if recipe.clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
            optimizer.step()
            losses.append(loss.detach())
        if scheduler is not None:
            scheduler.step()
        if grower is None:
            validate(model)
        else:
            decision = grower.step(train_loss=torch.stack(losses).mean())
            tried += sum(change.after is Stage.GERMINATED for change in decision.changes)
            if decision.op is not Op.WAIT or decision.rollback is not None:
                decisions.append(str(decision))
    if grower is not None:
        decisions += grower.finish().lines
    seconds, flops = time.perf_counter() - began, spending.flops  # before the test data are read
    kept = sum(slot.seed is not None for slot in model.slots.values())

    measured = make_evaluation(problem, splits.test)(model)
    loss, accuracy = measured if isinstance(measured, tuple) else (measured, None)
    return Result(
        problem=run.problem,
        arm=run.arm,
        seed=run.seed,
        epochs=run.epochs,
        metric="loss" if accuracy is None else "accuracy",
        value=loss if accuracy is None else accuracy,
        loss=loss,
        host_parameters=model.host_parameters,
        added_parameters=model.added_parameters,
        flops=flops,
        tried=tried or kept,
        kept=kept,
        seconds=seconds,
        decisions=tuple(decisions),
    )


def make_evaluation(problem: Problem, examples: Examples) -> Callable[[nn.Module], float | tuple[float, float]]:
    """What measures a model by examples, as its owner would: the loss, or loss and accuracy."""
    batches = examples.in_order()
    if problem.task != "loss":
        return esper.Validation(problem.task, batches)

    @torch.no_grad()
    def measure_loss(model: nn.Module) -> float:
        was_training = model.training
        model.eval()
        losses = [float(problem.loss(model(*inputs), targets)) * len(targets) for inputs, targets in batches]
        model.train(was_training)
        return sum(losses) / len(examples)

    return measure_loss


class RandomCandidate:
    """A rule that is offered one random untried candidate, as if nothing promised more: when it plants and
    its probation are its own, but what it plants and where is left to chance."""

    name = RANDOM

    def __init__(self, rule: Controller) -> None:
        self._rule = rule
        self.promise = get_promise_settings(rule)

    def start(self, seeds: Sequence[int]) -> tuple[UniformStreams, Any]:
        """One random stream per network, and the rule's state."""
        return UniformStreams(seeds), self._rule.start(seeds)

    def rate_seeds(self, observation: Observation) -> SeedRating[Figures]:
        """The rule's rating of every seed."""
        assert isinstance(self._rule, SeedRater)
        return self._rule.rate_seeds(observation)

    def act(
        self, observation: Observation, masks: ActionMasks, state: tuple[UniformStreams, Any]
    ) -> tuple[Actions, tuple[UniformStreams, Any]]:
        """What the rule decides where the other candidates are illegal."""
        streams, rule_state = state
        shown = Observation(*(part.clone() for part in observation))
        features = FeatureReader(shown)
        promises = [features.blueprint(name) for name in ("promise", "promise_held_out")]

        # One of the legal and untried candidates that were measured: that of rank floor(u * count).
        possible = masks.blueprint & masks.slot[:, Op.GERMINATE, :, None] & (features.blueprint("tries") == 0)
        possible &= np.any([promise != 0 for promise in promises], axis=0)
        flat = possible.reshape(len(possible), -1)
        rank = (streams.draw()[:, 0] * flat.sum(1)).astype(np.int64)
        chosen = np.zeros_like(flat)
        chosen[np.arange(len(flat)), (flat.cumsum(1) > rank[:, None]).argmax(1)] = True
        chosen = chosen.reshape(possible.shape) & possible

        # It promises what the best one does. The features are views of the observation's memory.
        for promise in promises:
            best = np.where(possible, promise, -np.inf).max((1, 2))
            promise[chosen] = best[chosen.any((1, 2))]
        actions, rule_state = self._rule.act(shown, replace(masks, blueprint=masks.blueprint & chosen), rule_state)
        return actions, (streams, rule_state)


def describe_result(result: Result) -> str:
    """One line."""
    return (
        f"{result.problem}, {result.arm}, seed {result.seed}: {result.metric} {result.value:.4f} after {result.epochs} "
        f"epochs, {result.host_parameters} + {result.added_parameters} parameters, {result.tried} modules tried, "
        f"{result.kept} kept, {result.seconds:.1f} s"
    )


@dataclass(frozen=True)
class Comparison:
    """One arm on one model beside the bare model, over seeds."""

    problem: str
    arm: str
    metric: str
    values: tuple[float, ...]
    gain: float
    """Mean gain of the score over the bare model with the same seed, in units of the bare score's deviation; NaN where
    that is 0, or unknown with a single seed."""
    error: float
    """Standard error of the gain; NaN with a single seed."""
    added: float
    """Mean of added parameters relative to the model's own."""
    flops: float
    """Relative to the bare model's."""
    tried: float
    """Modules per run."""
    kept: float


def compare(results: Sequence[Result]) -> list[Comparison]:
    """Every arm on every model, in the order of the results."""
    bare = {(one.problem, one.seed): one for one in results if one.arm == BARE}
    comparisons: list[Comparison] = []
    for problem, arm in dict.fromkeys((one.problem, one.arm) for one in results):
        runs = [one for one in results if (one.problem, one.arm) == (problem, arm)]
        pairs = [(one, bare[problem, one.seed]) for one in runs]
        spread = deviate([other.score for _, other in pairs]) or math.nan
        gains = [(one.score - other.score) / spread for one, other in pairs]
        comparisons.append(
            Comparison(
                problem=problem,
                arm=arm,
                metric=runs[0].metric,
                values=tuple(one.value for one in runs),
                gain=statistics.mean(gains),
                error=deviate(gains) / math.sqrt(len(gains)),
                added=statistics.mean(one.added_parameters / one.host_parameters for one in runs),
                flops=statistics.mean(one.flops / other.flops for one, other in pairs),
                tried=statistics.mean(one.tried for one in runs),
                kept=statistics.mean(one.kept for one in runs),
            )
        )
    return comparisons


def deviate(values: Sequence[float]) -> float:
    """Standard deviation; NaN for a single value."""
    return statistics.stdev(values) if len(values) > 1 else math.nan


@dataclass(frozen=True)
class Summary:
    """One arm over all models whose bare runs differ."""

    arm: str
    models: int
    wins: int
    """Models on which the gain is above one spread."""
    losses: int
    """Models on which it is below minus one."""
    mean_gain: float
    median_gain: float
    added: float
    """Mean over models of added parameters relative to the model's own."""
    flops: float
    share_of_gain: float
    """Mean over `gaining` models of the gain relative to that of everything from the start; NaN without such models."""
    share_of_parameters: float
    """The same of added parameters."""
    gaining: int
    """Models on which everything from the start gains more than one spread."""


def summarise(comparisons: Sequence[Comparison]) -> list[Summary]:
    """Every arm but the bare one."""
    everything = {one.problem: one for one in comparisons if one.arm == EVERYTHING and one.gain > 1}
    summaries: list[Summary] = []
    for arm in dict.fromkeys(one.arm for one in comparisons if one.arm != BARE):
        ours = [one for one in comparisons if one.arm == arm and not math.isnan(one.gain)]
        pairs = [(one, everything[one.problem]) for one in ours if one.problem in everything]
        summaries.append(
            Summary(
                arm=arm,
                models=len(ours),
                wins=sum(one.gain > 1 for one in ours),
                losses=sum(one.gain < -1 for one in ours),
                mean_gain=average(one.gain for one in ours),
                median_gain=statistics.median(one.gain for one in ours) if ours else math.nan,
                added=average(one.added for one in ours),
                flops=average(one.flops for one in ours),
                share_of_gain=average(one.gain / other.gain for one, other in pairs),
                share_of_parameters=average(one.added / other.added for one, other in pairs),
                gaining=len(pairs),
            )
        )
    return summaries


def average(values: Iterable[float]) -> float:
    """Mean; NaN of nothing."""
    values = list(values)
    return statistics.mean(values) if values else math.nan


def tabulate_models(comparisons: Sequence[Comparison]) -> Table:
    """A row per model and arm; ± is the deviation of the metric, and the standard error of the gain."""
    table = Table(box=None, header_style="underline")
    for name in ("model", "arm", "test", "metric", "gain in spreads", "added parameters", "FLOPs", "tried", "kept"):
        table.add_column(name, justify="left" if name in ("model", "arm", "test") else "right", no_wrap=True)
    for one in comparisons:
        table.add_row(
            one.problem if one.arm == BARE else "",
            one.arm,
            one.metric,
            f"{statistics.mean(one.values):.4f} ± {deviate(one.values):.4f}",
            "" if one.arm == BARE else f"{one.gain:+.2f} ± {one.error:.2f}",
            f"{one.added:.0%}",
            f"{one.flops:.2f}",
            f"{one.tried:.1f}",
            f"{one.kept:.1f}",
        )
    return table


def tabulate_arms(summaries: Sequence[Summary]) -> Table:
    """A row per arm."""
    table = Table(box=None, header_style="underline")
    for name in ("arm", "models", "wins", "losses", "mean gain", "median", "added parameters", "FLOPs"):
        table.add_column(name, justify="left" if name == "arm" else "right", no_wrap=True)
    gaining = max((one.gaining for one in summaries), default=0)
    table.add_column(f"of everything's gain ({gaining} models)", justify="right")
    table.add_column("of its parameters", justify="right")
    for one in summaries:
        table.add_row(
            one.arm,
            str(one.models),
            str(one.wins),
            str(one.losses),
            f"{one.mean_gain:+.2f}",
            f"{one.median_gain:+.2f}",
            f"{one.added:.0%}",
            f"{one.flops:.2f}",
            f"{one.share_of_gain:.0%}",
            f"{one.share_of_parameters:.0%}",
        )
    return table


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except EsperError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped: the same command goes on with the runs that are missing")
