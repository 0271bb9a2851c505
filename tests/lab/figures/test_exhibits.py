"""Every figure and table shows what its query gives, and says so where there is nothing to show."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from esper.lab.figures.exhibit import Exhibit, Figure, Rows, run_queries
from esper.lab.figures.export import Exported, export
from esper.lab.figures.growing import GROWING_EXHIBITS
from esper.lab.figures.grown import grown_exhibits
from esper.lab.figures.learning import LEARNING_EXHIBITS
from esper.runs.reader import RunReader
from esper.runs.run_directory import RunDirectory
from lab.figures_cases import NETWORKS, grown, trained

SHOWN = (*LEARNING_EXHIBITS, *GROWING_EXHIBITS)


def training_exhibits(store: Path) -> list[Exhibit]:
    return run_queries(store, SHOWN)


def numbers_of(store: Path, name: str) -> Rows:
    return next(rows for what, rows in training_exhibits(store) if what.name == name)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return trained(tmp_path_factory.mktemp("trained") / "run")


@pytest.fixture(scope="module")
def exported(run: RunDirectory, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Exported]:
    """A folder with all that there is of the run, and what was written there."""
    folder = tmp_path_factory.mktemp("exported")
    return folder, export(folder, training_exhibits(run.store))


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


def test_the_query_beside_a_file_gives_its_numbers_again(run: RunDirectory, exported: tuple[Path, Exported]) -> None:
    assert_queries_give_the_numbers(exported[0], run.store, 11)


def test_so_it_does_of_a_grown_model(tmp_path: Path) -> None:
    run = grown(tmp_path / "run")
    done = export(tmp_path / "out", grown_exhibits(run.store, {}, None))
    assert (done.figures, done.tables) == (4, 2)
    assert_queries_give_the_numbers(tmp_path / "out", run.store, 5)


def test_every_figure_and_table_has_all_its_files(exported: tuple[Path, Exported]) -> None:
    folder, done = exported
    assert (done.figures, done.tables, done.absent) == (8, 3, ())
    for what in SHOWN:
        stem = folder / what.folder / what.name
        if isinstance(what, Figure):
            assert stem.with_suffix(".pdf").read_bytes().startswith(b"%PDF-")
            assert b"<svg" in stem.with_suffix(".svg").read_bytes()
            assert stem.with_suffix(".png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        else:
            assert stem.with_suffix(".tex").is_file()


def test_figures_are_the_same_bytes_every_time(
    run: RunDirectory, exported: tuple[Path, Exported], tmp_path: Path
) -> None:
    export(tmp_path, [pair for pair in training_exhibits(run.store) if pair[0].name == "learning"])
    again = list((tmp_path / "figures").iterdir())
    assert len(again) == 5
    for file in again:
        assert file.read_bytes() == (exported[0] / "figures" / file.name).read_bytes(), file


def test_a_run_without_decisions_leaves_their_figure_out_and_says_why(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", steps=False)
    without = training_exhibits(run.store)
    assert [what.name for what, rows in without if not rows] == ["rewards"]
    done = export(tmp_path / "out", [pair for pair in without if pair[0].name == "rewards"])
    assert (done.figures, done.tables) == (0, 0)
    assert "telemetry.steps_every" in done.absent[0]
    assert not (tmp_path / "out").exists()


def test_rewards_are_means_over_networks(run: RunDirectory) -> None:
    rows = numbers_of(run.store, "rewards")
    assert rows.by("term")["objective"].numbers("paid_per_episode") == pytest.approx([0.25] * 4)
    assert rows.by("term")["rent"].numbers("paid_per_episode") == pytest.approx([-0.05] * 4)


def test_contributions_are_quantiles_of_kept_seeds(run: RunDirectory) -> None:
    (row,) = numbers_of(run.store, "contributions").values
    # Of 12 values .011 .012 .013 .014, .021 ... .034, by nearest rank: the 2nd, 3rd, 6th, 9th and 11th.
    assert row[:3] == ("norm", "norm", 4 * NETWORKS)
    assert row[3:] == pytest.approx((0.012, 0.013, 0.022, 0.031, 0.033))


def test_only_the_last_quarter_is_in_the_figure_of_growth(run: RunDirectory) -> None:
    assert len(numbers_of(run.store, "growth")) == NETWORKS


def test_families_count_what_was_kept(run: RunDirectory) -> None:
    (row,) = numbers_of(run.store, "families").values
    assert row == pytest.approx(("order", 12, 0.5, 0.5, 0.6, 0.3, 1.0))


def test_names_with_signs_of_mathematics_are_drawn(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", name=r"a_$x^{\bad", family="$$")
    named = {"learning", "seeds", "contributions", "growth"}
    exhibits = [pair for pair in training_exhibits(run.store) if pair[0].name in named]
    assert export(tmp_path / "out", exhibits).figures == len(named)


def test_names_are_unique() -> None:
    names = [(isinstance(what, Figure), what.name) for what in SHOWN]
    assert len(set(names)) == len(names)
