"""The report of a run or a comparison: one self-contained HTML page with its figures and tables."""

import json
import math
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from esper.config.loading import MOST_BYTES, format_settings, load_settings
from esper.dash.formats import difference, duration, join_words, measure, percent, score
from esper.errors import ConfigError, RunError, plural
from esper.files import lock_folder, read_bounded, write_atomically
from esper.lab.analysis import Claim, Comparison, compare_controllers, compare_splits
from esper.lab.drawing import draw_svg
from esper.lab.evaluate import Behaviour, PlaySettings, read_behaviour, read_over_seeds
from esper.lab.exhibit import Drawing, Exhibit, Row, Table, group_rows, read_numbers, run_queries
from esper.lab.experiment import read_experiment
from esper.lab.grown_figures import ADDED, compare_with_bare, grown_exhibits
from esper.lab.policy_figures import (
    BLUEPRINTS,
    LEARNING,
    PROBE_INTERACTIONS,
    exhibit_arms,
    exhibit_behaviour,
    exhibit_evaluation,
    exhibit_health,
)
from esper.lab.standings import (
    ARM_MEANINGS,
    SPLIT_TITLES,
    assess_learning,
    describe_basis,
    name_instances,
    record_comparison,
    record_evaluation,
)
from esper.lifecycle.table import Stage
from esper.runs.events import LifecycleTransition, RolledBack, RunExtended, RunResumed, RunStarted
from esper.runs.reader import ACCURACY, LOSS, SCORE_MEANING, RunMetric, RunReader
from esper.runs.run_directory import RUN_ADVICE, STUDY, RunDirectory, RunProgress, is_grower, read_progress
from esper.tasks.suite import Split
from esper.train.iteration import TrainingSummary, summarise_run
from esper.train.results import read_evaluation
from esper.train.settings import TrainSettings


def list_platforms(reader: RunReader) -> str:
    """The software and devices of a run; those of every process, if they changed."""
    events = [*reader.events(RunStarted), *reader.events(RunResumed)]
    described = dict.fromkeys(
        ", ".join(value if name in ("system", "devices") else f"{name} {value}" for name, value in one.platform.items())
        for one in events
    )
    return " and then ".join(described) or "software unknown"


@dataclass(frozen=True)
class Headline:
    """The first thing on a page: an answer in a word or two, and what explains it."""

    short: str
    sentences: Sequence[str] = ()
    command: str = ""
    """A command that gives the answer, if there is one."""
    notes: Sequence[str] = ()


_NARROW_COLUMNS = 7
"""Half of the page is enough for so many columns of a table."""


def make_anchor(title: str) -> str:
    """An identifier for a title, to which the table of contents links."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


@dataclass(frozen=True)
class Section:
    title: str
    exhibits: Sequence[Exhibit] = ()
    note: str = ""
    terms: Sequence[tuple[str, str]] = ()
    """Names, and what they are."""
    commands: str = ""
    settings: str = ""

    def place_exhibits(self) -> Iterator[tuple[Exhibit, bool]]:
        """The exhibits, each with whether it takes the page's whole width; two narrow ones share it."""

        def is_narrow(exhibit: Exhibit) -> bool:
            is_figure = isinstance(exhibit, Drawing)
            narrow = exhibit.columns == 1 if is_figure else len(exhibit.shown_columns) <= _NARROW_COLUMNS
            return bool(exhibit.rows) and narrow

        for narrow, group in groupby(self.exhibits, is_narrow):
            exhibits = list(group)
            for place, exhibit in enumerate(exhibits):
                is_wide = not narrow or (place == len(exhibits) - 1 and place % 2 == 0)
                widened = replace(exhibit, columns=2) if is_wide and isinstance(exhibit, Drawing) else exhibit
                yield widened, is_wide


@dataclass(frozen=True)
class Report:
    """A page with its figures and tables, and the comparisons behind it by title."""

    title: str
    heading: str
    facts: str
    headlines: Sequence[Headline]
    sections: Sequence[Section]
    exhibits: Sequence[Exhibit]
    comparisons: Mapping[str, Comparison] = field(default_factory=dict[str, Comparison])
    verdicts: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def render(self) -> str:
        return _ENVIRONMENT.get_template("page.html").render(page=self, svg=draw_svg, make_anchor=make_anchor)

    def write(self, folder: Path) -> Path:
        """Write the page into the folder, and any verdicts beside it; returns the page's path."""
        run, page = RunDirectory(folder), self.render()
        with lock_folder(folder):
            if self.verdicts:
                write_atomically(run.verdicts, json.dumps(self.verdicts, indent=1))
            write_atomically(run.report, page)
        return run.report


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def report_grown(run: RunDirectory, bare: RunDirectory | None = None) -> Report:
    """The report of a run of a `Grower`; ``bare`` is a run of the same host without growth."""
    with RunReader.open(run.store) as reader:
        metadata, progress, platforms = reader.metadata(), read_progress(run, reader), list_platforms(reader)
    try:
        settings = read_bounded(run.config, MOST_BYTES).decode(errors="replace")
    except OSError as error:
        raise RunError(f"cannot read the configuration {run.config}: {error.strerror}") from error
    exhibits = run_queries(run.store, grown_exhibits(metadata))
    by_name = {exhibit.name: exhibit for exhibit in exhibits}
    headlines: list[Headline] = []
    sections: list[Section] = []

    # The reader's first question: did growth pay?
    if bare is not None:
        _require_comparable(run, metadata, bare)
        compared = compare_with_bare(run.store, metadata, bare.store)
        headlines = [_describe_comparison(metadata, bare, row) for row in compared[1].rows[:1]]
        sections = [Section("Compared with the bare host", compared)]
        exhibits += compared

    # Before the first decision there is nothing to draw; tables give their reason themselves.
    if any(row["measure"] == LOSS for row in by_name["curves"].rows):
        headlines.insert(0, _describe_state(metadata, progress, by_name))
        titles = {"snapshots": "The network as it grew", "curves": "How it learned", "stages": "Stages of each slot"}
        if by_name["contributions"].rows:
            titles["contributions"] = "Contributions of seeds"
        sections += [Section(title, [by_name[name]]) for name, title in titles.items()]
    else:
        headlines.insert(0, Headline("No decision yet", [f"The run is {progress.state}."]))
        sections += [Section("How it learned", note="There are no decisions yet.")]
    tables = [exhibit for exhibit in by_name.values() if isinstance(exhibit, Table)]
    # Runs without a horizon do not know how long they last.
    planned = metadata.get("iterations")
    plan = "" if planned is None else f", {plural(planned, 'decision')} planned"
    return Report(
        title=f"Esper: {run.path.name}",
        heading=f"How {metadata.get('host', 'a model')} grew",
        facts=f"Run {run.path}: controller {metadata.get('controller', '?')}, seed {metadata.get('seed', '?')}{plan}; "
        f"{platforms}.",
        headlines=headlines,
        sections=[
            *sections,
            *(Section(table.name.capitalize(), [table]) for table in tables),
            Section("Settings of the grower", settings=settings),
        ],
        exhibits=exhibits,
    )


def _require_comparable(run: RunDirectory, metadata: Mapping[str, Any], bare: RunDirectory) -> None:
    """Refuse a run that is not one of the same host without growth."""
    advice = 'give a run of the same training loop with `controller="none"`'
    with RunReader.open(bare.store) as reader:
        found = reader.metadata()
        (germinated,) = reader.rows(
            "SELECT count(*) FROM events WHERE type = ? AND json_extract(payload, '$.after') = 'germinated'",
            LifecycleTransition.name,
        )[0]
    if not is_grower(found):
        raise ConfigError(f"{bare.path} is not a run of a `Grower`, so it has no bare host: {advice}")
    if germinated:
        raise ConfigError(f"{bare.path} is not bare, as {plural(germinated, 'seed')} germinated in it: {advice}")
    # A run names its metric once it has measured it.
    measured = ("metric", "higher_is_better") if "metric" in found and "metric" in metadata else ()
    for name in ("host", "host_parameters", *measured):
        if found.get(name) != metadata.get(name):
            raise ConfigError(
                f"{bare.path} cannot be compared with {run.path}: {name} is {found.get(name)!r} instead of "
                f"{metadata.get(name)!r}: {advice}"
            )


def _describe_comparison(metadata: Mapping[str, Any], bare: RunDirectory, row: Row) -> Headline:
    metric = RunMetric.from_metadata(metadata)
    grown, host, change = (read_numbers([row], name)[0] for name in ("grown", "bare", "difference"))
    note = f"Bare host: {bare.path}. One run of each, so another random seed may change the difference."
    if not math.isfinite(change):
        sentence = f"After decision {row['decision']}, {metric.metric} on validation data is not finite in both runs."
        return Headline("No comparison with the bare host", [sentence], notes=[note])
    better = "no change" if change == 0 else "better" if (change > 0) == metric.higher_is_better else "worse"
    sentence = (
        f"On validation data after decision {row['decision']}: {difference(change)}, {better}"
        f"{f' ({metric.direction})' if metric.direction else ''}."
    )
    return Headline(f"{metric.metric} {measure(grown)} with growth, {measure(host)} without", [sentence], notes=[note])


def _describe_state(metadata: Mapping[str, Any], progress: RunProgress, exhibits: Mapping[str, Exhibit]) -> Headline:
    curves = group_rows(exhibits["curves"].rows, "measure")
    rollbacks = len(curves.pop("rollback", []))
    newest: dict[str, float] = {}
    for name, rows in curves.items():
        # On validation data, where there is more than one kind of data.
        data = group_rows(rows, "data")
        newest[name] = read_numbers(data.get("validation") or next(iter(data.values())), "value")[-1]

    metric = RunMetric.from_metadata(metadata)
    value = newest.get(metric.metric, math.nan)
    if metric.metric == ACCURACY and math.isfinite(value):
        short = f"{percent(value)} accuracy"
    else:
        name = metric.metric.capitalize() if metric.metric in (LOSS, ACCURACY) else metric.metric
        short = f"{name} {measure(value)}"

    # Seeds that are in the model now, after any end of growth.
    stages = {slot: rows[-1]["stage"] for slot, rows in group_rows(exhibits["stages"].rows, "slot_name").items()}
    fossilized, pruned = Stage.FOSSILIZED.name.lower(), Stage.PRUNED.name.lower()
    residents: list[str] = []
    for slot, seeds in group_rows(exhibits["seeds"].rows, "slot_name").items():
        outcome = seeds[-1]["outcome"]
        if outcome != pruned:
            stage = "" if outcome == fossilized else f", {stages[slot]}"
            residents.append(f"{seeds[-1]['blueprint']} in {slot}{stage}")

    # The loss is not repeated where it is the metric.
    loss = "" if metric.is_loss else f"loss {measure(newest[LOSS])}; "
    host = metadata.get("host_parameters")
    parameters = f"{host:,}" if isinstance(host, int) else "?"
    sentence = (
        f"After {plural(progress.done, 'decision')} ({progress.state}): {loss}{parameters} parameters in the host and "
        f"{newest[ADDED]:,.0f} added by growth ({'; '.join(residents) or 'none'}); {plural(rollbacks, 'rollback')}."
    )
    return Headline(f"{short} on validation data", [sentence])


_QUESTIONS: Mapping[Split, str] = {
    "heldout": "Is it better than the baselines?",
    "transfer": "Does it generalize to new families?",
}
_MADE_BY = f"{RUN_ADVICE}, or the folder of a comparison of `esper compare`"


def report_on(paths: Sequence[Path], bare: Path | None = None) -> Report:
    """The report of a run or a comparison, also while it goes on, or of several runs that differ only in their seed.

    ``bare`` is a run of the same training loop without growth.
    """
    if bare is not None:
        runs = [RunDirectory(path) for path in (*paths, bare)]
        for run in runs:
            if not run.store.is_file():
                raise RunError(f"no run at {run.path}: a bare host is compared with a run of a `Grower`")
        if len(paths) != 1 or not runs[0].is_grown():
            raise ConfigError("a bare host is compared with one run of a `Grower`: leave it out for other runs")
        return report_grown(*runs)
    if len(paths) > 1:
        return _report_over_seeds(paths, read_over_seeds(paths))
    (path,) = paths
    if not os.path.exists(path):  # unlike Path.exists, it takes names that no file can have
        raise RunError(f"no run at {path}: {_MADE_BY}")
    run = RunDirectory(path)
    if run.store.is_file() and run.config.is_file():
        return report_grown(run) if run.is_grown() else _report_population(run)
    if path.is_dir() and any(path.glob("*/seed-*/config.yaml")):
        return report_configurations(path, *read_experiment(path))
    if (path / STUDY).is_file():
        raise RunError(f"{path} is a sweep, whose study is in {path / STUDY}: give the directory of one of its trials")
    raise RunError(f"{path} is neither a run nor a comparison: {_MADE_BY}")


def write_report(run: RunDirectory) -> Path:
    """Write the report of a run of `esper train` or `esper evaluate`, with its verdicts if it was evaluated."""
    # No evaluation may end between reading results and writing verdicts.
    with lock_folder(run.path):
        return _report_population(run).write(run.path)


def _report_population(run: RunDirectory) -> Report:
    return _report_played(run) if run.is_played() else _report_training(run)


def _report_played(run: RunDirectory) -> Report:
    """The report of a controller that played a suite beside the baselines, without learning."""
    play = load_settings(PlaySettings, run.config)
    name = str(run.read_metadata()["controller"])
    comparison = compare_controllers([read_evaluation(run.evaluation, name)], name, Claim.CONTROLLER)
    behaviour = read_behaviour(run.behaviour)
    with RunReader.open(run.store) as reader:
        platforms = list_platforms(reader)
    exhibits = exhibit_evaluation({play.split: comparison})[play.split]
    acted = exhibit_behaviour(behaviour, name)
    (blueprints,) = run_queries(run.store, [BLUEPRINTS])
    kept = [acted["earnings"], acted["interactions"]] if acted["earnings"].rows else []
    conclusion, title = assess_learning(comparison, play.split), SPLIT_TITLES[play.split]
    again = f"esper evaluate --controller {shlex.quote(play.controller)} --suite {shlex.quote(play.suite)} "
    return Report(
        title=f"Esper: {run.path.name}",
        heading=f"How {name} plays",
        facts=f"Run {run.path}: suite {play.suite}, {name_instances(play.instances, play.split)}, seed {play.seed}; "
        f"{platforms}.",
        headlines=[
            Headline(conclusion.short, [conclusion.sentence], notes=[SCORE_MEANING, describe_basis(comparison)])
        ],
        sections=[
            Section(
                "Is it better than the baselines?",
                [exhibits[shown] for shown in ("scores", "costs", "standings", "families")],
            ),
            Section(f"What {name} uses in each family", [acted["operations"], acted["blueprints"], blueprints]),
            Section("What kept seeds contributed", kept, "" if kept else f"{name} kept no seeds."),
            Section("Episodes", [acted["episodes"]]),
            Section(
                "How to reproduce this",
                commands=f"{again}--split {play.split} --instances {play.instances} --seed {play.seed} "
                "--run-dir runs/again",
            ),
        ],
        exhibits=[blueprints, *exhibits.values(), *acted.values()],
        comparisons={title: comparison},
        verdicts=record_evaluation({play.split: comparison}),
    )


def _report_training(run: RunDirectory) -> Report:
    settings = load_settings(TrainSettings, run.config)
    comparisons = compare_splits(read_evaluation(run.evaluation) if run.evaluation.exists() else [])
    behaviour = read_behaviour(run.behaviour) if run.behaviour.exists() else None
    with RunReader.open(run.store) as reader:
        platforms = list_platforms(reader)
        summary = summarise_run(reader)
        extensions = [f"{one.before} to {one.after}" for one in reader.events(RunExtended)]
        rollbacks = Counter(event.trouble for event in reader.events(RolledBack))

    exhibits = run_queries(run.store, (LEARNING, BLUEPRINTS, PROBE_INTERACTIONS))
    has_learned = any(row["kind"] == "J" for row in exhibits[0].rows)
    note = "" if has_learned else "No iteration has finished yet."
    sections = [Section("How the policy learned", [*exhibits] if has_learned else [], note)]

    for split, compared in exhibit_evaluation(comparisons).items():
        shown = ("scores", "costs", "standings", "families")
        sections.append(Section(_QUESTIONS[split], [compared[name] for name in shown]))
        exhibits += compared.values()

    if behaviour is not None:
        acted = exhibit_behaviour(behaviour)
        sections.append(Section("What the policy uses in each family", [acted["operations"], acted["blueprints"]]))
        if behaviour.earnings is not None:
            kept = [acted["earnings"], acted["interactions"]] if acted["earnings"].rows else []
            sections.append(Section("What kept seeds contributed", kept, "" if kept else "The policy kept no seeds."))
        sections.append(Section("Episodes", [acted["episodes"]]))
        exhibits += acted.values()

    health = exhibit_health(run.store, settings.ppo.target_kl, rollbacks)
    if health.rows:
        sections.append(Section("Was training healthy?", [health]))
    note = "The same version of Esper with the same settings reproduces the run on any number of cores."
    if extensions:
        note += (
            f" Its iterations were raised from {join_words(extensions)}: begin with the first, and raise it at the "
            "same iteration with --resume RUN --set iterations=N."
        )
    sections.append(
        Section(
            "How to reproduce this",
            note=note,
            commands=f"esper train --config {shlex.quote(f'{run.path}/config.yaml')} --run-dir runs/again\n"
            "esper evaluate runs/again",
            settings=format_settings(settings),
        )
    )
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
        comparisons={SPLIT_TITLES[split]: comparison for split, comparison in comparisons.items()},
        verdicts=record_evaluation(comparisons),
    )


def _describe_verdict(
    heldout: Comparison, transfer: Comparison | None, behaviour: Behaviour | None, summary: TrainingSummary
) -> Headline:
    conclusion = assess_learning(heldout)
    sentences, notes = [conclusion.sentence], [SCORE_MEANING, describe_basis(heldout)]
    if transfer is not None:
        new = assess_learning(transfer, "transfer")
        sentences.append(f"On families it never trained on: {new.short[:1].lower()}{new.short[1:]}. {new.sentence}")
    if behaviour is not None and behaviour.iteration != summary.iterations:
        notes.append(f"The policy of iteration {behaviour.iteration} was evaluated.")
    return Headline(conclusion.short, sentences, notes=notes)


def _describe_unmeasured(run: RunDirectory, summary: TrainingSummary) -> Headline:
    sentences = list[str]()
    if summary.probe_score is not None and summary.baselines:
        best = max(summary.baselines, key=lambda name: summary.baselines[name])
        untrained = "" if summary.untrained is None else f", its untrained self {score(summary.untrained)}"
        sentences.append(
            f"On a few training problems, the greedy policy scored {score(summary.probe_score)}{untrained} and the "
            f"best baseline, {best}, {score(summary.baselines[best])}. This is not yet an answer."
        )
    sentences.append("To compare the policy with all baselines on held-out instances, run")
    command = f"esper evaluate {shlex.quote(str(run.path))}"
    return Headline("Not evaluated yet", sentences, command, [SCORE_MEANING])


def report_configurations(folder: Path, configurations: Comparison, arms: Comparison | None) -> Report:
    """The report of a comparison of configurations, and of all arms if they have played."""
    first, names = configurations.reference.name, [arm.name for arm in configurations.standings]
    compared = exhibit_arms(configurations)
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
    headlines: list[Headline] = []
    sections: list[Section] = []
    evaluated = exhibit_evaluation(comparisons)
    for split, exhibits in evaluated.items():
        conclusion = assess_learning(comparisons[split], split)
        notes = [*([] if headlines else [SCORE_MEANING]), describe_basis(comparisons[split])]
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
