"""The MLP suites with hidden units on offer: controllers choose between modules behind layers and wider layers.

    esper evaluate --controller look --suite examples/width_suite.py:mnist1d_width --instances 32
    esper train --set suite=examples/width_suite.py:digits_width

Hosts, data and variants are those of `digits` and `mnist1d`: some hosts have three units in one of their two layers.
"""

import torch
from torch import nn

from esper.tasks.datasets import DigitsSuite, MlpSuite, Mnist1dSuite
from esper.tasks.registry import register


class WidthSuite(MlpSuite):
    # A tuple is a pair of layers: units grow between them, and the slot is behind the second one.
    sites = ("layer0", ("layer0.0", "layer1.0"), "layer1", ("layer1.0", "head"))
    blueprints = (*MlpSuite.blueprints, "units_4", "units_16")

    def list_widths(self) -> dict[str, tuple[int, ...]]:
        """Live channels at each site, by variant."""
        variants = super().list_widths().items()
        return {name: (first, second, second, self.classes) for name, (first, second) in variants}

    def build_host(self, widths: tuple[int, ...], generator: torch.Generator) -> nn.Module:
        return super().build_host(widths[:2], generator)


@register
class DigitsWidth(WidthSuite, DigitsSuite):
    name = "digits_width"


@register
class Mnist1dWidth(WidthSuite, Mnist1dSuite):
    name = "mnist1d_width"
