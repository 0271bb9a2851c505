"""Errors of `esper.attach`, with advice."""

from collections import OrderedDict

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
        (["re:block9"], r"'re:block9' matches no whole name of a submodule; print\(model\) shows the names"),
        (["re:("], "'re:\\(' is not a valid regular expression"),
        (["0", "re:."], "'re:.' matches submodule '0', which already has a slot"),
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
    with pytest.raises(
        SlotError, match=r"matches no whole name .*; it matches part of '0\.1': add '\.\*' for the rest"
    ):
        attach(nested(), [r"re:\.1"], torch.zeros(2, 4))


class Layers(nn.Module):
    """Two layers of three projections; the second lacks one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Sequential(OrderedDict(q=nn.Linear(4, 4), k=nn.Linear(4, 4), v=nn.Linear(4, 4))),
            nn.Sequential(OrderedDict(q=nn.Linear(4, 4), k=nn.Linear(4, 4))),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_summary_says_how_many_submodules_each_pattern_matched(frozen: bool) -> None:
    if frozen:
        model = attach(Layers(), ["layers.1"], torch.zeros(2, 4), freeze_host=[r"re:.*\.(q|w)", "layers.0.k"])
    else:
        model = attach(Layers(), [r"re:.*\.(q|w)", "layers.0.k"], torch.zeros(2, 4))
    assert model.summary().matches == {r"re:.*\.(q|w)": 2}
    assert r"'re:.*\\.(q|w)' matched 2 submodules" in str(model.summary())


def test_blueprints_nobody_registered() -> None:
    with pytest.raises(UnknownBlueprintError, match="unknown blueprint 'mlq'; did you mean 'mlp'"):
        attach(network(), {"0": ["mlq"]}, torch.zeros(2, 4))


def test_a_slot_at_which_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot, "for_site", lambda site: ())
    with pytest.raises(SlotError, match=r"no blueprint supports the features \(4,\) at slot '0'; register one of your"):
        attach(network(), {"0": "auto"}, torch.zeros(2, 4))


def test_an_example_without_a_tensor() -> None:
    with pytest.raises(SlotError, match="the example input contains no tensor"):
        attach(network(), ["0"], ())


def test_a_failed_attachment_leaves_no_hook() -> None:
    host = network()
    with pytest.raises(SlotError):
        attach(host, {"0": "auto", "1": ["conv3x3"]}, torch.zeros(2, 4))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in host.modules())
