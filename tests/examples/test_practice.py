"""`examples/grow.py` and `look.py`: what they print, and what they leave."""

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch
from zoo.data import load
from zoo.hosts import HOSTS
from zoo.training import measure

import esper
from esper.cli import main
from esper.dash.pages import describe_model
from esper.errors import EsperError
from esper.lab.figures.exhibit import run_queries
from esper.lab.figures.grown import grown_exhibits
from esper.runs.reader import RunReader
from esper.runs.run_directory import RunDirectory

pytestmark = pytest.mark.landing

EXAMPLES = Path(__file__).parents[2] / "examples"
Capture = pytest.CaptureFixture[str]


def run(name: str, **options: Any) -> None:
    importlib.import_module(name).main(**options)


def test_a_host_grows_and_leaves_a_run_that_all_views_read(tmp_path: Path, capsys: Capture) -> None:
    path, weights = tmp_path / "run", tmp_path / "net.pt2"
    run("grow", task="digits", host="mlp", controller="heuristic", epochs=3, run_dir=path, export=weights)
    lines = capsys.readouterr().out.splitlines()
    epochs = [line.split(":")[0] for line in lines if line.startswith("epoch")]
    assert epochs == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
    accuracy = re.search(r"accuracy without growth 0\.\d+, with growth (0\.\d+)", "\n".join(lines))
    assert weights.is_file()

    # What was saved is what was measured
    splits = load("digits")
    inputs = next(splits.train.in_order(2)).inputs
    host = HOSTS["mlp"].build(tuple(inputs.shape[1:]), splits.classes, torch.Generator().manual_seed(9))
    model = esper.load(path / "model", host, inputs)
    assert f"{measure(model, splits.test).accuracy:.3f}" == accuracy[1]

    # What the end of growth made of unfinished seeds is in every view
    ended = re.findall(r"(?m)^(kept|pruned) (\w+) in (\w+) at decision 3 by finish", "\n".join(lines))
    assert ended
    stages = {slot: {"kept": "fossilized", "pruned": "pruned"}[verb] for verb, _, slot in ended}
    store = RunDirectory(path).store
    with RunReader.open(store) as reader:
        answer, metadata = describe_model(reader), reader.metadata()
    assert answer["ending"]["step"] == len(answer["decisions"]) == 3
    after = dict(zip(metadata["slots"], answer["ending"]["stages"], strict=True))
    assert {slot: after[slot] for slot in stages} == stages
    exhibits = {exhibit.name: exhibit.rows for exhibit in run_queries(store, grown_exhibits(metadata))}
    lanes = {row["slot_name"]: row["stage"] for row in exhibits["stages"]}
    assert {slot: lanes[slot] for slot in stages} == stages
    assert all(f"to {stage} (finish)" in exhibits["decisions"][-1]["changes"] for stage in stages.values())
    assert main(["report", str(path)]) == 0


def test_seeds_are_judged_by_forks(capsys: Capture) -> None:
    run("grow", task="digits", host="mlp", controller="all_at_start", epochs=6, evidence="refit")
    assert "germinate" in capsys.readouterr().out


def test_a_mistake_is_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "grow.py"), "--task", "digitz"]
    result = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr == (
        "error: no task is called 'digitz': choose from digits, mnist1d, fashion-mnist, cifar10, charlm\n"
    )
    for name, options, sentence in (
        ("grow", {"host": "gpt"}, "'gpt' cannot read task 'digits'"),
        ("grow", {"controller": "heuristik"}, "did you mean 'heuristic'?"),
    ):
        with pytest.raises(EsperError, match=re.escape(sentence)):
            run(name, **options)


@pytest.mark.parametrize("name", ["grow", "look"])
def test_the_pages_give_options_that_exist(name: str) -> None:
    pages = [EXAMPLES.parent / "README.md", *(EXAMPLES.parent / "docs").rglob("*.md")]
    lines = [line for page in pages for line in re.findall(rf"examples/{name}\.py (.*)", page.read_text())]
    options = {option for line in lines for option in re.findall(r"--([a-z-]+)", line.partition("#")[0])}
    taken = inspect.signature(importlib.import_module(name).main).parameters
    assert options
    assert {option.replace("-", "_") for option in options} <= set(taken)


def test_looking_prints_a_table_and_draws_a_map(tmp_path: Path, capsys: Capture) -> None:
    path, losses = tmp_path / "map.svg", list[float]()
    for after in (0, 2):
        run("look", task="digits", host="mlp", after=after, examples=64, draws=1, layers=True, svg=path)
        printed = capsys.readouterr().out
        found = re.search(r"64 examples, mean loss ([\d.]+)", printed)
        losses.append(float(found[1]))
        assert "Linear" in printed
    assert losses[1] < losses[0]
    assert "mlp" in "".join(ET.parse(path).getroot().itertext())
