"""Low-rank updates of a layer's weight, merged into the weight when the model is finalized."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.growth.blueprints.layers import zeros
from esper.growth.blueprints.registry import Blueprint, BlueprintCost, Context, Family, Folded, register
from esper.growth.blueprints.units import is_wide_layer, require_wide_layer
from esper.growth.site import Layout, Site, WideLayer


@register
class LoRA(Blueprint):
    """``s = (lora_alpha / rank) B A x`` for the input ``x`` of a linear layer or a convolution; ``B = 0`` at birth.

    Hu et al. (2021, arXiv 2106.09685, section 4.1), with ``A`` drawn as in PEFT, uniformly within ``1 / sqrt(fan_in)``.
    At a convolution, ``A`` is a convolution to ``rank`` channels with the layer's options, and ``B`` one of kernel size
    1. For another rank, `register` a subclass with its own ``name`` and ``rank``.
    """

    name, family, layouts = "lora", Family.CHANNEL, frozenset(Layout)
    mixes_positions = False
    context = Context.LAYER
    rank = 8
    lora_alpha = 8.0

    def __init__(self, site: Site, generator: torch.Generator) -> None:
        super().__init__(site, generator)
        layer = _find_layer(site)
        assert layer is not None
        # A has the layer's kernel size, B kernel size 1.
        outputs, *inner = layer.weight.shape
        values = torch.empty(self.rank, *inner, device=generator.device)
        self.inner = nn.Parameter(nn.init.kaiming_uniform_(values, math.sqrt(5), generator=generator))
        self.outer = zeros(generator, outputs, self.rank, *[1] * (len(inner) - 1))
        self._convolve = None
        self._options: dict[str, Any] = {}
        if not isinstance(layer, nn.Linear):
            self._convolve = F.conv1d if isinstance(layer, nn.Conv1d) else F.conv2d
            self._options = {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation}

    @property
    def scale(self) -> float:
        """Factor of the update, ``lora_alpha / rank``."""
        return self.lora_alpha / self.rank

    def forward(self, features: Tensor, inputs: Tensor, /) -> Tensor:
        if self._convolve is None:
            return F.linear(F.linear(inputs, self.inner), self.outer) * self.scale
        return self._convolve(self._convolve(inputs, self.inner, **self._options), self.outer) * self.scale

    @torch.no_grad()
    def fold(self, host: nn.Module, name: str, weight: float) -> Folded:
        """Add the update to the layer's weight, as a new parameter."""
        layer = require_wide_layer(host, name, self.name)
        # The matrix B A has one row per row of the weight, with the weight's other axes flattened.
        old = layer.weight
        update = (self.outer.flatten(1) @ self.inner.flatten(1)).view_as(old)
        layer.weight = nn.Parameter(old + (weight * self.scale * update).to(old.dtype), old.requires_grad)
        return Folded.MERGED

    @classmethod
    def cost_at(cls, site: Site) -> BlueprintCost:
        layer = None if site.layer is None else site.layer.module
        # By now the weight may be computed from other tensors; its shape is still the same.
        assert isinstance(layer, WideLayer), "call supports(site) first"
        outputs, *inner = layer.weight.shape
        weights = cls.rank * (math.prod(inner) + outputs)
        # Not `site.positions`: a linear layer has its channels last even where the features have an image's shape.
        return BlueprintCost(weights, 2 * (math.prod(site.shape) // outputs) * weights)

    @classmethod
    def supports(cls, site: Site) -> bool:
        return super().supports(site) and _find_layer(site) is not None


def _find_layer(site: Site) -> WideLayer | None:
    """The layer, if an update can be added to its weight, which no hook changes; otherwise None."""
    layer = None if site.layer is None or not site.layer.unaltered else site.layer.module
    if layer is None or not is_wide_layer(layer) or getattr(layer, "padding_mode", "zeros") != "zeros":
        return None
    return layer


def _make_rank(rank: int) -> type[LoRA]:
    members = {"__module__": __name__, "__doc__": f"LoRA of rank {rank}.", "name": f"lora_{rank}", "rank": rank}
    return register(type(f"LoRA{rank}", (LoRA,), members))


LoRA1, LoRA2, LoRA4, LoRA16, LoRA32, LoRA64 = map(_make_rank, (1, 2, 4, 16, 32, 64))
