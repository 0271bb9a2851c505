"""The gallery of foreign models, as Markdown made from stored runs.

``python docs/write_gallery.py`` writes docs/gallery anew from benchmarks/results/foreign. With the folder of
``benchmarks/foreign.py``, it first stores that folder's runs of the default rule with their decisions:
``python docs/write_gallery.py FOLDER``.
"""

from __future__ import annotations

import inspect
import json
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import foreign  # noqa: E402 - a benchmark's folder is on no path
from foreign_models.problem import Problem  # noqa: E402

PAGES = ROOT / "docs" / "gallery"
LINES = ROOT / "benchmarks" / "results" / "foreign"
MODELS = {
    "deep_set": "A set network for point clouds",
    "value_network": "A value network of a balancing agent",
    "convnext": "A small ConvNeXt for digits",
    "forecaster": "A transformer that forecasts series",
    "resnet": "A small ResNet for noisy shapes",
    "recommender": "A recommender",
    "mixed_table": "Numbers and categories of a table",
    "mlp_diabetes": "A table of 242 patients",
}
"""From the largest gain to the largest loss."""
SEEDS = 5
WAYS = {
    "bare": "bare",
    "longer": "bare, as many FLOPs as the default",
    "all_at_start": "everything from the start",
    "random_candidate": "a random candidate",
    "look": "**look, the default**",
}
_TRIED = re.compile(
    r"(?P<outcome>kept|pruned) (?P<blueprint>\w+) in (?P<slot>\S+) at decision (?P<judged>\d+) by (?P<by>\w+)"
    r"(?:: (?P<figures>.*))? \(planted at decision (?P<planted>\d+), .*\)"
)
_CONTRIBUTION = re.compile(r"contribution (?P<value>[+-]?[\d.e-]+)")
_LOSS = re.compile(r"loss (?P<value>[\d.]+)%(?: ± [\d.]+%)? (?P<direction>higher|lower) without it")


Comparisons = dict[tuple[str, str], Any]
"""What benchmarks/foreign.py computes, by model and arm."""


def store(folder: Path) -> None:
    """Keep the folder's runs of the default rule with what became of each module, a line for each."""
    lines = []
    for name in MODELS:
        runs = [foreign.Run(name, "look", seed, foreign.PROBLEMS[name].recipe.epochs) for seed in range(SEEDS)]
        files = [run.locate(folder) for run in runs]
        for file in files if all(file.exists() for file in files) else ():
            kept = json.loads(file.read_text())
            del kept["seconds"]  # of a machine that was shared
            kept["decisions"] = [line for line in kept["decisions"] if _TRIED.fullmatch(line)]
            lines.append(json.dumps(kept))
    (LINES / "gallery.jsonl").write_text("\n".join(lines) + "\n")


def read(name: str) -> list[Any]:
    """The results of benchmarks/foreign.py in a file of lines."""
    lines = (LINES / name).read_text().splitlines()
    return [foreign.Result(**{"seconds": 0.0, "decisions": (), **json.loads(line)}) for line in lines]


def document() -> dict[str, str]:
    """All pages of the gallery, by file name."""
    results = read("reporting.jsonl")
    comparisons = {(one.problem, one.arm): one for one in foreign.compare(results)}
    grown = {name: [one for one in results if (one.problem, one.arm) == (name, "look")] for name in MODELS}
    judged = {name: [one for one in read("gallery.jsonl") if one.problem == name] for name in MODELS}
    pages = {f"{name}.md": "\n".join(_write_model(name, comparisons, grown[name], judged[name])) for name in MODELS}
    return {"index.md": "\n".join(_write_index(comparisons, grown)), **pages}


def _write_index(comparisons: Comparisons, grown: dict[str, list[Any]]) -> Iterator[str]:
    yield """\
# Gallery

Eight small models with plain recipes, which nobody prepared for growth: growth helps on four, changes little on
two and harms two. [Ordinary models](../practice.md#models-that-nobody-prepared) has all fourteen. Each page here has
what was offered, what was kept in five runs and why, and the command.

The gain is over the bare model with the same random seed, in standard deviations of the bare model over seeds, ± a
standard error. *Longer training* is that of the bare model for as many FLOPs as growth took.

| model | gain of growth | gain of longer training | parameters added | modules kept, of tried, in five runs |
|---|---|---|---|---|"""
    for name, title in MODELS.items():
        look, longer = comparisons[name, "look"], comparisons[name, "longer"]
        kept, tried = (sum(getattr(one, count) for one in grown[name]) for count in ("kept", "tried"))
        yield f"| [{title}]({name}.md) | {_gain(look)} | {_gain(longer)} | {look.added:+.0%} | {kept} of {tried} |"
    yield """
`python docs/write_gallery.py` makes these pages from
the stored runs in `benchmarks/results/foreign/reporting.jsonl`.
"""


def _write_model(name: str, comparisons: Comparisons, grown: Sequence[Any], judged: Sequence[Any]) -> Iterator[str]:
    problem: Problem = foreign.PROBLEMS[name]
    recipe, metric = problem.recipe, grown[0].metric
    source = Path(inspect.getfile(problem.build)).relative_to(ROOT)
    words = " ".join((inspect.getdoc(part) or "").partition("\n")[0] for part in (problem.build, problem.data)).strip()
    yield f"""\
# {MODELS[name]}

`{name}`, {grown[0].host_parameters:,} parameters.
{words}
Source: [`{source.name}`](../../{source.as_posix()}).

## What was offered

```python
slots = {_quote(problem.slots)}
model = esper.attach(net, slots, example_input=examples)
```

The model trains for {recipe.epochs} epochs by {recipe.optimizer} with a learning rate of {recipe.learning_rate:g}. \
A decision follows each
epoch. The grower has its defaults.

## Beside the bare model

Five seeds: {metric} on test data ± standard deviation, and the gain over the bare model in its standard deviations ±
standard error.

| way | {metric} | gain | parameters added | FLOPs |
|---|---|---|---|---|"""
    for arm, way in WAYS.items():
        one = comparisons[name, arm]
        value = f"{statistics.mean(one.values):.3f} ± {statistics.stdev(one.values):.3f}"
        yield f"| {way} | {value} | {'' if arm == 'bare' else _gain(one)} | {one.added:+.0%} | {one.flops:.1f}x |"

    yield f"""
By random seed:

| seed | {metric}, bare | {metric}, grown | modules tried | kept | parameters added |
|---|---|---|---|---|---|"""
    for one, without in zip(grown, comparisons[name, "bare"].values, strict=True):
        numbers = f"{without:.3f} | {one.value:.3f} | {one.tried} | {one.kept} | {one.added_parameters:,}"
        yield f"| {one.seed} | {numbers} |"

    if judged:
        yield """
## What was kept, and why

A module is kept if the score or the loss is better with it than with it switched off, by more than a standard error.
The figures are means over the runs that rated it. *Loss without it* is how much higher the validation loss is with the
module switched off.

| slot | module | planted in | kept in | contribution to the score | loss without it |
|---|---|---|---|---|---|"""
        yield from _count_modules(judged)
    yield f"""
## Run it

```
python benchmarks/foreign.py runs/foreign --half reporting --models {name} --arms bare look
python benchmarks/foreign.py runs/foreign --half reporting --models {name}      # all ways of the table
```

The decisions of each run, with their figures, are in its file below `runs/foreign/{name}`.
"""


def _count_modules(runs: Sequence[Any]) -> Iterator[str]:
    """A row for each module in each slot, the ones kept most often first."""
    found: dict[tuple[str, str], list[Tried]] = {}
    for one in (parse_tried(line) for run in runs for line in run.decisions):
        found.setdefault((one.slot, one.blueprint), []).append(one)
    for (slot, blueprint), tried in sorted(found.items(), key=lambda item: (-sum(t.kept for t in item[1]), item[0])):
        contributions = [one.contribution for one in tried if one.contribution is not None]
        losses = [one.loss for one in tried if one.loss is not None]
        contribution = f"{statistics.mean(contributions):+.3f}" if contributions else ""
        loss = f"{statistics.mean(losses):+.1f}%" if losses else ""
        kept = sum(one.kept for one in tried)
        yield f"| `{slot}` | `{blueprint}` | {len(tried)} | {kept} | {contribution} | {loss} |"


@dataclass(frozen=True)
class Tried:
    """A module that was planted, as `str` of `esper.growth.summary.TriedModule` has it."""

    slot: str
    blueprint: str
    kept: bool
    contribution: float | None
    loss: float | None
    """How much higher the validation loss is without the module, in percent of the loss with it."""


def parse_tried(line: str) -> Tried:
    """Read a line of a run's decisions.

    Raises:
        ValueError: the line is about something else.
    """
    found = _TRIED.fullmatch(line)
    if found is None:
        raise ValueError(f"no line of a module that was tried: {line}")
    figures = found["figures"] or ""
    contribution, loss = _CONTRIBUTION.search(figures), _LOSS.search(figures)
    return Tried(
        slot=found["slot"],
        blueprint=found["blueprint"],
        kept=found["outcome"] == "kept",
        contribution=float(contribution["value"]) if contribution else None,
        loss=(1 if loss["direction"] == "higher" else -1) * float(loss["value"]) if loss else None,
    )


def _quote(slots: Any) -> str:
    return json.dumps({place: kinds if isinstance(kinds, str) else list(kinds) for place, kinds in slots.items()})


def _gain(one: Any) -> str:
    return f"{one.gain:+.1f} ± {one.error:.1f}"


def main(words: Sequence[str]) -> None:
    """Write all pages; with a folder of runs, store these first."""
    for folder in words:
        store(Path(folder))
    PAGES.mkdir(exist_ok=True)
    for name, text in document().items():
        (PAGES / name).write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
