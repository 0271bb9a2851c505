"""The report of a training run."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from esper.config.loading import load_settings, settings_text
from esper.dash.formats import duration, score
from esper.lab.behaviour import Behaviour, read_behaviour
from esper.lab.comparison import Comparison, compare_splits
from esper.lab.figures.behaviour import exhibit_behaviour
from esper.lab.figures.comparison import exhibit_evaluation
from esper.lab.figures.exhibit import Exhibit, run_queries
from esper.lab.figures.growing import GROWING_EXHIBITS
from esper.lab.figures.learning import LEARNING_EXHIBITS, exhibit_health
from esper.lab.report.page import Headline, Page, Report, Reproduction, Section
from esper.lab.standings import SPLIT_TITLES, describe_basis, did_it_help, record_evaluation
from esper.runs.events import RolledBack, RunStarted
from esper.runs.reader import RunReader
from esper.runs.run_directory import RunDirectory
from esper.tasks.suite import Split
from esper.train.iteration import TrainingSummary, summarise
from esper.train.results import read_evaluation
from esper.train.settings import TrainSettings

_QUESTIONS = {"heldout": "Is it better than not learning?", "transfer": "Does it carry over to new families?"}


def write_report(run: RunDirectory) -> Path:
    """Write the run's report, and its verdicts if it was evaluated; the report's path.

    Raises:
        RunError, ConfigError: a file of the run is damaged, or the report cannot be written.
    """
    return report_training(run).write(run.path)


def report_training(run: RunDirectory) -> Report:
    """The report of a run, evaluated or not, also while it goes on.

    Raises:
        RunError, ConfigError: a file of the run is damaged.
    """
    settings = load_settings(TrainSettings, run.config)
    comparisons = compare_splits(read_evaluation(run.evaluation) if run.evaluation.exists() else [])
    behaviour = read_behaviour(run.behaviour) if run.behaviour.exists() else None
    with RunReader.open(run.store) as reader:
        started = reader.events(RunStarted)
        summary = summarise(reader)
        rollbacks = Counter(event.trouble for event in reader.events(RolledBack))
    trained = {one.what.name: one for one in run_queries(run.store, (*LEARNING_EXHIBITS, *GROWING_EXHIBITS))}
    health = exhibit_health(run.store, settings.ppo.target_kl, rollbacks)
    evaluated = exhibit_evaluation(comparisons)
    acted = {} if behaviour is None else exhibit_behaviour(behaviour)
    facts = (
        f"Run {run.path}: suite {settings.suite}, seed {settings.seed}, {summary.iterations} of {settings.iterations} "
        f"iterations, {summary.environment_steps:,} environment steps in {duration(summary.seconds)} "
        f"({summary.environment_steps_per_second:.0f} a second), Esper "
        f"{started[0].esper_version if started else 'unknown'}."
    )
    sections = [
        *_show_training(trained),
        *_show_evaluation(evaluated),
        *([] if behaviour is None else _show_behaviour(behaviour, acted)),
        *([Section("Was training healthy?", [health])] if health.rows else []),
    ]
    reproduction = Reproduction(
        "How to reproduce this",
        settings_text(settings),
        "The same version of Esper with the same settings gives the same run, whatever the number of cores. "
        "All randomness follows from the seed in the settings.",
        f"esper train --config {shlex.quote(f'{run.path}/config.yaml')} --run-dir runs/again\n"
        "esper evaluate runs/again",
    )
    heldout = comparisons.get("heldout")
    headline = (
        _say_unmeasured(run, summary)
        if heldout is None
        else _say_answer(heldout, comparisons.get("transfer"), behaviour, summary)
    )
    title = "Did learning to grow networks help?"
    page = Page(f"Esper: {run.path.name}", title, facts, [headline], sections, reproduction)
    compared = [one for exhibits in evaluated.values() for one in exhibits.values()]
    return Report(
        page.html(),
        [*trained.values(), *compared, *acted.values(), health],
        {SPLIT_TITLES[split]: found for split, found in comparisons.items()},
        record_evaluation(comparisons),
    )


def _say_answer(
    heldout: Comparison, transfer: Comparison | None, behaviour: Behaviour | None, summary: TrainingSummary
) -> Headline:
    answer = did_it_help(heldout)
    sentences, notes = [answer.sentence], [describe_basis(heldout)]
    if transfer is not None:
        new = did_it_help(transfer, "transfer")
        sentences.append(f"Families never trained on: {new.short.lower()}. {new.sentence}")
    if behaviour is not None and behaviour.iteration != summary.iterations:
        notes.append(f"The policy of iteration {behaviour.iteration} was evaluated.")
    return Headline(answer.short, sentences, notes=notes)


def _say_unmeasured(run: RunDirectory, summary: TrainingSummary) -> Headline:
    """What training alone tells, and how to learn the rest."""
    sentences = list[str]()
    if summary.probe_score is not None and summary.baselines:
        best = max(summary.baselines, key=lambda name: summary.baselines[name])
        sentences.append(
            f"During training the greedy policy scored {score(summary.probe_score)} on a few training problems, the "
            f"best baseline there, {best}, {score(summary.baselines[best])}; that is no answer yet."
        )
    sentences.append("To compare the policy with all baselines on instances that nobody trained on, run")
    return Headline("Not measured yet", sentences, f"esper evaluate {shlex.quote(str(run.path))}")


def _show_training(exhibits: Mapping[str, Exhibit]) -> list[Section]:
    title = "How the policy learned"
    if "J" not in exhibits["learning"].rows.by("kind"):
        return [Section(title, note="The run has no finished iteration yet.")]
    tried = [exhibits[name] for name in ("operations", "seeds", "rewards")]
    learned = Section(title, [exhibits["learning"]])
    return [learned, Section("What it tried", tried)] if exhibits["operations"].rows else [learned]


def _show_evaluation(evaluated: Mapping[Split, Mapping[str, Exhibit]]) -> list[Section]:
    shown = ("scores", "differences", "standings", "growth", "families")
    return [Section(_QUESTIONS[split], [exhibits[name] for name in shown]) for split, exhibits in evaluated.items()]


def _show_behaviour(behaviour: Behaviour, exhibits: Mapping[str, Exhibit]) -> list[Section]:
    used = ["operations", "blueprints", "places", *(["gradients"] if behaviour.gradients else [])]
    sections = [Section("What it uses where", [exhibits[name] for name in used])]
    if behaviour.earnings is not None:
        kept = [exhibits["earnings"], exhibits["interactions"]] if exhibits["earnings"].rows else []
        sections.append(Section("What the kept seeds earned", kept, "" if kept else "The policy kept no seed."))
    return [*sections, Section("What the policy does", [exhibits["episodes"]])]
