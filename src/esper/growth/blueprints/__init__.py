"""Blueprints: the small modules that a seed may grow into, one file each, in a registry open to users.

Importing this package registers the built-in ones.
"""

from esper.growth.blueprints.attention import Attention
from esper.growth.blueprints.bottleneck import Bottleneck
from esper.growth.blueprints.conv1x1 import Conv1x1
from esper.growth.blueprints.conv3x3 import Conv3x3
from esper.growth.blueprints.depthwise import Depthwise
from esper.growth.blueprints.gate import Gate
from esper.growth.blueprints.input_skip import InputSkip
from esper.growth.blueprints.lora import Lora
from esper.growth.blueprints.lowrank import LowRank
from esper.growth.blueprints.mlp import Mlp
from esper.growth.blueprints.mlp_wide import MlpWide
from esper.growth.blueprints.norm import Norm
from esper.growth.blueprints.registry import Blueprint, Family, for_site, get, names, register
from esper.growth.blueprints.squeeze_excite import SqueezeExcite
from esper.growth.blueprints.token_conv import TokenConv
from esper.growth.blueprints.token_mix import TokenMix

__all__ = [
    "Attention",
    "Blueprint",
    "Bottleneck",
    "Conv1x1",
    "Conv3x3",
    "Depthwise",
    "Family",
    "Gate",
    "InputSkip",
    "Lora",
    "LowRank",
    "Mlp",
    "MlpWide",
    "Norm",
    "SqueezeExcite",
    "TokenConv",
    "TokenMix",
    "for_site",
    "get",
    "names",
    "register",
]
