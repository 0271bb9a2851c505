"""Suites are found by name."""

import pytest

from esper.errors import TaskError
from esper.tasks.registry import get_suite, suite_names


def test_default_suite_comes_first() -> None:
    assert suite_names()[0] == "tokens"


@pytest.mark.parametrize("name", suite_names())
def test_every_suite_knows_its_own_name(name: str) -> None:
    assert get_suite(name).name == name


def test_misspelt_suite_names_the_near_one() -> None:
    with pytest.raises(TaskError, match="did you mean 'tokens'"):
        get_suite("token")


def test_foreign_name_lists_all_suites() -> None:
    with pytest.raises(TaskError, match="choose from tokens, digits"):
        get_suite("zzz")
