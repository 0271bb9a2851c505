"""Keep a host's configuration and cache layers consistent with the blocks that grow in it.

Both are found by their names in Hugging Face models. A module that caches keys and values has the index of its cache
layer in ``layer_idx``, so a copy needs another index. A shared ``config`` has the number of blocks in
``num_hidden_layers`` or similar; it determines the number of cache layers, and of blocks when the model is built again.
Models without either can grow deeper, too.
"""

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

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
        like = originals.get(name, tensor)
        if (tensor.device, tensor.dtype) != (like.device, like.dtype):
            tensor.data = tensor.data.to(like.device, like.dtype)


class DepthTracker:
    """Keeps a host's configurations and cache layers consistent with the blocks that grow in it.

    Grown blocks share the host's configurations. If they have cache layers, all modules temporarily get a deeper
    configuration that also counts these. The user's own object keeps the original number of blocks. Attributes that
    are set on the deeper configuration are copied to it when it is restored.
    """

    def __init__(self, host: nn.Module) -> None:
        self.host = host
        self._blocks: dict[str, nn.Module] = {}
        """Grown blocks by the name of the host's block that each follows."""
        self._swaps: list[tuple[Any, Any, Mapping[str, Any]]] = []
        """Configurations of the host, the deeper ones that replaced them, and the attributes of these at that time."""

    def set_block(self, name: str, block: nn.Module | None) -> None:
        """Set the grown block that follows the host's submodule ``name``; None: no block."""
        # Count again from the host's own configurations, without or with the new block.
        before = self._blocks
        if block is before.get(name):
            return
        self.restore_config()
        self._blocks = {follower: part for follower, part in before.items() if follower != name}
        if block is not None:
            self._blocks[name] = block
            # The block gets the configurations of the block that it follows, wherever it was created.
            originals = dict(list_named_modules(self.host.get_submodule(name)))
            for path, module in list_named_modules(block):
                if path in originals and CONFIGURATION in vars(module) and CONFIGURATION in vars(originals[path]):
                    setattr(module, CONFIGURATION, vars(originals[path])[CONFIGURATION])
        try:
            self._count_blocks()
        except SlotError:  # restore the previous blocks
            self.restore_config()
            self._blocks = before
            self._count_blocks()
            raise

    def restore_config(self) -> None:
        """Restore the host's own configurations in the host and in grown blocks."""
        for original, deeper, attributes in reversed(self._swaps):
            # Keep attributes that were set on the deeper configuration, except the number of blocks.
            for name, value in _list_attributes(deeper).items():
                if name not in (*DEPTHS, *KINDS) and (name not in attributes or value is not attributes[name]):
                    object.__setattr__(original, name, value)
            _replace_configuration(self._list_modules(), deeper, original)
        self._swaps.clear()

    @contextmanager
    def without_blocks(self) -> Generator[None]:
        """Context manager in which the host has its own configurations, as if nothing had grown."""
        blocks = self._blocks
        self.restore_config()
        self._blocks = {}
        try:
            yield
        finally:
            self._blocks = blocks
            self._count_blocks()

    def _count_blocks(self) -> None:
        """Number the cache layers of grown blocks, and replace configurations with deeper ones."""
        grown = {module for block in self._blocks.values() for module in block.modules()}
        for parent, names in _group_by_parent(self._blocks).items():
            container = self.host.get_submodule(parent)
            # Cache layers of grown blocks come after the host's.
            first = 1 + max((number for module, number in _list_layers(container) if module not in grown), default=-1)
            layers = [
                (module, place) for place, name in enumerate(names) for module, _ in _list_layers(self._blocks[name])
            ]
            for module, place in layers:
                setattr(module, LAYER, first + place)
            count = find_configuration(self.host, parent, len(list(container.children())))
            places = [name.rpartition(".")[2] for name in names]
            if count is None or not all(map(str.isdecimal, places)):
                continue
            # Without cache layers, only a finalized host needs it, but an error should be raised as early as possible.
            deeper = count.deepen([*range(count.depth), *map(int, places)])
            if layers:
                self._swaps.append((count.configuration, deeper, _list_attributes(deeper)))
                _replace_configuration(self._list_modules(), count.configuration, deeper)

    def _list_modules(self) -> list[nn.Module]:
        return [module for part in (self.host, *self._blocks.values()) for module in part.modules()]


class BlockCount(NamedTuple):
    """A configuration with the number of blocks of a model."""

    configuration: Any
    name: str
    """Name of the configuration's attribute with the number of blocks."""
    depth: int

    def deepen(self, blocks: Sequence[int]) -> Any:
        """The configuration of a model with ``blocks``, which are indices of this model's blocks, some repeated.

        If this configuration has plain attributes, the new one shares all others.
        """
        changes: dict[str, Any] = {self.name: len(blocks)}
        for name in KINDS:
            value = getattr(self.configuration, name, None)
            kinds = cast("Sequence[Any]", value if isinstance(value, list | tuple) else ())
            if len(kinds) == self.depth:
                deeper_kinds = [kinds[block] for block in blocks]
                changes[name] = tuple(deeper_kinds) if isinstance(value, tuple) else deeper_kinds
        try:
            # A shallow copy, if the number of blocks is a plain attribute of the object itself.
            plain = not _list_attributes(self.configuration).keys().isdisjoint(DEPTHS)
            changed = copy.copy(self.configuration) if plain else copy.deepcopy(self.configuration)
            if changed is self.configuration:
                raise TypeError("it cannot be copied")
            try:
                for name, value in changes.items():
                    setattr(changed, name, value)
            except dataclasses.FrozenInstanceError:
                changed = dataclasses.replace(self.configuration, **changes)
        except (AttributeError, TypeError, ValueError) as error:
            raise SlotError(
                f"the host's configuration, {describe_value(self.configuration)}, has {self.depth} blocks by "
                f"{self.name!r}, which cannot be changed: {error}. Make it an attribute that can be set, as those of "
                "ordinary classes and dataclasses can"
            ) from error
        return changed


def find_configuration(host: nn.Module, container: str, depth: int) -> BlockCount | None:
    """The configuration of the nearest module around the submodule ``container`` that counts ``depth`` blocks."""
    # From the container outwards, to the host itself.
    parts = container.split(".") if container else []
    for length in range(len(parts), -1, -1):
        configuration = vars(host.get_submodule(".".join(parts[:length]))).get(CONFIGURATION)
        for name in DEPTHS:
            value = getattr(configuration, name, None)
            if type(value) is int and value == depth:
                return BlockCount(configuration, name, depth)
    return None


def deepen(host: nn.Module, inserted: Mapping[str, str]) -> None:
    """Update a plain host's configurations and cache layers for blocks that were inserted in its containers.

    Args:
        host: Has the inserted blocks.
        inserted: For each block after which one was inserted, its current name and its name before all insertions.
    """
    for parent, names in _group_by_parent(inserted).items():
        container = host.get_submodule(parent)
        places = sorted(int(inserted[name].rpartition(".")[2]) for name in names)
        depth = len(list(container.children())) - len(places)
        count = find_configuration(host, parent, depth)
        # The configuration for all blocks, with each inserted block after its original.
        if count is not None:
            blocks = sorted([*range(depth), *places])
            _replace_configuration(host.modules(), count.configuration, count.deepen(blocks))
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


def _replace_configuration(modules: Iterable[nn.Module], configuration: Any, replacement: Any) -> None:
    for module in modules:
        if vars(module).get(CONFIGURATION) is configuration:
            setattr(module, CONFIGURATION, replacement)


def _list_attributes(configuration: Any) -> dict[str, Any]:
    """A configuration's own attributes by name, whether in ``__slots__`` or not."""
    # With ``__slots__`` the state is a pair of dictionaries.
    state = object.__getstate__(configuration)
    parts = cast("tuple[Any, ...]", state if isinstance(state, tuple) else (state,))
    return {name: value for part in parts if part is not None for name, value in part.items()}
