"""Low-rank updates of a layer's weight, which become part of it for good."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.errors import ExportError
from esper.growth.blueprints.layers import zeros
from esper.growth.blueprints.registry import Blueprint, Context, Family, Folded, register
from esper.growth.site import Layout, Site

_CONVOLUTIONS = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d}


@register
class LoRA(Blueprint):
    """``s = (lora_alpha / rank) B A x`` for the input ``x`` of a linear layer or a convolution; ``B = 0`` at birth.

    Hu et al. (2021, arXiv 2106.09685, section 4.1), with ``A`` drawn as PEFT does, uniformly within
    ``1 / sqrt(fan_in)``. For a convolution ``A`` is one to ``rank`` channels with the layer's own kernel, stride,
    padding and dilation, and ``B`` one of size 1. When the model is finalized it is added to the layer's weight.

    Another rank is another name: subclass it with ``name`` and ``rank``, and `register` that.
    """

    name: ClassVar[str] = "lora"
    family: ClassVar[Family] = Family.CHANNEL
    layouts: ClassVar[frozenset[Layout]] = frozenset(Layout)
    mixes_positions: ClassVar[bool] = False
    reads: ClassVar[Context] = Context.LAYER
    rank: ClassVar[int] = 8
    lora_alpha: ClassVar[float] = 8.0

    def __init__(self, site: Site, generator: torch.Generator) -> None:
        super().__init__(site, generator)
        layer = _find_layer(site)
        assert layer is not None
        outputs, *inner = layer.weight.shape
        drawn = torch.empty(self.rank, *inner, device=generator.device)
        self.inner = nn.Parameter(nn.init.kaiming_uniform_(drawn, math.sqrt(5), generator=generator))
        self.outer = zeros(generator, outputs, self.rank, *[1] * (len(inner) - 1))
        self._convolve = None if isinstance(layer, nn.Linear) else _CONVOLUTIONS[_kind_of(layer)]
        self._options: dict[str, Any] = {}
        if not isinstance(layer, nn.Linear):
            self._options = {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation}

    @property
    def scale(self) -> float:
        """``lora_alpha / rank``."""
        return self.lora_alpha / self.rank

    def forward(self, features: Tensor, inputs: Tensor, /) -> Tensor:
        if self._convolve is None:
            return F.linear(F.linear(inputs, self.inner), self.outer) * self.scale
        return self._convolve(self._convolve(inputs, self.inner, **self._options), self.outer) * self.scale

    @torch.no_grad()
    def fold(self, host: nn.Module, name: str, weight: float) -> Folded:
        """Add it to the layer's weight, which becomes another parameter: a module that shares it keeps the old one.

        Raises:
            ExportError: the weight is no parameter any more.
        """
        layer = host.get_submodule(name)
        old = dict(layer.named_parameters(recurse=False)).get("weight")
        if old is None:
            raise ExportError(
                f"the weight of {name!r} is computed from other tensors since {self.name!r} grew there, as by a weight "
                "norm or pruning, so nothing can be added to it: take that off again before finalize()"
            )
        update = (self.outer.flatten(1) @ self.inner.flatten(1)).view_as(old)
        merged = nn.Parameter(old + (weight * self.scale * update).to(old.dtype), old.requires_grad)
        layer.register_parameter("weight", merged)
        return Folded.MERGED

    @classmethod
    def parameters_at(cls, site: Site) -> int:
        outputs, *inner = _require_layer(site).weight.shape
        return cls.rank * (math.prod(inner) + outputs)

    @classmethod
    def flops_at(cls, site: Site) -> int:
        # Not the site's positions: a linear layer has its channels last, also where features look like images.
        positions = math.prod(site.shape) // len(_require_layer(site).weight)
        return 2 * positions * cls.parameters_at(site)

    @classmethod
    def serves(cls, site: Site) -> bool:
        return super().serves(site) and _find_layer(site) is not None


def _find_layer(site: Site) -> nn.Linear | nn.Conv1d | nn.Conv2d | None:
    """The layer, if its weight can be updated so: it is called with its weight as it is, and that is a parameter.

    Subclasses with a forward of their own, layers whose output something changes (a hook, a forward of the instance),
    and weights that are computed from others (weight norm, pruning and other parametrizations), are left alone.
    """
    layer = None if site.layer is None or not site.layer.unaltered else site.layer.module
    if not isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d):
        return None
    plain = any(type(layer).forward is kind.forward for kind in (nn.Linear, nn.Conv1d, nn.Conv2d))
    if not plain or "weight" not in dict(layer.named_parameters(recurse=False)):
        return None
    if isinstance(layer, nn.Linear):
        return layer
    return layer if layer.groups == 1 and layer.padding_mode == "zeros" else None


def _require_layer(site: Site) -> nn.Linear | nn.Conv1d | nn.Conv2d:
    layer = None if site.layer is None else site.layer.module
    # Its weight may be computed from others by now, which changes no shape.
    assert isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d), "ask serves(site) first"
    return layer


def _kind_of(layer: nn.Conv1d | nn.Conv2d) -> type[nn.Conv1d] | type[nn.Conv2d]:
    return nn.Conv1d if isinstance(layer, nn.Conv1d) else nn.Conv2d


@register
class LoRA1(LoRA):
    """LoRA of rank 1."""

    name: ClassVar[str] = "lora_1"
    rank: ClassVar[int] = 1


@register
class LoRA2(LoRA):
    """LoRA of rank 2."""

    name: ClassVar[str] = "lora_2"
    rank: ClassVar[int] = 2


@register
class LoRA4(LoRA):
    """LoRA of rank 4."""

    name: ClassVar[str] = "lora_4"
    rank: ClassVar[int] = 4


@register
class LoRA16(LoRA):
    """LoRA of rank 16."""

    name: ClassVar[str] = "lora_16"
    rank: ClassVar[int] = 16


@register
class LoRA32(LoRA):
    """LoRA of rank 32."""

    name: ClassVar[str] = "lora_32"
    rank: ClassVar[int] = 32


@register
class LoRA64(LoRA):
    """LoRA of rank 64."""

    name: ClassVar[str] = "lora_64"
    rank: ClassVar[int] = 64
