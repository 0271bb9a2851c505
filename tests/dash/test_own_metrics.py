"""Whatever a run of one's own model is about, every view of it names that and shows its own numbers."""

import html
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import esper
from esper import Decision
from esper.cli import main
from esper.dash import formats
from esper.dash.pages import describe_compared, describe_model
from esper.lab.report import report_on
from esper.runs.events import StepTaken
from esper.runs.loggers import read_metrics
from esper.runs.reader import RunReader
from factories import RINGS, Loop, make_data, validate

pytestmark = pytest.mark.landing

Capture = pytest.CaptureFixture[str]
DECISIONS = 10


@torch.no_grad()
def with_mae(model: nn.Module) -> dict[str, float]:
    """A metric of a size of its own, better the lower it is."""
    model.eval()
    inputs, labels = make_data(64, seed=1)
    wrong = (model(inputs).softmax(1) - nn.functional.one_hot(labels, RINGS)).abs().mean()
    return {"loss": validate(model)[0], "mae": 5000 * float(wrong)}


@dataclass(frozen=True)
class Kind:
    """What a run is about."""

    metric: str
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    own: Callable[[Decision], float] = lambda decision: decision.score
    """Its value when a decision was made."""

    def grow(self, run: Path) -> list[Decision]:
        """A run of the kind, in which something germinates, blends and is kept or pruned."""
        loop = Loop("heuristic", run=run, **self.options)
        decisions = [loop.epoch() for _ in range(DECISIONS)]
        loop.grower.close()
        return decisions


KINDS = {
    "accuracy": Kind("accuracy"),
    "loss": Kind("loss", {"evaluate": lambda model: validate(model)[0]}, lambda decision: decision.loss),
    "mae": Kind(
        "mae", {"evaluate": esper.Metric(with_mae, "mae", higher_is_better=False)}, lambda decision: decision.value
    ),
}


@dataclass(frozen=True)
class Run:
    """A run and what its loop saw."""

    kind: Kind
    path: Path
    decisions: list[Decision]

    @property
    def values(self) -> list[float]:
        return [self.kind.own(one) for one in self.decisions]

    @property
    def newest(self) -> str:
        return formats.measure(self.values[-1])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("runs")
    return {name: Run(kind, folder / name, kind.grow(folder / name)) for name, kind in KINDS.items()}


@pytest.fixture(params=KINDS)
def run(request: pytest.FixtureRequest, runs: dict[str, Run]) -> Run:
    return runs[request.param]


def test_each_run_is_compared_by_its_own(runs: dict[str, Run]):
    mae, loss = runs["mae"], runs["loss"]
    assert mae.values[-1] > 100, "else a view could show one for the other"
    assert all(one.score <= 1 for one in mae.decisions)
    assert loss.values[-1] != pytest.approx(loss.decisions[-1].score, abs=0.01)
    assert all(any(one.contributions for one in each.decisions) for each in runs.values())
    for name, one in runs.items():
        told = describe_compared(name, one.path / "run.db")
        assert (told["metric"], told["values"]) == (one.kind.metric, one.values)
        assert told["late"]["high"] == max(one.values[-math.ceil(DECISIONS / 3) :])


def test_decisions_events_and_loggers_hold_it_in_its_own_units(run: Run):
    assert [(one.metric, one.value) for one in run.decisions] == [(run.kind.metric, value) for value in run.values]
    with RunReader.open(run.path / "run.db") as reader:
        steps, metadata = reader.events(StepTaken), reader.metadata()
        series = reader.series(f"validation_{run.kind.metric}")
    assert [step.metric for step in steps] == run.values == [value for _, value in series]
    assert (metadata["metric"], metadata["higher_is_better"]) == (run.kind.metric, run.kind.metric == "accuracy")
    scores = [one.score for one in run.decisions]
    if run.kind.metric != "accuracy":
        reference = metadata["reference"]
        assert scores == pytest.approx([(reference - value) / reference for value in run.values])
    assert [step.objective for step in steps] == scores  # there is no rent
    with RunReader.open(run.path / "run.db") as reader:
        assert read_metrics(reader, DECISIONS)[f"validation_{run.kind.metric}"] == run.values[-1]
    decision = run.decisions[-1]
    assert decision.metrics[f"validation_{run.kind.metric}"] == run.values[-1]
    assert f"; loss {decision.loss:.4g}" in str(decision)
    assert ("score" in str(decision)) is False
    if run.kind.metric != "loss":
        assert str(decision).endswith(f", {run.kind.metric} {decision.value:.4g}")


def test_the_list_of_runs_shows_it(run: Run, capsys: Capture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["runs", str(run.path.parent)]) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert rows["run"][3:6] == ["done", "greedy", "value"]
    assert rows[run.path.name][3:6] == [f"{DECISIONS}/20", run.kind.metric, run.newest]
    assert main(["runs", str(run.path.parent), "--json"]) == 0
    (found,) = [one for one in json.loads(capsys.readouterr().out.splitlines()[-1]) if one["run"] == str(run.path)]
    assert (found["metric"], found["value"]) == (run.kind.metric, run.values[-1])


def test_the_report_names_it_with_its_numbers(run: Run):
    name = run.kind.metric
    markup = r"<pre>.*?</pre>|<style>.*?</style>|<[^>]*>"  # and the listing of settings
    page = html.unescape(re.sub(markup, " ", report_on([run.path]).render(), flags=re.S))
    others = {"accuracy", "mae"} - {name}
    assert not [word for word in others if re.search(rf"\b{word}\b", page, re.IGNORECASE)]
    learned = {"accuracy": "accuracy and loss", "loss": "loss", "mae": "mae (lower is better) and loss"}
    assert f"Learning curves: {learned[name]} on training and validation data" in page
    newest = {"accuracy": f"{formats.percent(run.values[-1])} accuracy", "loss": f"Loss {run.newest}"}
    assert newest.get(name, f"{name} {run.newest}") + " on validation data" in page
    assert "how much the model depends on a slot's seed, " + name in page
    assert f"{name} on validation data with" in page
    assert formats.measure(run.decisions[-1].loss) in page


def test_every_figure_and_table_of_the_report_names_it(run: Run, tmp_path: Path):
    name = run.kind.metric
    exhibits = {exhibit.name: exhibit for exhibit in report_on([run.path]).exhibits}
    assert name in exhibits["curves"].caption
    assert name in exhibits["contributions"].caption
    rows = exhibits["curves"].rows
    found = [row["value"] for row in rows if (row["measure"], row["data"]) == (name, "validation")]
    assert found == run.values
    assert {row["measure"] for row in rows} == {name, "loss", "added_parameters"}
    assert main(["report", str(run.path), "--out", str(tmp_path)]) == 0
    heads = [column.heading for column in exhibits["decisions"].columns]
    assert heads[heads.index("gates") + 1 :] == (["loss"] if name == "loss" else ["loss", name])
    assert (tmp_path / "tables" / "decisions.csv").is_file()


def test_the_dashboards_model_page_is_told_it(run: Run):
    with RunReader.open(run.path / "run.db") as reader:
        told = describe_model(reader)
    assert told["about"]["metric"] == run.kind.metric
    assert told["about"]["direction"] == ("lower is better" if run.kind.metric == "mae" else "")
    assert run.kind.metric in told["about"]["contribution"]
    assert list(told["figures"]["metric"].values()) == run.values == [one["metric"] for one in told["decisions"]]
