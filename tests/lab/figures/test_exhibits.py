"""Every figure and table shows what its query gives, or the reason why there is nothing to show."""

import csv
from pathlib import Path
from typing import Any

import pytest

from esper.lab.drawing import export_exhibits
from esper.lab.exhibit import Drawing, Exhibit, run_queries
from esper.lab.grown_figures import grown_exhibits
from esper.lab.policy_figures import BLUEPRINTS, LEARNING, PROBE_INTERACTIONS, health_figure
from esper.runs.events import LifecycleTransition, StepTaken
from esper.runs.reader import RunReader
from esper.runs.run_directory import RunDirectory
from esper.runs.store import RunStore
from lab.figures_cases import NETWORKS, grown, trained

SHOWN = (LEARNING, health_figure(0.03), BLUEPRINTS, PROBE_INTERACTIONS)


def training_exhibits(store: Path) -> list[Exhibit]:
    return run_queries(store, SHOWN)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return trained(tmp_path_factory.mktemp("trained") / "run")


@pytest.fixture(scope="module")
def exported(run: RunDirectory, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Exhibit]]:
    """A folder with all that there is of the run, and what was written there."""
    folder = tmp_path_factory.mktemp("exported")
    return folder, export_exhibits(folder, training_exhibits(run.store))


def assert_queries_give_the_numbers(folder: Path, store: Path, at_least: int) -> None:
    queries = sorted(folder.glob("*/*.sql"))
    assert len(queries) >= at_least
    with RunReader.open(store) as reader:
        for query in queries:
            answer = reader.query(query.read_text())
            with query.with_suffix(".csv").open(newline="") as file:
                head, *rows = csv.reader(file)
            assert head == list(answer.columns)
            assert rows == [["" if value is None else str(value) for value in row] for row in answer.rows]


@pytest.mark.landing
def test_the_query_beside_a_file_gives_its_numbers_again(
    run: RunDirectory, exported: tuple[Path, list[Exhibit]], tmp_path: Path
) -> None:
    assert_queries_give_the_numbers(exported[0], run.store, 3)
    model = grown(tmp_path / "run")
    exhibits = run_queries(model.store, grown_exhibits({}))
    done = export_exhibits(tmp_path / "out", exhibits)
    assert [isinstance(exhibit, Drawing) for exhibit in done] == [True] * 4 + [False] * 2
    assert_queries_give_the_numbers(tmp_path / "out", model.store, 5)
    # What has nothing to show is left out, with its reason.
    rollbacks = [exhibit for exhibit in exhibits if exhibit.name == "rollbacks"]
    assert not export_exhibits(tmp_path / "nothing", rollbacks)
    assert [exhibit.absent for exhibit in rollbacks] == ["training never diverged"]
    assert not (tmp_path / "nothing").exists()


def test_every_figure_and_table_has_all_its_files(exported: tuple[Path, list[Exhibit]]) -> None:
    folder, done = exported
    assert {exhibit.name for exhibit in done} == {exhibit.name for exhibit in SHOWN}
    for what in SHOWN:
        stem = folder / what.folder / what.name
        if isinstance(what, Drawing):
            assert stem.with_suffix(".pdf").read_bytes().startswith(b"%PDF-")
            assert b"<svg" in stem.with_suffix(".svg").read_bytes()
            assert stem.with_suffix(".png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        else:
            assert stem.with_suffix(".csv").is_file()


def test_figures_are_the_same_bytes_every_time(
    run: RunDirectory, exported: tuple[Path, list[Exhibit]], tmp_path: Path
) -> None:
    export_exhibits(tmp_path, [exhibit for exhibit in training_exhibits(run.store) if exhibit.name == "learning"])
    again = list((tmp_path / "figures").iterdir())
    assert len(again) == 5
    for file in again:
        assert file.read_bytes() == (exported[0] / "figures" / file.name).read_bytes(), file


def test_tables_count_what_became_of_seeds_and_how_kept_ones_interact(run: RunDirectory) -> None:
    rows = next(exhibit.rows for exhibit in training_exhibits(run.store) if exhibit.name == BLUEPRINTS.name)
    contributions = [0.01 * network + 0.001 * number for network in range(1, NETWORKS + 1) for number in range(1, 5)]
    ((*counts, contribution),) = (row.values() for row in rows)
    assert counts == ["norm", 4 * NETWORKS, 1, 0]
    assert contribution == pytest.approx(sum(contributions) / len(contributions))
    rows = next(exhibit.rows for exhibit in training_exhibits(run.store) if exhibit.name == PROBE_INTERACTIONS.name)
    ((*pair, networks, mean, least, most),) = (row.values() for row in rows)
    assert (pair, networks) == (["norm norm", "layer1 norm"], 2), "over networks that kept both modules"
    assert (mean, least, most) == pytest.approx((-0.25, -0.3, -0.2))


def test_tables_of_a_grown_model_say_why_a_seed_was_pruned(tmp_path: Path) -> None:
    place: dict[str, int] = {"iteration": 1, "episode": 1, "environment": 0, "slot": 0}
    with RunStore.create(tmp_path / "run.db") as store:
        store.set_metadata({"command": "grow", "slots": ["u2"], "blueprints": ["mlp"]})
        names: dict[str, Any] = {"before": "dormant", "after": "germinated", "blueprint": "mlp", "reason": "no_gate"}
        store.emit(LifecycleTransition(**place, step=0, cause="germinate", **names))
        figures = {"contribution": 0.016, "error": 0.004, "price": 0.001, "threshold": 0.021}
        names |= {"before": "holding", "after": "pruned"}
        store.emit(LifecycleTransition(**place, step=0, cause="prune", **names, **figures))
        known: dict[str, Any] = {"loss": 0.5, "metric": 0.5, "objective": 0.5, "added": 0.1, "contributions": (0.016,)}
        known |= {"stages": ("pruned",), "blueprints": (None,), "alphas": (0.0,), "slot": 0, "blueprint": "mlp"}
        store.emit(StepTaken(iteration=1, episode=1, environment=0, step=0, op="prune", **known))
    rows = {exhibit.name: exhibit.rows for exhibit in run_queries(tmp_path / "run.db", grown_exhibits({}))}
    (seed,), (decision,) = rows["seeds"], rows["decisions"]
    assert {name: seed[name] for name in figures} == figures
    assert "u2 holding to pruned: contribution +0.016, minimum +0.021" in str(decision["changes"])
    assert (decision["op"], decision["slot_name"], decision["blueprint"]) == ("prune", "u2", "mlp")
