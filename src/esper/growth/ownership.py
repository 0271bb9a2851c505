"""Which optimizer trains what grows: one owner, told of every seed that comes or goes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from esper.errors import SlotError

SLOT_KEY = "slot"
"""Key of a parameter group that belongs to a slot; its value is the slot's name."""

_SHOWN = 3
"""Names of forgotten parameters in a warning."""

Named = Callable[[], Iterable[tuple[str, nn.Parameter]]]


class Ownership:
    """Hands the parameters of seeds to an optimizer whose groups `GrowingModel.parameter_groups` made.

    Every slot has had a group from the start, so no group is ever added, which schedulers would not survive. Shared by
    all slots of a model; copies of the model begin without an optimizer.
    """

    def __init__(self) -> None:
        self.optimizer: torch.optim.Optimizer | None = None

    def link(self, optimizer: torch.optim.Optimizer, slots: Iterable[str], named_parameters: Named) -> None:
        """Give all seeds to ``optimizer`` from now on; it warns at its first step of parameters that it lacks.

        Raises:
            SlotError: a slot has no group.
        """
        groups = {group.get(SLOT_KEY) for group in optimizer.param_groups}
        missing = [name for name in slots if name not in groups]
        if missing:
            raise SlotError(
                f"the optimizer has no parameter group for slot {missing[0]!r}: "
                "make it from model.parameter_groups(lr=...)"
            )
        self.optimizer = optimizer
        _Reminder(optimizer, named_parameters)

    def extend(self, slot: str, parameters: Sequence[nn.Parameter]) -> None:
        """The optimizer trains these, too."""
        if self.optimizer is not None:
            self._group(self.optimizer, slot).extend(parameters)

    def withdraw(self, slot: str, parameters: Sequence[nn.Parameter]) -> None:
        """The optimizer forgets these and all it knew of them."""
        if self.optimizer is None:
            return
        gone = set(parameters)
        group = self._group(self.optimizer, slot)
        group[:] = [parameter for parameter in group if parameter not in gone]
        for parameter in gone:
            self.optimizer.state.pop(parameter, None)

    @staticmethod
    def _group(optimizer: torch.optim.Optimizer, slot: str) -> list[nn.Parameter]:
        return next(group["params"] for group in optimizer.param_groups if group.get(SLOT_KEY) == slot)

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": None}


class _Reminder:
    """Warns once, at the optimizer's first step, of parameters that nothing trains."""

    def __init__(self, optimizer: torch.optim.Optimizer, named_parameters: Named) -> None:
        self._named_parameters = named_parameters
        self._due = True
        optimizer.register_step_pre_hook(self)

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._due:  # a hook cannot be removed while hooks are called
            return
        self._due = False
        owned = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        forgotten = [name for name, parameter in self._named_parameters() if _is_forgotten(parameter, owned)]
        if forgotten:
            shown = ", ".join(forgotten[:_SHOWN]) + (", ..." if len(forgotten) > _SHOWN else "")
            warnings.warn(
                f"{len(forgotten)} trainable parameters belong to no group of the optimizer and will not learn: {shown}"
                "; make the optimizer from model.parameter_groups(lr=...)",
                stacklevel=3,
            )


def _is_forgotten(parameter: nn.Parameter, owned: set[nn.Parameter]) -> bool:
    return parameter.requires_grad and parameter not in owned
