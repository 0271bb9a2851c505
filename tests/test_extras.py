"""Whoever lacks an optional part is told in one sentence how to install it, from where this Esper came."""

import importlib
import json
import sys
import tomllib
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from esper import extras
from esper.errors import ConfigError, ExportError

DEVELOPERS = {"dev", "docs", "oracles"}
EXTRAS = sorted(extras.EXTRAS)
ORIGINS: dict[str, tuple[dict[str, Any], str]] = {
    "checkout": ({"url": "file:///a%20b/esper", "dir_info": {"editable": True}}, "-e '/a b/esper[{}]'"),
    "folder": ({"url": "file:///esper", "dir_info": {}}, "'/esper[{}]'"),
    "file": ({"url": "file:///e.whl", "archive_info": {}}, "'esper-growth[{}] @ file:///e.whl'"),
    "git": ({"url": "https://e.org/e", "vcs_info": {"vcs": "git"}}, "'esper-growth[{}] @ git+https://e.org/e'"),
    "index": ({}, "'esper-growth[{}]'"),
}


class Installed(Distribution):
    """An Esper that was installed from ``origin``."""

    def __init__(self, origin: dict[str, Any]) -> None:
        self._origin = origin

    def read_text(self, filename: str) -> str | None:
        return json.dumps(self._origin) if self._origin and filename == "direct_url.json" else None

    def locate_file(self, path: Any) -> Any:
        raise AssertionError(path)


def test_each_extra_lists_a_module_for_each_of_its_packages() -> None:
    pyproject = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    declared: dict[str, list[str]] = pyproject["project"]["optional-dependencies"]
    counts = {
        extra: sum(not package.startswith(extras.DISTRIBUTION) for package in packages)
        for extra, packages in declared.items()
        if extra not in DEVELOPERS
    }
    assert {extra: len(modules) for extra, modules in extras.EXTRAS.items()} == counts


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize(("origin", "arguments"), ORIGINS.values(), ids=ORIGINS)
def test_an_extra_comes_from_where_esper_came(extra: str, origin: dict[str, Any], arguments: str) -> None:
    assert extras.build_install_command(Installed(origin), extra) == f"pip install {arguments.format(extra)}"


@pytest.mark.parametrize("extra", EXTRAS)
def test_of_a_checkout_that_is_not_installed_too(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Distribution:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(extras, "distribution", missing)
    with pytest.raises(ExportError) as caught:
        extras.require_extra(extra, "this", "json", "no_such", error=ExportError)
    assert str(caught.value) == f"this needs no_such: pip install -e '.[{extra}]' in Esper's folder"


def test_what_is_there_is_not_asked_for() -> None:
    extras.require_extra("ui", "this", "json", "sys")


@pytest.mark.parametrize(
    ("module", "library", "extra"), [("lightning", "lightning", "lightning"), ("transformers", "transformers", "hf")]
)
def test_an_integration_without_its_library_is_one_sentence(
    module: str, library: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(sys.modules):
        if name.split(".")[0] == library or name.startswith(f"esper.integrations.{module}"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=rf"^esper\.integrations\.{module} needs {library}.*\[{extra}\]"):
        importlib.import_module(f"esper.integrations.{module}")
