"""A report is about a training run, a grown model or a comparison, and about nothing else."""

import math
import re
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from esper.dash.formats import measure
from esper.errors import ConfigError, RunError
from esper.lab.exhibit import group_rows
from esper.lab.report import report_on
from esper.runs.events import LifecycleTransition, RunStarted
from esper.runs.reader import RunReader
from esper.runs.run_directory import RunDirectory
from esper.runs.store import RunStore
from esper.train.results import ArmResults, load_or_compute
from factories import Loop
from lab.figures_cases import grown, trained
from lab.planted import EXPLODED
from train.results_cases import planted

pytestmark = pytest.mark.landing


def add_arm(path: Path, mean: float, instances: slice = slice(None)) -> None:
    outcomes = [replace(one, flops=9_000_000, split=None) for one in planted({"policy": mean})[instances]]
    load_or_compute(path, "", lambda: ArmResults(7, outcomes))


@pytest.fixture
def comparison(tmp_path: Path) -> Path:
    """Two configurations with five seeds each; the first of the two is not the first by name."""
    folder = tmp_path / "comparison"
    for name, mean in (("zeta", 0.7), ("alpha", 0.6)):
        for seed in range(5):
            trial = folder / name / f"seed-{seed}"
            trial.mkdir(parents=True)
            (trial / "config.yaml").write_text("{}\n")
            add_arm(trial / "arms" / "policy.json", mean + 0.001 * seed)
            with RunStore.create(trial / "run.db") as store:
                store.emit(RunStarted(iteration=0, platform={"esper": "1.0"}, seed=seed))
    return folder


def test_a_training_run_shows_what_it_tried_with_the_queries(tmp_path: Path) -> None:
    page = report_on([trained(tmp_path / "run").path]).render()
    assert all(f'id="{name}"' in page for name in ("figure-learning", "table-blueprints", "figure-health"))
    assert page.count("The query behind it") >= 3
    assert "FROM seeds GROUP BY blueprint" in page
    assert 'id="table-probe_interactions"' in page
    run = tmp_path / "run"
    with closing(sqlite3.connect(run / "run.db")) as connection, connection:
        connection.execute("DELETE FROM events WHERE type = 'interactions_measured'")
    page = report_on([run]).render()
    assert "Not shown, probe_interactions: no interaction of kept modules was measured." in page


def test_a_grown_model_has_a_page_of_its_own(tmp_path: Path) -> None:
    run = grown(tmp_path / "run")
    with RunStore.open(run.store) as store:
        store.emit(EXPLODED)
    page = report_on([run.path]).render()
    assert "How MlpNet grew" in page
    assert all(f">{words}</text>" in page for words in ("train", "validation", "seeds", "loss", "b: blending in"))
    assert "<td>exploded</td>" in page


def test_a_model_that_grew_in_its_owners_loop_has_that_page_too(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "mine"
    loop = Loop("heuristic", run=run)
    assert "No decision yet" in report_on([run]).render()
    for number in range(1, 11):
        decision = loop.epoch(lambda loss, number=number: math.nan if number == 9 else loss)
    report = report_on([run])
    page = report.render()
    assert "<h1>How Sequential grew</h1>" in page
    assert "controller heuristic, seed 0, 20 decisions planned" in page
    added = sum(parameter.numel() for seed in loop.model.seeds.values() for parameter in seed.parameters())
    assert f"After {decision.number} decisions (running)" in page
    assert f"{loop.model.host_parameters} parameters in the host and {added} added by growth" in page
    assert "; 1 rollback." in page
    assert "G3 held back: alpha moving" in page
    assert "blending to holding" in page
    assert "&#34;horizon&#34;: 20" in page
    assert 'id="figure-snapshots"' in page
    assert {exhibit.name for exhibit in report.exhibits if exhibit.rows} == {
        *("curves", "stages", "contributions", "snapshots", "seeds", "decisions", "rollbacks")
    }


@pytest.fixture(scope="module")
def grown_and_bare(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model that grew, and its host in the same loop; the bare host trained for one decision more."""
    folder = tmp_path_factory.mktemp("runs")
    for name, controller, decisions in (("grown", "all_at_start", 4), ("bare", "none", 5)):
        loop = Loop(controller, run=folder / name)
        for _ in range(decisions):
            loop.epoch()
        loop.grower.close()
    return folder / "grown", folder / "bare"


def test_a_grown_model_is_compared_with_its_bare_host_after_equal_training(
    grown_and_bare: tuple[Path, Path], tmp_path: Path
) -> None:
    run, bare = grown_and_bare
    report = report_on([run], bare)
    figure, table = (exhibit for exhibit in report.exhibits if exhibit.name == "bare")
    rows = {str(row["measure"]): row for row in table.rows}
    for place, column in ((run, "grown"), (bare, "bare")):
        with RunReader.open(RunDirectory(place).store) as reader:
            scalars, host = reader.scalars_at(4), reader.metadata()["host_parameters"]
        assert rows["accuracy"][column] == scalars["validation_accuracy"]
        assert rows["loss"][column] == scalars["validation_loss"]
        assert rows["parameters"][column] == host + scalars["added_parameters"]
    for row in rows.values():
        assert row["difference"] == pytest.approx(float(str(row["grown"])) - float(str(row["bare"])))
    assert [len(curve) for curve in group_rows(figure.rows, "model").values()] == [2 * 4, 2 * 5]
    page = report.render()
    assert 'id="compared-with-the-bare-host"' in page
    assert f"accuracy {measure(float(str(rows['accuracy']['grown'])))} with growth, " in page
    assert "On validation data after decision 4: " in page
    assert "bare-host" not in report_on([run]).render()
    Loop("none", run=tmp_path / "new")
    assert "Not shown, bare: no decision was made." in report_on([run], tmp_path / "new").render()
    with pytest.raises(ConfigError, match="one run of a `Grower`"):
        report_on([run, run], bare)


def with_growth(_run: Path, bare: Path) -> None:
    names = {"before": "dormant", "after": "germinated", "blueprint": "mlp", "cause": "germinate", "reason": "passed"}
    with RunStore.open(bare / "run.db") as store:
        store.emit(LifecycleTransition(iteration=5, episode=1, environment=0, step=4, slot=0, **names))


def say(run: Path, **metadata: Any) -> None:
    with RunStore.open(run / "run.db") as store:
        store.set_metadata(metadata)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (with_growth, "bare is not bare, as 1 seed germinated in it: give a run of the same training loop with"),
        (lambda _, bare: say(bare, host_parameters=7), "host_parameters is 7 instead of"),
        (lambda _, bare: say(bare, metric="f1"), "metric is 'f1' instead of 'accuracy'"),
        (lambda _, bare: say(bare, command="train"), "bare is not a run of a `Grower`"),
        (lambda run, _: say(run, command="train"), "compared with one run of a `Grower`"),
        (lambda _, bare: (bare / "run.db").unlink(), "no run at"),
    ],
    ids=lambda part: getattr(part, "__name__", None),
)
def test_a_run_that_is_not_the_bare_host_is_refused(
    spoil: Callable[[Path, Path], None], message: str, grown_and_bare: tuple[Path, Path], tmp_path: Path
) -> None:
    run, bare = (Path(shutil.copytree(place, tmp_path / place.name)) for place in grown_and_bare)
    spoil(run, bare)
    with pytest.raises((ConfigError, RunError), match=re.escape(message)):
        report_on([run], bare)


def test_a_comparison_shows_arms_that_have_played_with_all_seeds(comparison: Path) -> None:
    page = report_on([comparison]).render()
    assert "zeta against alpha: zeta better." in page, "in the order in which it was asked for"
    assert "All arms" not in page
    add_arm(comparison / "zeta" / "arms" / "none.json", 0.5)
    add_arm(comparison / "zeta" / "seed-0" / "arms" / "sequence.json", 0.7)
    report = report_on([comparison])
    assert "All arms" in report.render()
    names = {exhibit.name: exhibit.rows for exhibit in report.exhibits}
    assert [row["name"] for row in names["arms"]] == ["policy", "none"]


def test_a_comparison_of_policies_that_played_other_instances_is_refused(comparison: Path) -> None:
    results = comparison / "alpha" / "seed-4" / "arms" / "policy.json"
    results.unlink()
    add_arm(results, 0.6, slice(-1))
    with pytest.raises(RunError, match="did not all play the same instances: call `esper compare` again"):
        report_on([comparison])
    for path, reason in ((comparison.parent, "neither a run nor a comparison"), (comparison / "missing", "no run at")):
        with pytest.raises(RunError, match=reason):
            report_on([path])


def test_a_comparison_takes_only_seeds_that_all_have_done(comparison: Path) -> None:
    (comparison / "alpha" / "seed-4" / "arms" / "policy.json").unlink()
    assert "4 training seeds each" in report_on([comparison]).render()
    for seed in range(4):
        (comparison / "alpha" / f"seed-{seed}" / "arms" / "policy.json").rename(comparison / f"{seed}.json")
    (comparison / "zeta" / "seed-0" / "arms" / "policy.json").write_text("[")
    with pytest.raises(RunError, match="seed-0/arms/policy.json is damaged"):
        report_on([comparison])


@given(st.text("<>&\"'/ab\\;=", min_size=1, max_size=12))
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_name_in_a_run_becomes_markup(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    evil = f"<script>{name}</script><img src=x>"
    for plant in (trained, grown):
        page = report_on([plant(tmp_path_factory.mktemp("run") / "run", name=evil).path]).render()
        assert "<script" not in page
        assert "<img" not in page
