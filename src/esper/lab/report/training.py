"""Reports: of one run, of runs with several training seeds, of compared configurations and all arms."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from esper.config.loading import format_settings, load_settings
from esper.dash.formats import duration, join_words, score
from esper.errors import ConfigError, RunError, plural
from esper.files import lock_folder
from esper.lab.behaviour import Behaviour, read_behaviour
from esper.lab.comparison import Comparison, compare_splits
from esper.lab.evaluate import read_over_seeds
from esper.lab.experiment import is_experiment, read_experiment
from esper.lab.figures.evaluation import exhibit_arms, exhibit_behaviour, exhibit_configurations, exhibit_evaluation
from esper.lab.figures.exhibit import run_queries
from esper.lab.figures.training import BLUEPRINTS, LEARNING, PROBE_INTERACTIONS, exhibit_health
from esper.lab.report.grown import report_grown
from esper.lab.report.page import Headline, Report, Reproduction, Section, list_platforms
from esper.lab.standings import (
    ARM_MEANINGS,
    SPLIT_TITLES,
    describe_basis,
    judge_learning,
    name_instances,
    record_comparison,
    record_evaluation,
)
from esper.runs.events import RolledBack
from esper.runs.metric import SCORE_MEANING
from esper.runs.reader import RunReader
from esper.runs.run_directory import RUN_ADVICE, STUDY, RunDirectory
from esper.tasks.suite import Split
from esper.train.iteration import TrainingSummary, summarise_run
from esper.train.results import read_evaluation
from esper.train.settings import TrainSettings

_QUESTIONS: Mapping[Split, str] = {
    "heldout": "Is it better than the baselines?",
    "transfer": "Does it generalize to new families?",
}
_MADE_BY = f"{RUN_ADVICE}, or the folder of a comparison of `esper compare`"


def report_on(paths: Sequence[Path], bare: Path | None = None) -> Report:
    """The report of a run or a comparison, also while it goes on, or of several runs that differ in their seed alone.

    Args:
        paths: Folders of runs, or of a comparison.
        bare: Of a grown model: a run of the same training loop in which nothing grew, to compare with.
    """
    if bare is not None:
        return _report_beside_bare(paths, bare)
    # Several runs are one way of training.
    if len(paths) > 1:
        return _report_over_seeds(paths, read_over_seeds(paths))
    (path,) = paths
    if not os.path.exists(path):  # unlike Path.exists, it takes names that no file can have
        raise RunError(f"no run at {path}: {_MADE_BY}")
    run = RunDirectory(path)
    if run.store.is_file() and run.config.is_file():
        return report_grown(run) if _is_grown(run) else _report_training(run)
    if path.is_dir() and is_experiment(path):
        return report_configurations(path, *read_experiment(path))
    if (path / STUDY).is_file():
        raise RunError(f"{path} is a sweep, whose study is in {path / STUDY}: give the directory of one of its trials")
    raise RunError(f"{path} is neither a run nor a comparison: {_MADE_BY}")


def _report_beside_bare(paths: Sequence[Path], bare: Path) -> Report:
    """The report of one grown model beside its bare host."""
    runs = [RunDirectory(path) for path in (*paths, bare)]
    for run in runs:
        if not run.store.is_file():
            raise RunError(f"no run at {run.path}: a bare host is compared with a run of a `Grower`")
    if len(paths) != 1 or not _is_grown(runs[0]):
        raise ConfigError("a bare host is compared with one run of a `Grower`: leave it out for other runs")
    return report_grown(*runs)


def _is_grown(run: RunDirectory) -> bool:
    with RunReader.open(run.store) as reader:
        return reader.metadata().get("command") == "grow"


def write_report(run: RunDirectory) -> Path:
    """Write the report of a training run, and its verdicts if it was evaluated; the report's path."""
    # No evaluation may end between the results that are read and the verdicts that are written.
    with lock_folder(run.path):
        return _report_training(run).write(run.path)


def _report_training(run: RunDirectory) -> Report:
    """The report of a run, evaluated or not, also while it goes on."""
    settings = load_settings(TrainSettings, run.config)
    comparisons = compare_splits(read_evaluation(run.evaluation) if run.evaluation.exists() else [])
    behaviour = read_behaviour(run.behaviour) if run.behaviour.exists() else None
    with RunReader.open(run.store) as reader:
        platforms = list_platforms(reader)
        summary = summarise_run(reader)
        rollbacks = Counter(event.trouble for event in reader.events(RolledBack))

    # How it learned.
    learning, blueprints, interactions = run_queries(run.store, (LEARNING, BLUEPRINTS, PROBE_INTERACTIONS))
    if any(row["kind"] == "J" for row in learning.rows):
        sections = [Section("How the policy learned", [learning, blueprints, interactions])]
    else:
        sections = [Section("How the policy learned", note="No iteration has finished yet.")]
    exhibits = [learning, blueprints, interactions]

    # How it compares with the other controllers.
    for split, compared in exhibit_evaluation(comparisons).items():
        shown = ("scores", "costs", "standings", "families")
        sections.append(Section(_QUESTIONS[split], [compared[name] for name in shown]))
        exhibits += compared.values()

    # What it does.
    if behaviour is not None:
        acted = exhibit_behaviour(behaviour)
        sections.append(Section("What the policy uses in each family", [acted["operations"], acted["blueprints"]]))
        if behaviour.earnings is not None:
            kept = [acted["earnings"], acted["interactions"]] if acted["earnings"].rows else []
            sections.append(Section("What kept seeds contributed", kept, "" if kept else "The policy kept no seeds."))
        sections.append(Section("Episodes", [acted["episodes"]]))
        exhibits += acted.values()

    # Whether training was healthy.
    health = exhibit_health(run.store, settings.ppo.target_kl, rollbacks)
    if health.rows:
        sections.append(Section("Was training healthy?", [health]))
    # The headline: the verdicts, or the command that gives them.
    heldout = comparisons.get("heldout")
    return Report(
        title=f"Esper: {run.path.name}",
        heading="Did learning to grow networks help?",
        facts=f"Run {run.path}: suite {settings.suite}, seed {settings.seed}, {summary.iterations} of "
        f"{plural(settings.iterations, 'iteration')}, {plural(summary.environment_steps, 'environment step')} in "
        f"{duration(summary.seconds)} ({summary.environment_steps_per_second:.0f} a second); {platforms}.",
        headlines=[
            _describe_unmeasured(run, summary)
            if heldout is None
            else _describe_verdict(heldout, comparisons.get("transfer"), behaviour, summary)
        ],
        sections=sections,
        exhibits=[*exhibits, health],
        reproduction=Reproduction(
            "How to reproduce this",
            format_settings(settings),
            "The same version of Esper with the same settings reproduces the run on any number of cores. All "
            "randomness comes from the seed in the settings.",
            f"esper train --config {shlex.quote(f'{run.path}/config.yaml')} --run-dir runs/again\n"
            "esper evaluate runs/again",
        ),
        comparisons={SPLIT_TITLES[split]: comparison for split, comparison in comparisons.items()},
        verdicts=record_evaluation(comparisons),
    )


def _describe_verdict(
    heldout: Comparison, transfer: Comparison | None, behaviour: Behaviour | None, summary: TrainingSummary
) -> Headline:
    conclusion = judge_learning(heldout)
    sentences, notes = [conclusion.sentence], [SCORE_MEANING, describe_basis(heldout)]
    if transfer is not None:
        new = judge_learning(transfer, "transfer")
        sentences.append(f"On families it never trained on: {new.short.lower()}. {new.sentence}")
    if behaviour is not None and behaviour.iteration != summary.iterations:
        notes.append(f"The policy of iteration {behaviour.iteration} was evaluated.")
    return Headline(conclusion.short, sentences, notes=notes)


def _describe_unmeasured(run: RunDirectory, summary: TrainingSummary) -> Headline:
    """What training alone shows, and the command that measures the rest."""
    sentences = list[str]()
    if summary.probe_score is not None and summary.baselines:
        best = max(summary.baselines, key=lambda name: summary.baselines[name])
        sentences.append(
            f"On a few training problems, the greedy policy scored {score(summary.probe_score)} and the best baseline, "
            f"{best}, {score(summary.baselines[best])}. This is not yet an answer."
        )
    sentences.append("To compare the policy with all baselines on held-out instances, run")
    command = f"esper evaluate {shlex.quote(str(run.path))}"
    return Headline("Not evaluated yet", sentences, command, [SCORE_MEANING])


def report_configurations(folder: Path, configurations: Comparison, arms: Comparison | None) -> Report:
    """A comparison of configurations, and all arms if they have played."""
    # The first configuration is the reference of both comparisons.
    first, names = configurations.reference.name, [arm.name for arm in configurations.standings]
    compared = exhibit_configurations(configurations)
    comparisons, exhibits = {"configurations": configurations}, [*compared.values()]
    sections = [Section("Configurations", [compared["scores"], compared["costs"], compared["standings"]])]
    if arms is not None:
        compared, comparisons["arms"] = exhibit_arms(arms, first), arms
        exhibits += compared.values()
        sections += [
            Section("All arms", [compared["scores"], compared["costs"], compared["standings"]]),
            Section(
                "What each arm is",
                terms=[(arm.name, ARM_MEANINGS.get(arm.name, "a controller in a file")) for arm in arms.standings],
            ),
        ]
    sentences = [f"{first} against {arm.name}: {arm.verdict}." for arm in configurations.others]
    return Report(
        title=f"Esper: {folder.resolve().name}",
        heading="Which configuration is better?",
        facts=f"Comparison {folder}: {join_words(names)}, {plural(configurations.seeds, 'training seed')} each, "
        f"on the same {name_instances(configurations.instances)}.",
        headlines=[Headline(" ".join(sentences), [SCORE_MEANING, describe_basis(configurations)])] if sentences else [],
        sections=sections,
        exhibits=exhibits,
        comparisons=comparisons,
        verdicts={name: asdict(record_comparison(comparison)) for name, comparison in comparisons.items()},
    )


def _report_over_seeds(paths: Sequence[Path], comparisons: Mapping[Split, Comparison]) -> Report:
    """Several evaluated runs that differ in their training seed alone."""
    headlines: list[Headline] = []
    sections: list[Section] = []
    evaluated = exhibit_evaluation(comparisons)
    for split, exhibits in evaluated.items():
        conclusion = judge_learning(comparisons[split], split)
        notes = (
            [describe_basis(comparisons[split])] if headlines else [SCORE_MEANING, describe_basis(comparisons[split])]
        )
        headlines.append(Headline(conclusion.short, [conclusion.sentence], notes=notes))
        shown = [exhibits["standings"], exhibits["seeds"]]
        sections.append(Section(f"All controllers on {SPLIT_TITLES[split]}", shown))
    return Report(
        title="Esper: one way of training",
        heading="Did this way of training help?",
        facts=f"Runs {join_words([str(path) for path in paths])}.",
        headlines=headlines,
        sections=sections,
        exhibits=[exhibit for exhibits in evaluated.values() for exhibit in exhibits.values()],
        comparisons={SPLIT_TITLES[split]: comparison for split, comparison in comparisons.items()},
        verdicts=record_evaluation(comparisons),
    )
