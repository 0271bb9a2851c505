"""Blueprints: the small modules that a seed may grow into, in a registry open to users.

Importing this package registers the built-in ones.
"""

from esper.growth.blueprints import channels, gates, spatial, tokens
from esper.growth.blueprints.registry import Blueprint, Family, for_site, get, names, register

__all__ = ["Blueprint", "Family", "channels", "for_site", "gates", "get", "names", "register", "spatial", "tokens"]
