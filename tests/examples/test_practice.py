"""`examples/grow.py` and `look.py`: what they print, and what they leave."""

import importlib
import inspect
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch
from rich.console import Console
from zoo.data import load
from zoo.hosts import HOSTS
from zoo.picture import WIDTH, GrowthPicture, draw_curves, draw_network
from zoo.training import build_model, measure

import esper
from esper.cli import main
from esper.dash.pages import describe_model
from esper.errors import EsperError
from esper.growth.site import Layout
from esper.growth.summary import SlotState, SlotSummary
from esper.lab.exhibit import run_queries
from esper.lab.grown_figures import grown_exhibits
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
    run("grow", task="digits", host="mlp", controller="all_at_start", epochs=6, counterfactual="refit")
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


# The picture of a growing network: redrawn on a terminal, printed with each change elsewhere.


def slot(name: str, stage: SlotState, blueprint: str | None = None, **figures: float) -> SlotSummary:
    alpha, contribution = figures.get("alpha"), figures.get("contribution")
    return SlotSummary(name, Layout.FEATURES, (8,), stage, blueprint, 96 if blueprint else 0, 0, alpha, contribution)


def test_a_slot_shows_what_grows_in_it_and_how_far_it_is():
    slots = [
        slot("a", SlotState.FOSSILIZED, "mlp"),
        slot("bb", SlotState.LIVE, "lowrank", alpha=0.5, contribution=0.0123),
        slot("c", SlotState.DORMANT),
    ]
    assert [line for line in draw_network(slots, 1000) if "│" not in line] == [
        "  input",
        "  a  ━━ mlp, 96 parameters: kept for good",
        "  bb ╌╌ lowrank, 96 parameters: on probation, 50% blended in, accuracy +0.012 by it",
        "  c  ·· free",
        "  output 1,000 parameters + 192 grown",
    ]


def test_curves_share_a_scale_and_end_with_the_last_epoch():
    assert draw_curves([], []) == []
    assert draw_curves([0.5, 1.0], [0.0, 0.5])[1:] == [
        "  accuracy with growth ▅█ 1.000",
        "        without growth ▁▅ 0.500",
    ]
    many = 3 * WIDTH + 2  # no multiple of what is shown
    _, grown, _ = draw_curves([*[0.0] * (many - 1), 1.0], [0.0] * many)
    assert grown.count("▁") < WIDTH
    assert "█ 1.000" in grown


def show(console: Console) -> str:
    """What three epochs print, before the third of which something is planted."""
    model = build_model("mlp", load("digits"), 0)
    with GrowthPicture(console, model) as picture:
        for epoch in range(1, 4):
            if epoch == 3:
                model.slots["layer1"].germinate("mlp", torch.Generator().manual_seed(0))
            picture.add_epoch(f"epoch {epoch}", acted=epoch == 3, grown=0.5, bare=0.4)
    return console.file.getvalue()


def test_without_a_terminal_every_epoch_has_a_line_and_every_change_a_picture():
    lines = show(Console(file=io.StringIO(), width=80)).splitlines()
    assert [line for line in lines if line.startswith("epoch")] == ["epoch 1", "epoch 2", "epoch 3"]
    assert sum("input" in line for line in lines) == 2
    assert lines.index("epoch 3") < next(number for number, line in enumerate(lines) if "on probation" in line)


def test_on_a_terminal_one_picture_is_redrawn_and_lines_are_about_decisions_that_act():
    output = show(Console(file=io.StringIO(), width=80, force_terminal=True))
    assert "epoch 3" in output
    assert "epoch 1" not in output
    assert output.count("input") >= 4  # before the first epoch, and after each
    assert "on probation" in output.rpartition("input")[2]
