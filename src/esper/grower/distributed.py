"""Growth in several processes: the first one decides, and all carry it out.

With `torch.nn.parallel.DistributedDataParallel` every process holds the same model. A grower in each of them, made with
the same arguments and stepped at the same time, keeps it so: the first process measures, judges and decides for all;
fresh seeds have the same values everywhere, since their generators do.

`DistributedDataParallel` averages the gradients of the parameters that it was constructed with. Those that grow later
are averaged here, one by one as they arrive, by hooks: before anything clips them, and without constructing it anew,
which trainers would not notice. To average a gradient that it averages as well changes nothing. Constructed on a model
that has grown already, as where training resumes, it waits for parameters that may be pruned or at rest: then give it
``find_unused_parameters=True``.

Where processes share parameters (FSDP2, after `GrowingModel.shard_growth`), none can call the model alone: all of them
measure at the same time, each with the passes that the first one makes, and the first one's figures count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast
from weakref import WeakSet

import torch
from torch import Tensor, distributed, nn

from esper.errors import DistributedError
from esper.grower.gradients import register_gradient_hooks

T = TypeVar("T")

FIRST = 0
"""Rank of the process that decides."""


class Processes:
    """The processes of `torch.distributed`'s default group, if there is one; otherwise this one alone.

    Args:
        sharing: Whether each of them holds a part of the model (FSDP2), so that none can call it alone.
    """

    def __init__(self, *, sharing: bool = False) -> None:
        self._sharing = sharing
        several = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
        # Of its own, lest what is sent here meets what DistributedDataParallel sends.
        self._group = cast("distributed.ProcessGroup", distributed.new_group()) if several else None
        self._averaged: WeakSet[nn.Module] = WeakSet()

    @property
    def several(self) -> bool:
        """Whether there are more than this one."""
        return self._group is not None

    @property
    def first(self) -> bool:
        """Whether this is the one that decides."""
        return self._group is None or distributed.get_rank() == FIRST

    def broadcast(self, compute: Callable[[], T]) -> T:
        """Call ``compute`` in the first process, and return its result in all of them.

        Raises:
            DistributedError: in the other processes, if it failed in the first.
        """
        return self._run(compute, together=False)

    def run_on_model(self, compute: Callable[[], T]) -> T:
        """As `broadcast`, for what calls the model: where processes share it, all of them call ``compute``.

        If that fails in one of them, it ends, and the others wait, as for any pass that not all make, until
        torch.distributed's timeout or whoever started them ends them, too: `torchrun` does.
        """
        return self._run(compute, together=self._sharing)

    def _run(self, compute: Callable[[], T], *, together: bool) -> T:
        """What ``compute`` returns in the first process, in all of them; all call it if ``together``, else that one."""
        if self._group is None:
            return compute()
        box: list[Any] = [None]
        try:
            if together or self.first:
                box = [[compute()]]
        except BaseException:
            if not together:  # the others wait here; where all compute, they wait elsewhere, or failed themselves
                distributed.broadcast_object_list(box, src=FIRST, group=self._group)
            raise
        distributed.broadcast_object_list(box, src=FIRST, group=self._group)
        if box[0] is None:
            raise DistributedError("growth failed in the first process: see its message")
        return box[0][0]

    def average_gradients(self, modules: Iterable[nn.Module]) -> None:
        """Let the gradients of all parameters in ``modules`` be averages over all processes from now on.

        Where processes share parameters, they are already.
        """
        if self._group is None or self._sharing:
            return
        register_gradient_hooks(modules, self.average, self._averaged)

    @torch.no_grad()
    def average(self, parameter: Tensor) -> None:
        """Replace the gradient of ``parameter`` by its average over all processes."""
        if self._group is None:
            return
        assert parameter.grad is not None
        parameter.grad /= distributed.get_world_size()
        distributed.all_reduce(parameter.grad, group=self._group)
