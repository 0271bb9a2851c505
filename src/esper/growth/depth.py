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
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from torch import nn

from esper.config.arguments import describe_value
from esper.errors import SlotError
from esper.growth.taps import GrowthHook, find_hook_tables

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


def convert_block(block: nn.Module, original: nn.Module) -> None:
    """Let a copy of a block have the types and devices of the block's own tensors, which need not be alike."""
    theirs = {**dict(original.named_parameters()), **dict(original.named_buffers())}
    for name, tensor in (*block.named_parameters(), *block.named_buffers()):
        like = theirs.get(name, tensor)
        if (tensor.device, tensor.dtype) != (like.device, like.dtype):
            tensor.data = tensor.data.to(like.device, like.dtype)


class Depth:
    """Keeps account of the blocks that grow in a host, beside those that it has.

    Blocks share the configurations of the host's. Where they have layers of a cache, the host's modules and they
    themselves share another configuration meanwhile, which counts them as well, behind the host's own: the one that was
    given goes on to say how many blocks the host has. What else is set on the other one is set on it, too.
    """

    def __init__(self, host: nn.Module) -> None:
        self.host = host
        self._blocks: dict[str, nn.Module] = {}
        """By the name of the host's block that each follows."""
        self._replaced: list[_Replaced] = []

    def follow(self, name: str, block: nn.Module | None) -> None:
        """``block`` lives behind the host's submodule ``name`` from now on; None: nothing does.

        Raises:
            SlotError: as `Counts.deepen`; all is then as it was.
        """
        before = self._blocks
        if block is before.get(name):
            return
        self.restore()
        self._blocks = {other: one for other, one in before.items() if other != name}
        if block is not None:
            self._blocks[name] = block
            _share_configurations(block, self.host.get_submodule(name))
        try:
            self._count()
        except SlotError:
            self.restore()
            self._blocks = before
            self._count()
            raise

    def restore(self) -> None:
        """Give the host, and what grew, the configurations back that the host had."""
        for given, other, made in reversed(self._replaced):
            _set_changes(given, other, made)
            _replace(self._list_modules(), other, given)
        self._replaced.clear()

    @contextmanager
    def forget(self) -> Generator[None]:
        """Within the block the host has the configurations that it had, as if nothing had grown."""
        blocks = self._blocks
        self.restore()
        self._blocks = {}
        try:
            yield
        finally:
            self._blocks = blocks
            self._count()

    def _count(self) -> None:
        grown = {module for block in self._blocks.values() for module in block.modules()}
        for parent, names in _group_by_parent(self._blocks).items():
            container = self.host.get_submodule(parent)
            first = 1 + max((number for module, number in _list_layers(container) if module not in grown), default=-1)
            layers = [(one, place) for place, name in enumerate(names) for one, _ in _list_layers(self._blocks[name])]
            for module, place in layers:
                setattr(module, LAYER, first + place)
            counts = find_configuration(self.host, parent, len(list(container.children())))
            places = [name.rpartition(".")[2] for name in names]
            if counts is None or not all(map(str.isdecimal, places)):
                continue
            deeper = counts.deepen([*range(counts.depth), *map(int, places)])
            if layers:  # else only a deeper host is to know, but that it can should show before anything grows
                self._replaced.append(_Replaced(counts.configuration, deeper, _list_attributes(deeper)))
                _replace(self._list_modules(), counts.configuration, deeper)

    def _list_modules(self) -> list[nn.Module]:
        return [module for part in (self.host, *self._blocks.values()) for module in part.modules()]


class _Replaced(NamedTuple):
    """A configuration of the host, and the one that took its place."""

    given: Any
    other: Any
    made: Mapping[str, Any]
    """Attributes of the other one when it was made."""


class Counts(NamedTuple):
    """A configuration that says how many blocks a model has."""

    configuration: Any
    name: str
    """Name of the configuration's attribute."""
    depth: int

    def deepen(self, blocks: Sequence[int]) -> Any:
        """The configuration of a model with these of the blocks that there were, by number, some more than once.

        It shares all else with this one, if that has plain attributes.

        Raises:
            SlotError: what says how many there are cannot be set.
        """
        changes: dict[str, Any] = {self.name: len(blocks)}
        for name in KINDS:
            said = getattr(self.configuration, name, None)
            kinds = cast("Sequence[Any]", said if isinstance(said, list | tuple) else ())
            if len(kinds) == self.depth:
                same = [kinds[block] for block in blocks]
                changes[name] = tuple(same) if isinstance(said, tuple) else same
        try:
            return _change(self.configuration, changes)
        except (AttributeError, TypeError, ValueError) as error:
            raise SlotError(
                f"the host's configuration, {describe_value(self.configuration)}, says by {self.name!r} that there are "
                f"{self.depth} blocks, and cannot be told of more: {error}. Let it be an attribute that can be set, as "
                "those of ordinary classes and dataclasses can"
            ) from error


def _change(configuration: Any, changes: Mapping[str, Any]) -> Any:
    """Another configuration that says so."""
    plain = not _list_attributes(configuration).keys().isdisjoint(DEPTHS)
    changed = copy.copy(configuration) if plain else copy.deepcopy(configuration)
    if changed is configuration:
        raise TypeError("it cannot be copied")
    try:
        for name, value in changes.items():
            setattr(changed, name, value)
    except dataclasses.FrozenInstanceError:
        return dataclasses.replace(configuration, **changes)
    return changed


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


def _share_configurations(block: nn.Module, original: nn.Module) -> None:
    """Let a copy of a block have the configurations of the block's own modules, wherever it was made."""
    theirs = dict(cast("Iterator[tuple[str, nn.Module]]", original.named_modules()))
    for path, module in cast("Iterator[tuple[str, nn.Module]]", block.named_modules()):
        if path in theirs and CONFIGURATION in vars(module) and CONFIGURATION in vars(theirs[path]):
            setattr(module, CONFIGURATION, vars(theirs[path])[CONFIGURATION])


def _list_configurations(part: nn.Module) -> list[Any]:
    return [vars(module)[CONFIGURATION] for module in part.modules() if CONFIGURATION in vars(module)]


def _replace(modules: Iterable[nn.Module], configuration: Any, other: Any) -> None:
    for module in modules:
        if vars(module).get(CONFIGURATION) is configuration:
            setattr(module, CONFIGURATION, other)


def _list_attributes(configuration: Any) -> dict[str, Any]:
    """A configuration's own attributes by name, whether in ``__slots__`` or not."""
    state = object.__getstate__(configuration)
    parts = cast("tuple[Any, ...]", state if isinstance(state, tuple) else (state,))
    return {name: value for part in parts if part is not None for name, value in part.items()}


def _set_changes(original: Any, other: Any, made: Mapping[str, Any]) -> None:
    """Set on a configuration what was set on another since it was ``made``, but how many blocks there are."""
    for name, value in _list_attributes(other).items():
        if name not in (*DEPTHS, *KINDS) and (name not in made or value is not made[name]):
            object.__setattr__(original, name, value)
