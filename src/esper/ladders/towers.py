"""The blocks of a model that can be copied: finding them, and making the model deeper in place.

A tower is an `nn.ModuleList` or `nn.Sequential` whose blocks run in turn. A copy of a block becomes the next module,
with the values, the parameter group and the optimizer state of the original.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from esper.errors import ConfigError, did_you_mean
from esper.growth.blueprints.registry import LayerCall
from esper.growth.depth import copy_block, deepen, find_configuration
from esper.growth.hooks import find_features, list_named_modules
from esper.growth.inputs import Arguments, call_host, describe_failure
from esper.numerics.modules import keep_buffers, keep_generators, keep_modes


@dataclass(frozen=True)
class Tower:
    """A list of blocks that run one after the other."""

    name: str
    """Name of the list in the model."""
    copyable: tuple[bool, ...]
    """Which blocks can take their own output as input; those that change width or resolution cannot."""

    def __len__(self) -> int:
        return len(self.copyable)

    def count_copies(self, depth: int) -> tuple[int, ...]:
        """The copies of each block that make the tower ``depth`` blocks deep, as evenly as possible."""
        sources, extra = sum(self.copyable), depth - len(self)
        # The k-th source gets the copies between the fractions k / sources and (k + 1) / sources.
        ends = iter([extra * (rank + 1) // sources for rank in range(sources)])
        copies, given = list[int](), 0
        for is_source in self.copyable:
            end = next(ends) if is_source else given
            copies.append(end - given)
            given = end
        return tuple(copies)

    def grow(self, copies: Sequence[int]) -> Tower:
        """The tower with these numbers of copies after each block."""
        grown = [
            source for source, count in zip(self.copyable, copies, strict=True) for source in [source] * (count + 1)
        ]
        return replace(self, copyable=tuple(grown))


Towers = tuple[Tower, ...]


def count_blocks(towers: Towers) -> int:
    """The depth of a model: the total number of blocks in its towers."""
    return sum(map(len, towers))


def plan_copies(towers: Towers, depth: int) -> dict[str, tuple[int, ...]]:
    """The copies of each block, by tower, for ``depth`` blocks; all towers grow by the same factor."""
    before = count_blocks(towers)
    copies: dict[str, tuple[int, ...]] = {}
    for tower in towers:
        if len(tower) * depth % before:
            sizes = ", ".join(f"{len(each)} in {each.name!r}" for each in towers)
            raise ConfigError(
                f"depth {depth} cannot be made of {before} blocks ({sizes}), since all lists grow by the same factor: "
                f"give multiples of {before}, or name fewer lists in blocks"
            )
        copies[tower.name] = tower.count_copies(len(tower) * depth // before)
    return copies


def grow_towers(towers: Towers, copies: Mapping[str, Sequence[int]]) -> Towers:
    """The towers with these numbers of copies after each block."""
    return tuple(tower.grow(copies[tower.name]) for tower in towers)


def deepen_in_place(
    model: nn.Module, copies: Mapping[str, Sequence[int]], optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Insert copies after the blocks of a model, and update the number of blocks in its configuration.

    A copied parameter joins the optimizer's group of its original, with a copy of its state. In each group the
    parameters of a copy follow those of its block, as in an optimizer made from the deeper model.
    """
    heirs: list[tuple[nn.Module, list[nn.Module]]] = []  # blocks and their copies
    inserted: dict[str, str] = {}
    for name, counts in copies.items():
        container = model.get_submodule(name)
        assert isinstance(container, nn.Sequential | nn.ModuleList)
        place = 0
        for index, (block, count) in enumerate(zip(list(container.children()), counts, strict=True)):
            made = [copy_block(block) for _ in range(count)]
            for each in made:
                place += 1
                container.insert(place, each)
                inserted[_join(name, place)] = _join(name, index)
            heirs.append((block, made))
            place += 1
    deepen(model, inserted)
    if optimizer is None:
        return

    optimizer.zero_grad()
    for block, made in heirs:
        copies_by_original = [dict(zip(block.parameters(), each.parameters(), strict=True)) for each in made]
        for heir_of in copies_by_original:
            for original, heir in heir_of.items():
                if original in optimizer.state:
                    optimizer.state[heir] = copy.deepcopy(optimizer.state[original])
        own = set(block.parameters())
        for group in optimizer.param_groups:
            places = [place for place, parameter in enumerate(group["params"]) if parameter in own]
            if places:
                members = [group["params"][place] for place in places]
                behind = places[-1] + 1
                group["params"][behind:behind] = [heir_of[each] for heir_of in copies_by_original for each in members]


def _join(container: str, index: int) -> str:
    return f"{container}.{index}" if container else str(index)


# Finding them


def find_towers(model: nn.Module, example: Arguments, names: Iterable[str] | None) -> Towers:
    """Find the towers of a model with a forward pass.

    Without ``names``, they are the lists of blocks of one class in which each block is called once, with the output of
    the previous one; if the model's configuration counts blocks, those that it counts.
    """
    modules = dict(list_named_modules(model))
    lists = {name: module for name, module in modules.items() if isinstance(module, nn.Sequential | nn.ModuleList)}
    lists = {name: module for name, module in lists.items() if len(module)}
    if names is not None:
        names = list(names)
        for name in names:
            if name not in lists:
                raise ConfigError(
                    f"blocks: the model has no nn.ModuleList or nn.Sequential {name!r} with blocks in it"
                    f"{did_you_mean(name, lists) or ': print(model) shows the names'}"
                )
        lists = {name: lists[name] for name in names}
    calls = _record_calls(model, example, [block for blocks in lists.values() for block in blocks.children()])

    # Lists that run in turn, with at least one block that can follow itself.
    towers: dict[str, Tower] = {}
    for name, blocks in lists.items():
        by_block = [calls.get(block, []) for block in blocks.children()]
        once = [made[0] for made in by_block if len(made) == 1]
        in_turn = len(once) == len(by_block) and all(before.order < after.order for before, after in pairwise(once))
        if in_turn and any(call.keeps_shape for call in once):
            towers[name] = Tower(name, tuple(call.keeps_shape for call in once))
    if names is not None:
        for name in lists:
            if name not in towers:
                raise ConfigError(
                    f"blocks: the modules in {name!r} are not called once each, in turn, or their output cannot be "
                    "their input, so copies cannot be inserted"
                )
        return tuple(towers.values())

    # Among these, the lists that are certainly meant.
    counted = [name for name in towers if find_configuration(model, name, len(lists[name])) is not None]
    for name, tower in list(towers.items()):
        children = list(lists[name].children())
        same_class = len({type(block) for block in children}) == 1 and any(True for _ in children[0].children())
        run = [calls[block][0] for block in children]
        chained = all(after.first is not None and after.first is before.features for before, after in pairwise(run))
        if not (same_class and chained) or (counted and name not in counted):
            del towers[tower.name]
    classes = {type(next(iter(lists[name].children()))) for name in towers}
    nested = [name for name in towers for outer in towers if name.startswith(f"{outer}.")]
    if not towers or len(classes) > 1 or nested:
        found = f"there are several: {', '.join(map(repr, towers))}" if towers else "none was found"
        raise ConfigError(
            f"cannot determine the blocks to copy ({found}): name their nn.ModuleList or nn.Sequential, as in "
            "blocks=['transformer.h']"
        )
    return tuple(towers.values())


class _Call(NamedTuple):
    order: int
    first: Tensor | None
    features: Any
    keeps_shape: bool


def _record_calls(model: nn.Module, example: Arguments, blocks: Iterable[nn.Module]) -> dict[nn.Module, list[_Call]]:
    """The calls of blocks in a forward pass in evaluation mode."""
    calls: dict[nn.Module, list[_Call]] = {}
    count = 0

    def record(block: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        nonlocal count
        count += 1
        first, features = LayerCall(arguments, keywords).first_argument, find_features(output)
        keeps = False
        if first is not None and isinstance(features, Tensor) and not features.is_nested:
            keeps = (first.shape, first.dtype) == (features.shape, features.dtype)
        calls.setdefault(block, []).append(_Call(count, first, features, keeps))

    hooks = [block.register_forward_hook(record, with_kwargs=True) for block in dict.fromkeys(blocks)]
    try:
        with torch.no_grad(), keep_modes(model), keep_buffers(model), keep_generators(model):
            model.eval()
            try:
                call_host(model, example)
            except Exception as error:
                raise ConfigError(describe_failure(model, example, error)) from error
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def read_depths(towers: Towers, prefix: str, keys: Iterable[str]) -> dict[str, int]:
    """The blocks of each tower in a state dict in which this model's names start with ``prefix``."""
    names = list(keys)
    depths: dict[str, int] = {}
    for tower in towers:
        block = re.compile(re.escape(prefix + (tower.name and f"{tower.name}.")) + r"(\d+)\.")
        depths[tower.name] = len({found[1] for found in map(block.match, names) if found})
    return depths
