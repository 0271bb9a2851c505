"""The core works without any optional extra, and any module may be imported first."""

import graphlib
import subprocess
import sys

import grimp
import pytest

EXTRAS = (
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
        if name.partition(".")[0] in {EXTRAS!r}:
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
