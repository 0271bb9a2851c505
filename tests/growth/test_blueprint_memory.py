"""No blueprint needs memory out of proportion, as sites of real models are far larger than those of the suites."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from esper.growth.blueprints.registry import Blueprint, for_site, get
from esper.growth.site import Layout, Site
from growth.blueprint_cases import batch, grown

SITES = [
    Site(Layout.FEATURES, width=48, extent=(), input_shape=(40,)),
    Site(Layout.TOKENS, width=48, extent=(40,), input_shape=(40, 16)),
    Site(Layout.SEQUENCE, width=24, extent=(40,), input_shape=(2, 40)),
    Site(Layout.IMAGE, width=24, extent=(12, 14), input_shape=(3, 12, 14)),
]
WIDENED = 4
"""How many times as wide as the features a hidden layer may be."""
CASES = [pytest.param(kind, site, id=f"{kind.name}-{site.layout.value}") for site in SITES for kind in for_site(site)]


class Largest(TorchFunctionMode):
    """While active, notes how many values the largest tensor has that any function makes."""

    def __init__(self) -> None:
        super().__init__()
        self.values = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.values = max(self.values, result.numel())
        return result


def allowed(site: Site, features: Tensor, seed: Blueprint) -> int:
    """Hidden layers, a weight for every pair of tokens of each example, and the parameters."""
    pairs = len(features) * site.positions**2 if site.layout is Layout.TOKENS else 0
    return max(WIDENED * features.numel(), pairs, *(parameter.numel() for parameter in seed.parameters()))


@pytest.mark.parametrize(("kind", "site"), CASES)
def test_no_tensor_is_far_larger_than_the_features(kind: type[Blueprint], site: Site) -> None:
    seed, (features, inputs) = grown(kind, site), batch(site, size=6)
    with Largest() as largest:
        seed(features, inputs)
    assert features.numel() <= largest.values <= allowed(site, features, seed)


def test_what_is_far_larger_is_noticed() -> None:
    site = SITES[1]
    features, _ = batch(site, size=6)
    with Largest() as largest:
        torch.mul(features.unsqueeze(1), features.unsqueeze(2))  # all pairs of tokens, channel by channel
    assert largest.values > allowed(site, features, grown(get("attention"), site))
