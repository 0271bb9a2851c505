"""Networks and loops that do something unusual, as many do."""

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from conformance.kind import CLASSES, EXAMPLES, WIDTH, Kind, Minibatch, classified, cross_entropy, mapped, right
from conformance.vision import mlp

FEATURES = 12


def normed(parametrization: Any) -> nn.Module:
    network = mlp()
    for name in ("one", "two"):
        parametrization(network.get_submodule(name))
    return network


def frozen() -> nn.Module:
    """A backbone that does not learn, and a head that does."""
    backbone = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    backbone.requires_grad_(False)
    return nn.Sequential(OrderedDict(backbone=backbone, head=nn.Linear(WIDTH, CLASSES)))


class Several(nn.Module):
    """Takes images and numbers by keyword, one of them optional, and returns a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.number = nn.Conv2d(1, WIDTH, 3, padding=1), nn.Linear(3, WIDTH)
        self.joined, self.head = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, *, image: Tensor, number: Tensor, scale: Tensor | None = None) -> dict[str, Tensor]:
        both = torch.cat((self.image(image).mean((2, 3)), self.number(number)), 1)
        hidden = self.joined(both).relu()
        return {"logits": self.head(hidden if scale is None else hidden * scale), "hidden": hidden}


def several(generator: torch.Generator) -> Minibatch:
    image = torch.randn(EXAMPLES, 1, 4, 4, generator=generator)
    number = torch.randn(EXAMPLES, 3, generator=generator)
    return Minibatch({"image": image, "number": number}, (number[:, 0] > 0).long() + (number[:, 1] > 0).long())


class Multihead(nn.Module):
    """Returns a tuple: logits, and an auxiliary loss as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(x)
        return self.head(hidden.relu()), hidden.square().mean()


class Experts(nn.Module):
    """Shazeer et al. 2017: each example goes to one of four experts, some of which may get none."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.router = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        gate, chosen = self.router(hidden).softmax(1).max(1)
        mixed = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero().squeeze(1)
            if len(mine):
                mixed = mixed.index_add(0, mine, (expert(hidden[mine]) * gate[mine, None]).to(mixed.dtype))
        return self.head(hidden + mixed)


def labels(x: Tensor) -> Tensor:
    return (x[:, :CLASSES] > 0).float()


def agreeing(logits: Tensor, wanted: Tensor) -> float:
    return float(((logits > 0) == (wanted > 0.5)).float().mean())


TABLE = classified(FEATURES)
SLOTS = {"one": ["mlp"], "two": ["lowrank"]}
KINDS = (
    Kind("multi_label", mlp, SLOTS, mapped(FEATURES, wanted=labels), F.binary_cross_entropy_with_logits, agreeing),
    Kind("weight_norm", lambda: normed(weight_norm), SLOTS, TABLE),
    Kind("spectral_norm", lambda: normed(spectral_norm), SLOTS, TABLE),
    Kind("autocast", mlp, SLOTS, TABLE, autocast=True),
    Kind("accumulation", mlp, SLOTS, TABLE, accumulate=2),
    Kind("frozen_backbone", frozen, {"backbone": ["mlp"], "backbone.0": ["lowrank"]}, TABLE),
    Kind(
        "keywords_and_dictionary",
        Several,
        {"image": ["conv3x3"], "joined": ["mlp"]},
        several,
        lambda found, target: cross_entropy(found["logits"], target),
        lambda found, target: right(found["logits"], target),
    ),
    Kind(
        "tuple",
        Multihead,
        {"trunk": ["mlp"]},
        TABLE,
        lambda found, target: cross_entropy(found[0], target) + 0.01 * found[1],
        lambda found, target: right(found[0], target),
    ),
    Kind("experts", Experts, {"embed": ["mlp"], "router": ["lowrank"]}, TABLE),
)
REFUSED = ((Kind("one_expert", Experts, {"experts.1": ["mlp"]}, TABLE), "keeps the examples apart"),)
"""What no slot can serve, with a part of the sentence that says why."""
