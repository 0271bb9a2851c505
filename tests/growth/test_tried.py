"""What was tried and why reads as a sentence, and as a table."""

import pytest
import torch

from esper.growth.attach import attach
from esper.growth.blueprints.registry import get
from esper.growth.model import GrowingModel
from esper.growth.summary import SlotState, TriedModule, count_tried
from esper.lifecycle.table import SeedRating
from factories import mlp


def rate(contribution, error, price, threshold, gain=None, gain_error=None, least_gain=None, note=""):
    return SeedRating(contribution, error, price, threshold, gain, gain_error, least_gain, note)


TRIED = (
    TriedModule("0", "mlp", 1280, 4, 9, False, "look", rate(0.016, 0.0041, 0.0, 0.0, 0.012, 0.02, 0.03)),
    TriedModule("2", "norm", 1, 10, 12, True, "heuristic", rate(0.5, None, 0.1, 0.12)),
    TriedModule("2", "mlp", 36, 13, 14, False, "governor"),
    TriedModule("4", "mlp", 36, 14, 16, False, "finish", rate(None, None, 0.1, 0.1, note="had no effect yet")),
    TriedModule("0", "norm", 36, 15),
)
SENTENCES = (
    "pruned mlp in 0 at decision 9 by look: contribution +0.016 ± 0.0041, rent 0, minimum 0; "
    "loss 1.20% ± 2.00% higher without it, minimum 3.00% (planted at decision 4, 1,280 parameters)",
    "kept norm in 2 at decision 12 by heuristic: contribution +0.5, rent 0.1, minimum +0.12 "
    "(planted at decision 10, 1 parameter)",
    "pruned mlp in 2 at decision 14 by governor (planted at decision 13, 36 parameters)",
    "pruned mlp in 4 at decision 16 by finish: had no effect yet (planted at decision 14, 36 parameters)",
    "on probation norm in 0 (planted at decision 15, 36 parameters)",
)


@pytest.mark.parametrize(("module", "sentence"), zip(TRIED, SENTENCES, strict=True))
def test_a_module_reads_as_a_sentence(module: TriedModule, sentence: str) -> None:
    assert str(module) == sentence


@pytest.mark.parametrize(
    ("rating", "text"),
    [
        (rate(-0.016, None, 0.0, None), "contribution -0.016, rent 0"),
        (rate(0.0, None, 0.25, 0.25), "contribution 0, rent 0.25, minimum +0.25"),
        (rate(0.1, None, 0.0, 0.0, note="so"), "contribution +0.1, rent 0, minimum 0; so"),
        (
            rate(0.1, 0.02, 0.0, 0.0, -0.005, None, 0.0),
            "contribution +0.1 ± 0.02, rent 0, minimum 0; loss 0.50% lower without it, minimum 0.00%",
        ),
        (rate(0.1, 0.02, 0.0, 0.0, 0.005, 0.01, None), "contribution +0.1 ± 0.02, rent 0, minimum 0"),
        (rate(None, None, 0.0, 0.02), "contribution not measured"),
    ],
)
def test_figures_that_are_not_known_are_left_out(rating: SeedRating, text: str) -> None:
    assert str(rating) == text


def test_the_count_leaves_out_what_is_not_settled() -> None:
    assert count_tried(TRIED) == "5 modules tried, 1 kept, 1 on probation"
    assert count_tried(TRIED[:1]) == "1 module tried, 0 kept"


def test_a_summary_lists_what_was_tried() -> None:
    model = attach(mlp(), {"0": ["norm", "mlp"]}, torch.zeros(2, 7))
    assert "tried" not in str(model.summary())
    model.tried = TRIED
    lines = str(model.summary()).splitlines()
    start = lines.index("5 modules tried, 1 kept, 1 on probation")
    names = "slot blueprint outcome by planted decided parameters"
    figures = "contribution error rent minimum loss without it loss error loss minimum"
    assert lines[start + 1].split() == f"{names} {figures}".split()
    assert [line.split() for line in lines[start + 2 :]] == [
        ["0", "mlp", "pruned", "look", "4", "9", "1,280", "+0.016", "0.0041", "0", "0", "+1.20%", "2.00%", "3.00%"],
        ["2", "norm", "kept", "heuristic", "10", "12", "1", "+0.5", "-", "0.1", "+0.12", *"---"],
        ["2", "mlp", "pruned", "governor", "13", "14", "36", *"-------"],
        ["4", "mlp", "pruned", "finish", "14", "16", "36", "-", "-", "0.1", "+0.1", *"---"],
        ["0", "norm", "on", "probation", "-", "15", "-", "36", *"-------"],
    ]


# The tables of what has grown and of what could.


def model() -> GrowingModel:
    growing = attach(mlp(), {"0": ["norm", "mlp"], "2": ["lowrank"], "4": "auto"}, torch.zeros(2, 7))
    growing.slots["0"].germinate("mlp", torch.Generator().manual_seed(0), alpha=0.5)
    growing.slots["2"].germinate("lowrank", torch.Generator().manual_seed(0), alpha=1.0)
    growing.slots["2"].fossilize()
    growing.slots["4"].enabled = False
    return growing


def test_a_summary_counts_what_is_there() -> None:
    growing = model()
    table = growing.summary()
    assert [one.slot for one in table.slots] == ["0", "2", "4"]
    assert [one.stage for one in table.slots] == [SlotState.LIVE, SlotState.FOSSILIZED, SlotState.DISABLED]
    assert [one.blueprint for one in table.slots] == ["mlp", "lowrank", None]
    assert [one.alpha for one in table.slots] == [0.5, 1.0, None]
    assert table.parameters + table.host_parameters == sum(one.numel() for one in growing.parameters())
    site = growing.slots["0"].site
    assert table.slots[0].flops == get("mlp").cost_at(site).flops
    assert table.flops == table.slots[0].flops + table.slots[1].flops
    growing.slots["4"].enabled = True
    assert growing.summary().slots[2].stage is SlotState.DORMANT


def test_it_prints_as_a_table() -> None:
    growing = model()
    growing.slots["2"].seed.contribution = 0.125
    lines = str(growing.summary()).splitlines()
    assert lines[0].split()[0] == "slot"
    assert lines[2].split() == ["2", "features", "9", "fossilized", "lowrank", "36", "72", "1.00", "+0.1250"]
    assert lines[3].split() == ["4", "features", "5", "disabled", "-", "0", "0", "-", "-"]
    assert lines[4].startswith("total")
    assert lines[5].startswith(f"host: {growing.host_parameters:,} parameters")
    starts = {line.index(word) for line, word in zip(lines, ["layout", *["features"] * 3], strict=False)}
    assert len(starts) == 1


def test_a_preview_is_what_germinating_then_adds() -> None:
    growing = attach(mlp(), {"0": ["norm", "mlp"], "2": ["lowrank"], "4": "auto"}, torch.zeros(2, 7))
    growing.slots["4"].enabled = False
    offers = growing.preview().offers
    assert [(one.slot, one.blueprint) for one in offers] == [("0", "norm"), ("0", "mlp"), ("2", "lowrank")]
    for one in offers:
        seed = growing.slots[one.slot].germinate(one.blueprint)
        assert one.parameters == sum(parameter.numel() for parameter in seed.parameters())
        assert one.flops == growing.summary().flops
        assert one not in growing.preview().offers
        growing.slots[one.slot].prune()
    assert "lowrank" in str(growing.preview())
