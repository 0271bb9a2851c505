"""Every defect that `tools/mutations.py` puts back can still be put back; the tool itself runs the tests."""

import ast
import shutil
from pathlib import Path

import pytest

from tools.mutations import CHECK, MUTATIONS, ROOT, SOURCE, Mutation, apply, find_catchers, main, read_lineage

IDS = [f"{number} {mutation.row}".strip() for number, mutation in enumerate(MUTATIONS, start=1)]


def copy_file(mutation: Mutation, folder: Path) -> Path:
    copy = folder / mutation.file
    copy.parent.mkdir(parents=True)
    shutil.copy(SOURCE / mutation.file, copy)
    return copy


@pytest.mark.parametrize("mutation", MUTATIONS, ids=IDS)
def test_a_defect_applies_to_the_source_and_makes_another_program(mutation: Mutation, tmp_path: Path) -> None:
    copy = copy_file(mutation, tmp_path)
    before = ast.dump(ast.parse(copy.read_text()))
    apply(mutation, tmp_path)
    assert ast.dump(ast.parse(copy.read_text())) != before


@pytest.mark.parametrize("passage", ["no such passage", "import"])
def test_a_passage_that_is_not_there_once_is_refused(passage: str, tmp_path: Path) -> None:
    mutation = Mutation("", "engine/engine.py", passage, "")
    copy_file(mutation, tmp_path)
    with pytest.raises(ValueError, match=r"engine/engine.py has .* times, not once"):
        apply(mutation, tmp_path)


def test_every_row_of_the_lineage_has_a_defect_and_every_other_defect_a_room() -> None:
    assert {mutation.row for mutation in MUTATIONS} - {""} == read_lineage().keys()
    for mutation in MUTATIONS:
        assert bool(mutation.row) != bool(mutation.rooms)
        assert all((ROOT / "tests" / room).is_dir() for room in mutation.rooms.split())


@pytest.mark.landing
def test_a_defect_is_caught_by_a_test_that_fails_and_by_no_other() -> None:
    mutation = next(one for one in MUTATIONS if one.row == "D33")
    named = ["tests/rl/test_diagnostics.py::test_no_more_updates_are_remembered_than_the_bound"]
    assert find_catchers(mutation, named)[0] == ["no_more_updates_are_remembered_than_the_bound"]
    harmless = Mutation("", "rl/diagnostics.py", '"""A sentence for a person."""', '"""A sentence."""', "D33")
    assert find_catchers(harmless, named)[0] == []


@pytest.mark.landing
def test_a_defect_that_lint_refuses_is_caught_by_lint() -> None:
    mutation = next(one for one in MUTATIONS if one.row == "D36")
    assert find_catchers(mutation, [CHECK])[0] == ["ruff", "lint-imports"]


def test_what_is_no_row_and_no_number_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["D41"])
    assert (
        "there is no D41: give a row of docs/architecture/lineage.md, such as D4, or a number, 1 to"
        in capsys.readouterr().err
    )
