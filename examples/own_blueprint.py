"""A module of your own as blueprint: it is on offer wherever its layout fits."""

from typing import ClassVar

import torch
from digits import digits, score, small_network
from torch import Tensor, nn
from torch.nn import functional as F

import esper
from esper.growth.blueprints import Blueprint, BlueprintCost, Family, register
from esper.growth.site import Layout, Site

RANK = 16


@register
class Sine(Blueprint):
    """``s(h) = B sin(A h)``, with ``B = 0`` at birth, so that a fresh seed changes nothing and yet learns."""

    name: ClassVar[str] = "sine"
    family: ClassVar[Family] = Family.CHANNEL
    layouts: ClassVar[frozenset[Layout]] = frozenset({Layout.FEATURES, Layout.TOKENS})
    mixes_positions: ClassVar[bool] = False

    def __init__(self, site: Site, generator: torch.Generator) -> None:
        super().__init__(site, generator)
        self.inner = nn.Parameter(torch.randn(RANK, site.width, generator=generator) / site.width**0.5)
        self.outer = nn.Parameter(torch.zeros(site.width, RANK))

    def forward(self, features: Tensor, inputs: Tensor, /) -> Tensor:
        return F.linear(torch.sin(F.linear(features, self.inner)), self.outer)

    @classmethod
    def cost_at(cls, site: Site) -> BlueprintCost:
        return BlueprintCost(parameters=2 * RANK * site.width, flops=4 * RANK * site.width * site.positions)


def trained(grow: bool) -> nn.Module:
    """The small network after 150 steps on all training digits, planted by hand after 30 of them."""
    model = esper.attach(small_network(), {"1": ["sine"], "3": ["sine"]}, example_input=train[:2][0])
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=1e-2))
    model.link(optimizer)
    inputs, labels = train[:]
    for step in range(150):
        if grow and step == 30:
            for slot in model.slots.values():
                slot.germinate("sine", torch.Generator().manual_seed(0), alpha=1.0)
                slot.fossilize()
        model.train()
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    print(model.summary())
    return model.finalize()


train, _, test = digits()
bare, grown = trained(grow=False), trained(grow=True)
print(f"accuracy without growth {score(bare, test)[1]:.3f}, with growth {score(grown, test)[1]:.3f}")
