"""Finding blueprints by name and by site, and registering new ones."""

import pytest
import torch
from torch import Tensor, nn

from esper.errors import ConfigError, SlotError, UnknownBlueprintError
from esper.former import REMOVED_IN
from esper.growth.blueprints import registry
from esper.growth.blueprints.channels import LowRank
from esper.growth.blueprints.registry import Blueprint, Context, Family, for_site, get, names, register
from esper.growth.site import Layout, Site
from growth.blueprint_cases import SITES, generator

BUILT_IN = (
    "attention",
    "block_copy",
    "block_zero",
    "bottleneck",
    "conv1x1",
    "conv3x3",
    "depthwise",
    "gate",
    "input_skip",
    "lora",
    "lora_1",
    "lora_16",
    "lora_2",
    "lora_32",
    "lora_4",
    "lora_64",
    "lowrank",
    "lowrank_8",
    "mlp",
    "mlp_wide",
    "norm",
    "squeeze_excite",
    "token_conv",
    "token_mix",
    "units",
)


def test_the_built_in_blueprints_are_registered_under_sorted_names():
    assert names() == BUILT_IN
    assert all(get(name).name == name for name in names())


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Layout.FEATURES, "gate input_skip lowrank mlp mlp_wide norm"),
        (Layout.TOKENS, "attention gate input_skip lowrank lowrank_8 mlp mlp_wide norm token_conv token_mix"),
        (Layout.SEQUENCE, "bottleneck conv1x1 conv3x3 depthwise gate norm squeeze_excite"),
        (Layout.IMAGE, "bottleneck conv1x1 conv3x3 depthwise gate norm squeeze_excite"),
    ],
)
def test_for_site_lists_what_serves_a_layout(layout: Layout, expected: str):
    site = next(site for site in SITES if site.layout is layout)
    assert " ".join(kind.name for kind in for_site(site)) == expected


def test_an_unknown_name_raises_with_near_names():
    with pytest.raises(UnknownBlueprintError, match=r"'token_cnov'.*did you mean 'token_conv'"):
        get("token_cnov")
    with pytest.raises(UnknownBlueprintError, match=r"'zzzz'; known are attention, block_copy, block_zero, bottleneck"):
        get("zzzz")


class Shift(Blueprint):
    """A user's blueprint."""

    name = "shift"
    family = Family.CHANNEL
    layouts = frozenset({Layout.FEATURES})

    def __init__(self, site: Site, generator: torch.Generator) -> None:
        super().__init__(site, generator)
        self.bias = nn.Parameter(torch.zeros(site.width))

    def forward(self, features: Tensor, inputs: Tensor, /) -> Tensor:
        return self.bias.expand_as(features)

    @classmethod
    def parameters_at(cls, site: Site) -> int:
        return site.width

    @classmethod
    def flops_at(cls, site: Site) -> int:
        return 0


def test_users_register_their_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    assert register(Shift) is Shift
    assert get("shift") is Shift
    assert Shift in for_site(SITES[0])
    assert Shift not in for_site(SITES[2])


def test_former_names_of_class_members_work_with_a_warning():
    former = {
        "looks_ahead": False,
        "reads": Context.NETWORK,
        "serves": classmethod(lambda cls, site: super(Former, cls).serves(site) and site.width == 4),
        "silences": True,
    }
    with pytest.warns(DeprecationWarning, match=r"^Former\.\w+: rename it to") as warned:
        Former = type("Former", (LowRank,), former)
    assert [str(one.message) for one in warned] == [
        f"Former.{former}: rename it to {name}; the former way goes in version {REMOVED_IN}"
        for former, name in (
            ("looks_ahead", "is_causal"),
            ("reads", "context"),
            ("serves", "supports"),
            ("silences", "needs_branch_outputs"),
        )
    ]
    assert Former.is_causal
    assert Former.context is Context.NETWORK
    assert Former.needs_branch_outputs
    site = Site(Layout.FEATURES, 4, (), ())
    assert Former.supports(site)
    assert not Former.supports(site.with_width(5))  # its own condition
    assert not Former.supports(Site(Layout.IMAGE, 4, (5, 5), ()))  # that of its base


def test_a_taken_name_raises_and_keeps_the_first_holder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Shift, "name", "mlp")
    with pytest.raises(ConfigError, match=r"'mlp'.*taken by esper\.growth\.blueprints\.channels\.Mlp"):
        register(Shift)
    assert get("mlp") is not Shift


def test_a_site_that_is_not_served_raises():
    with pytest.raises(SlotError, match=r"'token_mix' does not support .*features"):
        get("token_mix")(SITES[0], generator())


@pytest.mark.parametrize(
    ("name", "site"),
    [
        pytest.param("input_skip", Site(Layout.TOKENS, 4, (8,), (6, 5)), id="other token count"),
        pytest.param("input_skip", Site(Layout.TOKENS, 4, (8,), (8,)), id="vector input, tokens here"),
        pytest.param("input_skip", Site(Layout.FEATURES, 4, (), (8, 5)), id="token input, vector here"),
        pytest.param("input_skip", Site(Layout.FEATURES, 4, (), ()), id="scalar input"),
        pytest.param("token_conv", Site(Layout.TOKENS, 4, (1,), (1, 5)), id="no neighbours"),
        pytest.param("token_mix", Site(Layout.TOKENS, 4, (1,), (1, 5)), id="one token to mix"),
        pytest.param("attention", Site(Layout.TOKENS, 4, (1,), (1, 5)), id="one token to attend to"),
        pytest.param("conv3x3", Site(Layout.IMAGE, 4, (5, 1), (1, 5, 1)), id="image one pixel wide"),
        pytest.param("depthwise", Site(Layout.SEQUENCE, 4, (1,), (1, 4)), id="sequence of one sample"),
    ],
)
def test_sites_where_parameters_would_be_dead_are_not_served(name: str, site: Site):
    assert not get(name).supports(site)
