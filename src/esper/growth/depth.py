"""How many blocks a host has with those that grow in it: its configuration says so, and its cache has a layer for each.

Both are by names, as Hugging Face's models have them. A module that keeps keys and values of earlier tokens says by
``layer_idx`` in which layer of the cache: a copy of it needs a layer of its own. A ``config``, which modules share,
says by ``num_hidden_layers`` or the like how many blocks there are, by which caches are built, and from what a class
builds the model again. Models without either grow deeper all the same.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from torch import nn

from esper.growth.hook_tables import GrowthHook, find_hook_tables

LAYER = "layer_idx"
"""Attribute of a module that says which layer of a cache is its own."""
CONFIGURATION = "config"
"""Attribute of modules that holds what a model is built from."""
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""What a configuration may call the number of blocks."""
KINDS = ("layer_types", "mlp_layer_types")
"""What a configuration may call a list with an entry for each block."""


def copy_block(block: nn.Module, others: Mapping[int, Any] = MappingProxyType({})) -> nn.Module:
    """A copy without the growth slots on it and within it, which shares the block's configuration.

    ``others`` take the places of parts of the block in it, by their ids.
    """
    hooks = [hook for module in block.modules() for table in find_hook_tables(module) for hook in table.values()]
    shared = [hook for hook in hooks if isinstance(hook, GrowthHook)] + _list_configurations(block)
    copied = copy.deepcopy(block, {id(one): one for one in shared} | dict(others))
    for module in copied.modules():
        for table in find_hook_tables(module):
            for key in [key for key, hook in table.items() if isinstance(hook, GrowthHook)]:
                del table[key]
    return copied


class Depth:
    """Keeps account of the blocks that grow in a host, beside those that it has.

    While there are any, the host's modules and they themselves share another configuration, which counts them as well,
    behind the host's own: the one that was given stays as it is.
    """

    def __init__(self, host: nn.Module) -> None:
        self.host = host
        self._blocks: dict[str, nn.Module] = {}
        """By the name of the host's block that each follows."""
        self._replaced: list[tuple[Any, Any]] = []
        """Configurations as they were given, with those that took their place."""

    def follow(self, name: str, block: nn.Module | None) -> None:
        """``block`` lives behind the host's submodule ``name`` from now on; None: nothing does."""
        before = self._blocks.pop(name, None)
        if block is not None:
            self._blocks[name] = block
        if block is not before:
            self.restore()
            self._count()

    def restore(self) -> None:
        """Give the host, and what grew, the configurations back that the host had."""
        for given, other in self._replaced:
            _replace(self._list_modules(), other, given)
        self._replaced.clear()

    def _count(self) -> None:
        grown = {module for block in self._blocks.values() for module in block.modules()}
        for parent, names in _group_by_parent(self._blocks).items():
            container = self.host.get_submodule(parent)
            first = 1 + max((number for module, number in _list_layers(container) if module not in grown), default=-1)
            for place, name in enumerate(names):
                for module, _ in _list_layers(self._blocks[name]):
                    setattr(module, LAYER, first + place)
            counts = find_configuration(self.host, parent, len(list(container.children())))
            places = [name.rpartition(".")[2] for name in names]
            if counts is not None and all(map(str.isdecimal, places)):
                deeper = counts.deepen([*range(counts.depth), *map(int, places)])
                self._replaced.append((counts.configuration, deeper))
                _replace(self._list_modules(), counts.configuration, deeper)

    def _list_modules(self) -> list[nn.Module]:
        return [module for part in (self.host, *self._blocks.values()) for module in part.modules()]


class Counts(NamedTuple):
    """A configuration that says how many blocks a model has."""

    configuration: Any
    name: str
    """Of the attribute that says so."""
    depth: int

    def deepen(self, blocks: Sequence[int]) -> Any:
        """The configuration of a model with these of the blocks that there were, by number, some more than once."""
        changes: dict[str, Any] = {self.name: len(blocks)}
        for name in KINDS:
            said = getattr(self.configuration, name, None)
            kinds = cast("Sequence[Any]", said if isinstance(said, list | tuple) else ())
            if len(kinds) == self.depth:
                same = [kinds[block] for block in blocks]
                changes[name] = tuple(same) if isinstance(said, tuple) else same
        deeper = copy.deepcopy(self.configuration)
        try:
            for name, value in changes.items():
                setattr(deeper, name, value)
        except dataclasses.FrozenInstanceError:
            deeper = dataclasses.replace(self.configuration, **changes)
        return deeper


def find_configuration(host: nn.Module, container: str, depth: int) -> Counts | None:
    """The configuration of the nearest module around the submodule ``container`` that says ``depth``, if one does."""
    parts = container.split(".") if container else []
    for length in range(len(parts), -1, -1):
        configuration = vars(host.get_submodule(".".join(parts[:length]))).get(CONFIGURATION)
        for name in DEPTHS:
            if type(said := getattr(configuration, name, None)) is int and said == depth:
                return Counts(configuration, name, depth)
    return None


def deepen(host: nn.Module, inserted: Mapping[str, str]) -> None:
    """Let a plain host's configurations and cache layers follow blocks that were inserted in its containers.

    Args:
        host: Whose blocks stand where they are to stay.
        inserted: Names of the blocks behind which others were inserted, as they are by now and as they were before.
    """
    for parent, names in _group_by_parent(inserted).items():
        container = host.get_submodule(parent)
        places = sorted(int(inserted[name].rpartition(".")[2]) for name in names)
        depth = len(list(container.children())) - len(places)
        counts = find_configuration(host, parent, depth)
        if counts is not None:
            blocks = sorted([*range(depth), *places])
            _replace(host.modules(), counts.configuration, counts.deepen(blocks))
        first = min((number for _, number in _list_layers(container)), default=0)
        for place, block in enumerate(container.children()):
            for module, _ in _list_layers(block):
                setattr(module, LAYER, first + place)


def _group_by_parent(names: Iterable[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[name.rpartition(".")[0]].append(name)
    return groups


def _list_layers(part: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """Modules that have a layer of a cache, with its number."""
    for module in part.modules():
        number = vars(module).get(LAYER)
        if type(number) is int:
            yield module, number


def _list_configurations(part: nn.Module) -> list[Any]:
    return [vars(module)[CONFIGURATION] for module in part.modules() if CONFIGURATION in vars(module)]


def _replace(modules: Iterable[nn.Module], configuration: Any, other: Any) -> None:
    for module in modules:
        if vars(module).get(CONFIGURATION) is configuration:
            setattr(module, CONFIGURATION, other)
