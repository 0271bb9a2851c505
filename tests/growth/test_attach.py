"""Errors of `esper.attach`, with advice."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from esper.errors import SlotError, UnknownBlueprintError
from esper.growth import slot
from esper.growth.attach import Places, attach


def network() -> nn.Module:
    blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return nn.ModuleDict({"blocks": blocks})["blocks"]


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({}, "no slots: name the submodules"),
        ("2", r"^slots is a str, '2': give a list of submodules' names, such as \['layer2'\], or a mapping from names"),
        (["2"], r"no submodule '2'"),
        (["re:block9"], r"no submodule's whole name matches 're:block9'; print\(model\) shows the names"),
        (["re:("], "'re:\\(' is no regular expression"),
        (["0", "re:."], "'re:.' matches submodule '0', which an earlier slot has already"),
        ({"0": "mlp"}, "the blueprints of slot '0' are 'mlp': give a list of names, or 'auto'"),
        ({"0": []}, r"no blueprint was named for the features \(4,\) at slot '0'; those that do are .*mlp"),
        ({"0": ["conv3x3"]}, r"'conv3x3' does not support the features \(4,\) at slot '0'; those that do are .*mlp"),
    ],
)
def test_places_that_make_no_sense(places: Places, message: str) -> None:
    with pytest.raises(SlotError, match=message):
        attach(network(), places, torch.zeros(2, 4))


def test_a_pattern_stands_for_whole_names() -> None:

    def nested() -> nn.Module:
        return nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))

    assert list(attach(nested(), [r"re:\d"], torch.zeros(2, 4)).slots) == ["0", "1"]
    assert list(attach(nested(), [r"re:0\..*"], torch.zeros(2, 4)).slots) == ["0.0", "0.1"]
    with pytest.raises(SlotError, match=r"whole name matches .*; part of '0\.1' does: '\.\*' stands for the rest"):
        attach(nested(), [r"re:\.1"], torch.zeros(2, 4))


def test_blueprints_nobody_registered() -> None:
    with pytest.raises(UnknownBlueprintError, match="unknown blueprint 'mlq'; did you mean 'mlp'"):
        attach(network(), {"0": ["mlq"]}, torch.zeros(2, 4))


def test_a_slot_at_which_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot, "for_site", lambda site: ())
    with pytest.raises(SlotError, match=r"no blueprint supports the features \(4,\) at slot '0'; register one of your"):
        attach(network(), {"0": "auto"}, torch.zeros(2, 4))


def test_an_example_without_a_tensor() -> None:
    with pytest.raises(SlotError, match="the example input holds no tensor"):
        attach(network(), ["0"], ())


def test_a_failed_attachment_leaves_no_hook() -> None:
    host = network()
    with pytest.raises(SlotError):
        attach(host, {"0": "auto", "1": ["conv3x3"]}, torch.zeros(2, 4))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in host.modules())
