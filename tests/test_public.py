"""What is public can be imported and teaches itself, and its types are in the wheel."""

import dataclasses
import importlib
import inspect
import pydoc
import re
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


def _is_record(found: object) -> bool:
    """Whether its arguments are its fields, which the reference shows with what stands below each."""
    return dataclasses.is_dataclass(found) or (isinstance(found, type) and issubclass(found, tuple))


@pytest.mark.parametrize("name", [name for name in esper.__all__ if not name.startswith("_")])
def test_help_names_every_argument(name: str) -> None:
    """`help(esper.attach)` says what each argument is, in a section of its own or beside a setting."""
    found = getattr(esper, name)
    said = inspect.getdoc(found) or ""
    assert len(pydoc.plain(pydoc.render_doc(found)).splitlines()) > 5
    fields = getattr(found, "model_fields", {})
    for argument in inspect.signature(found).parameters:
        if argument in fields:
            assert fields[argument].description, argument
        elif not _is_record(found):
            assert re.search(rf"^\s*{argument}:", said, re.MULTILINE), argument


@pytest.mark.parametrize("name", ["attach", "Grower", "Validation"])
def test_help_teaches_by_an_example(name: str) -> None:
    shown = inspect.getdoc(getattr(esper, name)) or ""
    assert "```python" in shown
    assert "Args:" in shown
    assert "Raises:" in shown


def test_types_are_shipped() -> None:
    assert (Path(esper.__file__).parent / "py.typed").is_file()
