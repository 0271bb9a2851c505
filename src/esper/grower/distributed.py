"""Growth in several processes: the first one decides, and all of them carry it out.

With `torch.nn.parallel.DistributedDataParallel` every process holds the same model. A grower in each of them, made with
the same arguments and stepped at the same time, keeps them equal. The first process measures, judges and decides for
all. New modules have the same initial values everywhere, because their random generators have the same seeds.

`DistributedDataParallel` averages the gradients of the parameters that it was constructed with. Those of later modules
are averaged by a hook on each parameter (`esper.growth.data_parallel`): before anything clips them, and without
constructing it anew, which trainers would not notice. That holds for seeds planted by hand as well; only on a host that
is frozen as a whole, which torch refuses to wrap, it takes a grower. Averaging a gradient twice changes nothing. Where
it is constructed on a model that has grown already, as in resumed training, give it ``find_unused_parameters=True``:
some parameters may be frozen or pruned.

Where processes share parameters (FSDP2, after `GrowingModel.shard_growth`), none can call the model alone. All of them
measure at the same time, with the passes that the first one makes, and the results of the first one count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast
from weakref import WeakSet

from torch import Tensor, distributed, nn

from esper.errors import DistributedError
from esper.growth.data_parallel import average_gradient, average_gradients

T = TypeVar("T")

FIRST = 0
"""Rank of the process that decides."""


class Processes:
    """The processes of `torch.distributed`'s default group, or this process alone if there is no group.

    Args:
        sharing: Whether each of them holds a part of the model (FSDP2), so that none can call it alone.
    """

    def __init__(self, *, sharing: bool = False) -> None:
        self._sharing = sharing
        several = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
        # A new group, so that messages do not mix with those of DistributedDataParallel.
        self._group = cast("distributed.ProcessGroup", distributed.new_group()) if several else None
        self._averaged: WeakSet[nn.Module] = WeakSet()

    @property
    def is_distributed(self) -> bool:
        """Whether there are several processes."""
        return self._group is not None

    @property
    def is_first(self) -> bool:
        """Whether this is the process that decides."""
        return self._group is None or distributed.get_rank() == FIRST

    def broadcast(self, compute: Callable[[], T], *, everywhere: bool = False) -> T:
        """Call ``compute`` in the first process, and return its result in all of them.

        Args:
            compute: Computes the result.
            everywhere: Call it in all processes, although only the result of the first one counts. If it fails in one
                of them, that one ends, and the others wait until torch.distributed's timeout, or until `torchrun` or
                whatever started them ends them.

        Raises:
            DistributedError: in the other processes, if ``compute`` failed in the first.
        """
        if self._group is None:
            return compute()
        box: list[Any] = [None]  # still None where the first process failed
        try:
            if everywhere or self.is_first:
                box = [[compute()]]
        except BaseException:
            if not everywhere:  # the others wait here; with everywhere they wait elsewhere, or failed themselves
                distributed.broadcast_object_list(box, src=FIRST, group=self._group)
            raise
        distributed.broadcast_object_list(box, src=FIRST, group=self._group)
        if box[0] is None:
            raise DistributedError("growth failed in the first process: see its message")
        return box[0][0]

    def run_on_model(self, compute: Callable[[], T]) -> T:
        """Broadcast the result of ``compute``, which calls the model: everywhere if processes share its parameters."""
        return self.broadcast(compute, everywhere=self._sharing)

    def average_gradients(self, modules: Iterable[nn.Module]) -> None:
        """Average the gradients of all parameters in ``modules`` over processes from now on.

        Where processes share parameters, FSDP2 does so already.
        """
        if self._group is not None and not self._sharing:
            added = [module for module in modules if module not in self._averaged]
            self._averaged.update(added)
            average_gradients(added, self._group)

    def average_gradient(self, parameter: Tensor) -> None:
        """Replace the gradient of ``parameter`` by its average over all processes."""
        if self._group is not None:
            average_gradient(parameter, self._group)
