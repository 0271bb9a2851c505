"""Blueprints: the small modules that a seed may grow into, in a registry open to users.

Importing this package registers the built-in ones.
"""

from esper.growth.blueprints import blocks, channels, lora, mixing, units
from esper.growth.blueprints.registry import Blueprint, BlueprintCost, Family, for_site, get, names, register

__all__ = [
    "Blueprint",
    "BlueprintCost",
    "Family",
    "blocks",
    "channels",
    "for_site",
    "get",
    "lora",
    "mixing",
    "names",
    "register",
    "units",
]
