"""The core needs no extra; whatever needs one says in a sentence how to install it, from where this Esper came."""

import graphlib
import importlib
import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from typing import Any

import grimp
import pytest

from esper import extras
from esper.cli import COMMANDS
from esper.errors import ConfigError, ExportError
from esper.grower import config

DEVELOPERS = {"dev", "docs", "oracles"}
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
    packages = {
        extra: [re.match(r"[\w-]+", line)[0] for line in lines if not line.startswith(extras.DISTRIBUTION)]
        for extra, lines in pyproject["project"]["optional-dependencies"].items()
        if extra not in DEVELOPERS
    }
    assert {extra: len(modules) for extra, modules in extras.EXTRAS.items()} == {
        extra: len(names) for extra, names in packages.items()
    }
    called = {"sklearn": "scikit-learn", "yaml": "pyyaml"}
    assert {*packages["train"]} == {called.get(name, name) for name in extras.EXTRAS["train"]}


@pytest.mark.parametrize(("origin", "arguments"), ORIGINS.values(), ids=ORIGINS)
def test_an_extra_comes_from_where_esper_came(origin: dict[str, Any], arguments: str) -> None:
    assert extras.build_install_command(Installed(origin), "hf") == f"pip install {arguments.format('hf')}"


def test_of_a_checkout_that_is_not_installed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Distribution:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(extras, "distribution", missing)
    with pytest.raises(ExportError) as caught:
        extras.require_extra("hf", "this", "json", "no_such", error=ExportError)
    assert str(caught.value) == "this needs no_such: pip install -e '.[hf]' in Esper's folder"


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


# Growing a model of one's own needs the core alone.


WITHOUT_THE_EXTRA = f"""
import sys

for name in {extras.EXTRAS["train"]!r}:
    sys.modules[name] = None
"""

WHOLE_GROW = """
import torch
from torch import nn

import esper
from esper.grower import PrintDecisions
from esper.growth.export import export

torch.manual_seed(0)
x = torch.randn(64, 8)
y = (x[:, :2].prod(1) > 0).long()


def make_host():
    return nn.Sequential(nn.Linear(8, 3), nn.ReLU(), nn.Linear(3, 2))


model = esper.attach(make_host(), {"0": ["mlp", "lowrank"]}, example_input=x[:2])
optimizer = torch.optim.AdamW(model.parameter_groups(lr=1e-2))


def learn(model, optimizer, *_):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


validation = esper.Validation("classification", [(x, y)])
grower = esper.Grower(
    model,
    optimizer,
    evaluate=validation,
    controller="all_at_start",
    horizon=8,
    callbacks=[PrintDecisions(), esper.RunRecorder("run")],
)
for _ in range(8):
    grower.step(train_loss=[learn(model, optimizer) for _ in range(40)][-1])
grower.finish()
assert model.added_parameters, "nothing grew"
print(model.summary())
looked = model.look(lambda model, batch: nn.functional.cross_entropy(model(x), y, reduction="none"), [(x, y)])
print(looked)
looked.to_svg("map.svg")
esper.save(model, "saved.safetensors")
again = esper.load("saved.safetensors", make_host(), example_input=x[:2])
plain = model.finalize()
assert torch.equal(again.eval()(x), model.eval()(x)) and torch.allclose(plain.eval()(x), model(x), atol=1e-5)
export(plain, "grown.pt2", x[:2])
print(torch.export.load("grown.pt2").module()(x[:7]).shape)

blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)))
esper.ladder(nn.Sequential(blocks, nn.Linear(8, 2)), learn, depths=[2, 4], steps=10, folder="ladder", example_input=x)

print("done")
"""


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_EXTRA + code], cwd=folder, check=False, capture_output=True, text=True
    )


@pytest.mark.landing
def test_a_whole_grow_needs_no_extra(tmp_path: Path) -> None:
    result = run(WHOLE_GROW, tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("done\n")
    assert (tmp_path / "run" / "run.db").is_file()


@pytest.mark.landing
@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
def test_a_command_without_its_extra_is_one_sentence(command: str, tmp_path: Path) -> None:
    code = f"from esper.cli import main; raise SystemExit(main({command.split()!r}))"
    result = run(code, tmp_path)
    assert result.returncode == 2
    assert re.fullmatch(
        rf"error: `esper {command}` needs gymnasium, .*, yaml: pip install .*\[train\]'.*\n", result.stderr
    )


def test_a_learned_controller_without_the_extra_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "open_policy", lambda *_: None)
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match=r"^controller 'mine', which is the run of a training, needs yaml: pip inst"):
        config.choose_controller("mine", None, None, None, None)


@pytest.mark.landing
@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("import esper.rl", r"esper\.rl needs gymnasium"),
        ("import esper; esper.train_controller", r"esper\.train needs gymnasium, .*, yaml"),
    ],
    ids=["environment", "training"],
)
def test_training_without_its_extra_is_one_sentence(code: str, sentence: str, tmp_path: Path) -> None:
    assert re.search(rf"esper\.errors\.ConfigError: {sentence}: pip install .*\[train\]'", run(code, tmp_path).stderr)


# Any module may be imported first, and without libraries that are optional.


LIBRARIES = (
    "datasets",
    "lightning",
    "mlflow",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "optuna",
    "ray",
    "sb3_contrib",
    "stable_baselines3",
    "starlette",
    "tensorboardX",
    "tensordict",
    "torchrl",
    "torchvision",
    "transformers",
    "uvicorn",
    "wandb",
)

NEEDS_AN_EXTRA = (
    "esper.train.ray_workers",
    "esper.integrations.lightning",
    "esper.integrations.transformers",
    "esper.dash.app",
    "esper.dash.stream",
)

IMPORT_EVERYTHING = f"""
import importlib, pkgutil, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {LIBRARIES!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
import esper

def refuse(name):
    if not name.startswith({NEEDS_AN_EXTRA!r}):
        raise ImportError(name)

for module in pkgutil.walk_packages(esper.__path__, "esper.", onerror=refuse):
    if not module.name.startswith({NEEDS_AN_EXTRA!r}):
        importlib.import_module(module.name)
        print(module.name)
"""


@pytest.mark.landing
def test_every_module_imports_without_the_extras():
    result = subprocess.run([sys.executable, "-c", IMPORT_EVERYTHING], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert {"esper.cli", "esper.config.loading", "esper.runs.store"} <= set(result.stdout.split())


LATE = {"esper.train.workers": "esper.train.ray_workers"}
"""Imported within a function by the one, since it takes seconds and an extra; the other needs the one."""


def order_imports(imports: dict[str, set[str]]) -> list[str]:
    """Modules such that each follows all that it needs: what it imports, and the packages that these are in."""
    needs = dict[str, set[str]]()
    for module, imported in imports.items():
        parts = [name.split(".") for name in imported]
        packages = {".".join(names[:depth]) for names in parts for depth in range(1, len(names) + 1)}
        needs[module] = {name for name in packages if not f"{module}.".startswith(f"{name}.")}
    return list(graphlib.TopologicalSorter(needs).static_order())


def test_any_module_may_be_imported_first() -> None:
    graph = grimp.build_graph("esper", exclude_type_checking_imports=True)
    imports = {name: graph.find_modules_directly_imported_by(name) - {LATE.get(name)} for name in graph.modules}
    assert set(order_imports(imports)) == graph.modules


def test_the_first_ring_imports_no_optional_library_to_find_its_tests(loaded_to_find_tests: set[str]) -> None:
    assert loaded_to_find_tests == set(), "add the files that import these to EXTRAS of tests/conftest.py"
