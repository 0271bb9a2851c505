"""The examples run, grow something, and end with both scores."""

import importlib
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.landing

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDED = {"lightning_trainer": "lightning", "hugging_face_trainer": "transformers", "deeper_gpt": "transformers"}
DEEPER = ["deeper_gpt"]
LADDERS = ["ladder_gpt", "ladder_vit"]
SCORES = re.compile(r"accuracy without growth ([01]\.\d+), with growth ([01]\.\d+)")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain_loop", "own_blueprint", "lightning_trainer", "hugging_face_trainer", *DEEPER])
def test_an_example_grows_and_tells_the_scores(name: str, tmp_path: Path):
    if name in NEEDED and importlib.util.find_spec(NEEDED[name]) is None:
        pytest.skip(f"needs {NEEDED[name]}")
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    assert "live" in result.stdout or "fossilized" in result.stdout
    scores = SCORES.search(result.stdout)
    assert float(scores[2]) > 1 / 10


@pytest.mark.slow
@pytest.mark.parametrize("name", LADDERS)
def test_an_example_makes_three_sizes(name: str, tmp_path: Path):
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers")
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    result = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert result.returncode == 0, result.stderr
    assert "3 sizes from one training" in result.stdout
    accuracies = re.findall(r"test loss [\d.]+, accuracy ([01]\.\d+)", result.stdout)
    assert len(accuracies) == 3
    assert all(float(accuracy) > 0.6 for accuracy in accuracies)


@pytest.mark.slow
def test_a_suite_of_ones_own_is_played(tmp_path: Path):
    suite = f"{EXAMPLES}/own_suite.py:rings"
    words = ["evaluate", "--controller", "look", "--suite", suite, "--instances", "8", "--json"]
    command = [sys.executable, "-m", "esper", *words]
    result = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    scores = json.loads(result.stdout.splitlines()[-1])
    assert scores["all_at_start"]["score"] > scores["none"]["score"] > 1 / 3


@pytest.mark.slow
@pytest.mark.parametrize("words", [["numbered_actions.py"], ["sb3.py", "--steps", "960"]])
def test_other_learners_control_growth(words: list[str], tmp_path: Path):
    if "sb3.py" in words and importlib.util.find_spec("sb3_contrib") is None:
        pytest.skip("needs sb3-contrib")
    command = [sys.executable, str(EXAMPLES / words[0]), *words[1:]]
    result = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert re.search(r"J of|J on", result.stdout)


@pytest.mark.slow
def test_settings_are_searched(tmp_path: Path):
    if importlib.util.find_spec("optuna") is None:
        pytest.skip("needs optuna")
    command = [sys.executable, str(EXAMPLES / "search_settings.py"), "--trials", "3"]
    result = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    found = re.search(r"test accuracy ([01]\.\d+)", result.stdout)
    assert float(found[1]) > 1 / 10


def test_the_sweep_at_weights_and_biases_has_the_same_space(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module("search_settings")
    told = example.sweep_configuration()["parameters"]
    assert {name: (one["min"], one["max"]) for name, one in told.items()} == example.SPACE
    assert set(told) <= set(inspect.signature(example.grown).parameters)


def test_every_example_is_run():
    elsewhere = {"grow", "look", *LADDERS}  # the first two in test_practice.py
    shared = {"counting", "digits", "own_suite", "search_settings", "numbered_actions", "sb3", *elsewhere}
    named = set(test_an_example_grows_and_tells_the_scores.pytestmark[0].args[1])
    assert {path.stem for path in EXAMPLES.glob("*.py")} - shared == named
