"""Count the operations that a program launches on its device, which give the minimum cost of a step on small data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

# fmt: off
_WITHOUT_KERNEL = frozenset(
    f"aten::{name}"
    for name in (
        "_has_compatible_shallow_copy_type", "_reshape_alias", "_unsafe_view", "_version", "alias", "as_strided",
        "as_strided_", "broadcast_tensors", "chunk", "conj", "contiguous", "data", "detach", "detach_", "diagonal",
        "empty", "empty_like", "empty_strided", "expand", "expand_as", "flatten", "is_same_size", "item", "lift",
        "lift_fresh", "mT", "movedim", "narrow", "new_empty", "new_empty_strided", "numel", "numpy_T", "permute",
        "requires_grad_", "reshape", "resize_", "resize_as_", "resolve_conj", "resolve_neg", "result_type", "select",
        "set_", "size", "slice", "split", "split_with_sizes", "squeeze", "stride", "swapaxes", "t", "tensor_split",
        "to", "transpose", "unbind", "unflatten", "unfold", "unsafe_split", "unsqueeze", "view", "view_as",
    )
)
# fmt: on
"""Operations that return a view, allocate or inspect shapes. If they copy, another operation inside them does it."""


class ProfiledEvent(Protocol):
    """The attributes used of an event of `torch.profiler.profile.events`."""

    @property
    def name(self) -> str: ...

    @property
    def cpu_parent(self) -> ProfiledEvent | None: ...

    @property
    def cpu_children(self) -> Sequence[ProfiledEvent]: ...


def count_operations(events: Iterable[ProfiledEvent]) -> Counter[str]:
    """Number of calls of each operation that would launch a kernel on a GPU, by name without ``aten::``.

    Of nested operations, only the innermost count. Views, allocations and inspections of shapes are omitted.
    """
    counts = Counter[str]()

    def count_within(event: ProfiledEvent) -> int:
        within = sum(map(count_within, event.cpu_children))
        if within or not event.name.startswith("aten::") or event.name in _WITHOUT_KERNEL:
            return within
        counts[event.name.removeprefix("aten::")] += 1
        return 1

    for event in events:
        if event.cpu_parent is None:
            count_within(event)
    return counts
