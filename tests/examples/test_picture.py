"""The picture of a growing network: redrawn on a terminal, printed with each change elsewhere."""

import io

import pytest
import torch
from rich.console import Console
from zoo.data import load
from zoo.picture import WIDTH, GrowthPicture, draw_curves, draw_network
from zoo.training import build_model

from esper.growth.site import Layout
from esper.growth.summary import SlotState, SlotSummary

pytestmark = pytest.mark.landing


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
        "  bb ╌╌ lowrank, 96 parameters: on trial, 50% blended in, accuracy +0.012 by it",
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
    assert lines.index("epoch 3") < next(number for number, line in enumerate(lines) if "on trial" in line)


def test_on_a_terminal_one_picture_is_redrawn_and_lines_are_about_decisions_that_act():
    output = show(Console(file=io.StringIO(), width=80, force_terminal=True))
    assert "epoch 3" in output
    assert "epoch 1" not in output
    assert output.count("input") >= 4  # before the first epoch, and after each
    assert "on trial" in output.rpartition("input")[2]
