"""Growth in several processes: the first one decides, and all of them carry it out.

A grower in each process of `torch.nn.parallel.DistributedDataParallel`, made with the same arguments and stepped at the
same time, keeps the models equal. What the first process found reaches the others in one message per step. New modules
have its initial values.

`DistributedDataParallel` averages the gradients of the parameters that it was constructed with. Those of later modules
are averaged by a hook on each parameter, before anything clips them; averaging twice changes nothing. So with several
processes only a grower plants (`Slot.germinate` refuses). Where it is constructed on a model that has grown already,
give it ``find_unused_parameters=True``: some parameters may be frozen or pruned.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, distributed, nn
from torch.utils.hooks import RemovableHandle

from esper.errors import DistributedError
from esper.grower.gradients import register_gradient_hooks

T = TypeVar("T")

FIRST = 0
"""Rank of the process that decides."""
_averaging: WeakKeyDictionary[nn.Module, list[RemovableHandle]] = WeakKeyDictionary()
"""The hooks that average the gradients of a module."""


class Processes:
    """The processes of `torch.distributed`'s default group, or this process alone if there is no group."""

    def __init__(self) -> None:
        several = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
        # A new group, so that messages do not mix with those of DistributedDataParallel.
        self._group = cast("distributed.ProcessGroup", distributed.new_group()) if several else None
        self.is_distributed = several
        self.is_first = not several or distributed.get_rank() == FIRST
        self._synchronized: WeakSet[nn.Module] = WeakSet()
        self._results: deque[Any] | None = None
        """What the first process found so far within `one_message`; None outside of it."""

    @contextmanager
    def one_message(self) -> Generator[None]:
        """Send all that `run_on_first_process` returns within the block in one message at its end.

        The other processes wait for it at the beginning, and then run the block with these results. If the first one
        fails, they get as far as it got.
        """
        if self._group is None or self._results is not None:
            yield
            return
        box: list[Any] = [deque[Any]()]
        if not self.is_first:
            distributed.broadcast_object_list(box, src=FIRST, group=self._group)
        self._results = box[0]
        try:
            yield
        finally:
            self._results = None
            if self.is_first:
                distributed.broadcast_object_list(box, src=FIRST, group=self._group)

    def run_on_first_process(self, compute: Callable[[], T]) -> T:
        """Call ``compute`` in the first process, and return its result in all of them.

        If it fails, the others raise DistributedError.
        """
        if self._group is None:
            return compute()
        with self.one_message():
            assert self._results is not None
            if self.is_first:
                self._results.append(compute())
                return self._results[-1]
            if not self._results:
                raise DistributedError("growth failed in the first process: see its message")
            return self._results.popleft()

    @torch.no_grad()
    def synchronize(self, modules: Iterable[nn.Module]) -> None:
        """Give new ``modules`` the values of the first process, and average their gradients from now on."""
        for module in modules if self._group is not None else ():
            if module not in self._synchronized:
                self._synchronized.add(module)
                for tensor in (*module.parameters(), *module.buffers()):
                    distributed.broadcast(tensor, src=FIRST, group=self._group)
                for handle in _averaging.pop(module, []):  # of a former grower
                    handle.remove()
                _averaging[module] = register_gradient_hooks(module, self.average_gradient)

    @torch.no_grad()
    def average_gradient(self, parameter: Tensor) -> None:
        """Replace the gradient of ``parameter`` by its average over all processes."""
        if self._group is not None:
            assert parameter.grad is not None
            parameter.grad /= distributed.get_world_size()
            distributed.all_reduce(parameter.grad, group=self._group)
