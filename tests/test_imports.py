"""The core works without any optional extra."""

import subprocess
import sys

EXTRAS = (
    "datasets",
    "lightning",
    "mlflow",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "ray",
    "sb3_contrib",
    "stable_baselines3",
    "starlette",
    "tensorboardX",
    "tensordict",
    "textual",
    "torchrl",
    "torchvision",
    "transformers",
    "uvicorn",
    "wandb",
)

NEEDS_AN_EXTRA = (
    "esper.experiments.ray_workers",
    "esper.integrations.lightning",
    "esper.integrations.sb3",
    "esper.integrations.transformers",
    "esper.telemetry.bridges.mlflow",
    "esper.telemetry.bridges.tensorboard",
    "esper.telemetry.bridges.wandb",
    "esper.ui.dash",
    "esper.ui.watch",
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


def test_every_module_imports_without_the_extras():
    result = subprocess.run([sys.executable, "-c", IMPORT_EVERYTHING], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert {"esper.cli", "esper.config", "esper.telemetry.store"} <= set(result.stdout.split())
