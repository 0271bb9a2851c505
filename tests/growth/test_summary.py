"""The tables of what has grown and of what could."""

import torch

from esper.growth.attach import attach
from esper.growth.blueprints.registry import get
from esper.growth.model import GrowingModel
from esper.growth.summary import SlotState
from factories import mlp


def model() -> GrowingModel:
    growing = attach(mlp(), {"0": ["norm", "mlp"], "2": ["lowrank"], "4": "auto"}, torch.zeros(2, 7))
    growing.slots["0"].germinate("mlp", torch.Generator().manual_seed(0), alpha=0.5)
    growing.slots["2"].germinate("lowrank", torch.Generator().manual_seed(0), alpha=1.0)
    growing.slots["2"].fossilize()
    growing.disable("4")
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
    assert table.slots[0].flops == get("mlp").flops_at(site)
    assert table.flops == table.slots[0].flops + table.slots[1].flops
    growing.enable("4")
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
    growing.disable("4")
    offers = growing.preview().offers
    assert [(one.slot, one.blueprint) for one in offers] == [("0", "norm"), ("0", "mlp"), ("2", "lowrank")]
    for one in offers:
        seed = growing.slots[one.slot].germinate(one.blueprint)
        assert one.parameters == sum(parameter.numel() for parameter in seed.parameters())
        assert one.flops == growing.summary().flops
        assert one not in growing.preview().offers
        growing.slots[one.slot].prune()
    assert "lowrank" in str(growing.preview())
