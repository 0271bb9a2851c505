"""What is public can be imported and teaches itself, and its types are in the wheel."""

from __future__ import annotations

import importlib
import inspect
import pydoc
from pathlib import Path

import pytest

import esper

MODULES = ("esper", "esper.rl", "esper.errors", "esper.growth.blueprints")


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_there_once_and_listed(module: str) -> None:
    found = importlib.import_module(module)
    assert len(set(found.__all__)) == len(found.__all__)
    assert set(found.__all__) <= set(dir(found))
    for name in found.__all__:
        assert getattr(found, name) is not None


def test_a_name_that_is_not_public_is_no_attribute() -> None:
    for module in ("esper", "esper.rl"):
        with pytest.raises(AttributeError, match="has no attribute 'atach'"):
            _ = importlib.import_module(module).atach


@pytest.mark.parametrize("name", [name for name in esper.__all__ if not name.startswith("_")])
def test_help_names_every_argument(name: str) -> None:
    """`help(esper.attach)` says what each argument is, in a section of its own or beside a setting."""
    found = getattr(esper, name)
    shown = pydoc.plain(pydoc.render_doc(found))
    assert len(shown.splitlines()) > 5
    for argument in inspect.signature(found).parameters:
        assert f"{argument}" in shown


@pytest.mark.parametrize("name", ["attach", "Grower", "Validation"])
def test_help_teaches_by_an_example(name: str) -> None:
    shown = inspect.getdoc(getattr(esper, name)) or ""
    assert "```python" in shown
    assert "Args:" in shown
    assert "Raises:" in shown


def test_types_are_shipped() -> None:
    assert (Path(esper.__file__).parent / "py.typed").is_file()
