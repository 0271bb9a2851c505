"""Keep a host's configuration and cache layers consistent with the blocks that grow in it.

Both are found by their names in Hugging Face models. A module that caches keys and values has the index of its cache
layer in ``layer_idx``, so a copy needs another index. A shared ``config`` has the number of blocks in
``num_hidden_layers`` or similar; it determines the number of cache layers, and of blocks when the model is built again.
Models without either can grow deeper, too.
"""

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from torch import nn

from esper.config.arguments import describe_value
from esper.errors import SlotError
from esper.growth.hooks import GrowthHook, find_hook_tables, list_named_modules
from esper.numerics.modules import copy_with

LAYER = "layer_idx"
"""Attribute of a module with the index of its cache layer."""
CONFIGURATION = "config"
"""Attribute of modules with the configuration from which a model is built."""
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""Names that a configuration may use for the number of blocks."""
KINDS = ("layer_types", "mlp_layer_types")
"""Names that a configuration may use for a list with an entry for each block."""


def copy_block(block: nn.Module) -> nn.Module:
    """A copy of a block without its growth slots, which shares the block's configuration."""
    # Slots and configurations are shared instead of copied; then the slots are removed from the copy.
    hooks = [hook for module in block.modules() for table in find_hook_tables(module) for hook in table.values()]
    shared = [hook for hook in hooks if isinstance(hook, GrowthHook)]
    shared += [vars(module)[CONFIGURATION] for module in block.modules() if CONFIGURATION in vars(module)]
    copied = copy_with(block, block, SlotError, shared)
    for module in copied.modules():
        for table in find_hook_tables(module):
            for key in [key for key, hook in table.items() if isinstance(hook, GrowthHook)]:
                del table[key]
    return copied


def convert_block(block: nn.Module, original: nn.Module) -> None:
    """Convert a copy of a block to the dtypes and devices of the block's tensors, which may differ from each other."""
    originals = {**dict(original.named_parameters()), **dict(original.named_buffers())}
    for name, tensor in (*block.named_parameters(), *block.named_buffers()):
        tensor.data = tensor.data.to(originals.get(name, tensor))


class DepthTracker:
    """Keeps a host's configurations and cache layers consistent with the blocks that grow in it.

    If grown blocks have cache layers, all modules get a deeper configuration that also counts these. The user's own
    object stays, and gets back what is set on the deeper one.
    """

    def __init__(self, host: nn.Module) -> None:
        self.host = host
        self.blocks: Mapping[str, nn.Module] = {}
        """Grown blocks by the name of the host's block that each follows."""
        self._deeper: list[tuple[Any, Any, Mapping[str, Any]]] = []
        """Configurations of the host, the deeper ones that replaced them, and the attributes of these at that time."""

    def set_block(self, name: str, block: nn.Module | None) -> None:
        """Set the grown block that follows the host's submodule ``name``; None: no block."""
        before = self.blocks
        if block is before.get(name):
            return
        others = {follower: part for follower, part in before.items() if follower != name}
        try:
            self.set_blocks(others if block is None else {**others, name: block})
        except SlotError:
            self.set_blocks(before)
            raise

    def set_blocks(self, blocks: Mapping[str, nn.Module]) -> None:
        """Set all grown blocks, by the name of the host's block that each follows."""
        # The host's own configurations again, with attributes set on deeper ones except the number of blocks.
        for original, deeper, attributes in reversed(self._deeper):
            for name, value in _list_attributes(deeper).items():
                if name not in (*DEPTHS, *KINDS) and (name not in attributes or value is not attributes[name]):
                    object.__setattr__(original, name, value)
            self._replace_configuration(deeper, original)
        self._deeper.clear()
        # Grown blocks get the configurations of the blocks that they follow, wherever they were created.
        self.blocks = blocks
        for name, block in blocks.items():
            originals = dict(list_named_modules(self.host.get_submodule(name)))
            for path, module in list_named_modules(block):
                if path in originals and CONFIGURATION in vars(module) and CONFIGURATION in vars(originals[path]):
                    setattr(module, CONFIGURATION, vars(originals[path])[CONFIGURATION])
        # Their cache layers come after the host's.
        grown = {module for block in blocks.values() for module in block.modules()}
        for parent, names in _group_by_parent(blocks).items():
            container = self.host.get_submodule(parent)
            first = 1 + max((number for module, number in _list_layers(container) if module not in grown), default=-1)
            cached = [(module, place) for place, name in enumerate(names) for module, _ in _list_layers(blocks[name])]
            for module, place in cached:
                setattr(module, LAYER, first + place)
            # Without them only a finalized host needs a deeper configuration, but an error should come early.
            places = [name.rpartition(".")[2] for name in names]
            configuration = find_configuration(self.host, parent, depth := len(list(container.children())))
            if configuration is not None and all(map(str.isdecimal, places)):
                deeper = deepen_configuration(configuration, depth, [*range(depth), *map(int, places)])
                if cached:
                    self._deeper.append((configuration, deeper, _list_attributes(deeper)))
                    self._replace_configuration(configuration, deeper)

    def _replace_configuration(self, configuration: Any, replacement: Any) -> None:
        for part in (self.host, *self.blocks.values()):
            _replace_configuration(part, configuration, replacement)


def find_configuration(host: nn.Module, container: str, depth: int) -> Any:
    """The configuration of the nearest module around the submodule ``container`` that counts ``depth`` blocks."""
    # From the container outwards, to the host itself.
    parts = container.split(".") if container else []
    for length in range(len(parts), -1, -1):
        configuration = vars(host.get_submodule(".".join(parts[:length]))).get(CONFIGURATION)
        if _find_depth(configuration, depth):
            return configuration
    return None


def _find_depth(configuration: Any, depth: int) -> str | None:
    """Name of the attribute that gives ``depth`` as the number of blocks."""
    values = {name: getattr(configuration, name, None) for name in DEPTHS}
    return next((name for name, value in values.items() if type(value) is int and value == depth), None)


def deepen_configuration(configuration: Any, depth: int, blocks: Sequence[int]) -> Any:
    """The configuration of a model with ``blocks``, which are indices of the ``depth`` blocks so far, some repeated.

    If the configuration has plain attributes, the new one shares all others.
    """
    depth_name = _find_depth(configuration, depth)
    assert depth_name is not None
    changes: dict[str, Any] = {depth_name: len(blocks)}
    for name in KINDS:
        value = getattr(configuration, name, None)
        kinds = cast("Sequence[Any]", value if isinstance(value, list | tuple) else ())
        if len(kinds) == depth:
            deeper = [kinds[block] for block in blocks]
            changes[name] = tuple(deeper) if isinstance(value, tuple) else deeper
    try:
        # A shallow copy, if the number of blocks is a plain attribute of the object itself.
        plain = not _list_attributes(configuration).keys().isdisjoint(DEPTHS)
        changed = copy.copy(configuration) if plain else copy.deepcopy(configuration)
        if changed is configuration:
            raise TypeError("it cannot be copied")
        try:
            for name, value in changes.items():
                setattr(changed, name, value)
        except dataclasses.FrozenInstanceError:
            changed = dataclasses.replace(configuration, **changes)
    except (AttributeError, TypeError, ValueError) as error:
        raise SlotError(
            f"the host's configuration, {describe_value(configuration)}, has {depth} blocks by {depth_name!r}, which "
            f"cannot be changed: {error}. Make it an attribute that can be set"
        ) from error
    return changed


def deepen(host: nn.Module, inserted: Mapping[str, str]) -> None:
    """Update a plain host's configurations and cache layers for blocks that were inserted in its containers.

    Args:
        host: Has the inserted blocks.
        inserted: For each block after which one was inserted, its current name and its name before all insertions.
    """
    for parent, names in _group_by_parent(inserted).items():
        container = host.get_submodule(parent)
        places = [int(inserted[name].rpartition(".")[2]) for name in names]
        depth = len(list(container.children())) - len(places)
        # The configuration for all blocks, with each inserted block after its original.
        configuration = find_configuration(host, parent, depth)
        if configuration is not None:
            deeper = deepen_configuration(configuration, depth, sorted([*range(depth), *places]))
            _replace_configuration(host, configuration, deeper)
        # Renumber all cache layers of the container.
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
    """Modules that have a cache layer, with its index."""
    for module in part.modules():
        number = vars(module).get(LAYER)
        if type(number) is int:
            yield module, number


def _replace_configuration(part: nn.Module, configuration: Any, replacement: Any) -> None:
    for module in part.modules():
        if vars(module).get(CONFIGURATION) is configuration:
            setattr(module, CONFIGURATION, replacement)


def _list_attributes(configuration: Any) -> dict[str, Any]:
    """A configuration's own attributes by name, whether in ``__slots__`` or not."""
    # With ``__slots__`` the state is a pair of dictionaries.
    state = object.__getstate__(configuration)
    parts = cast("tuple[Any, ...]", state if isinstance(state, tuple) else (state,))
    return {name: value for part in parts if part is not None for name, value in part.items()}
