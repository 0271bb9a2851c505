"""What a controller sees and what it may do, as tensors."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.lifecycle.legality import ActionMasks


class ObservationSpec(NamedTuple):
    """Feature counts of an observation: they fix a policy's input layers; slots and blueprints may vary in number."""

    globals: int
    slots: int
    blueprints: int


class Observation(NamedTuple):
    """What the controller sees. ``*`` is ``[E]`` when acting and ``[T, E]`` in an update; all float32."""

    globals: Tensor
    """``[*, G]`` features of the whole network."""
    slots: Tensor
    """``[*, S, F]`` one token per slot."""
    blueprints: Tensor
    """``[*, S, K, D]`` what each blueprint would be in each slot."""

    def to(self, device: torch.device) -> Observation:
        """The same on ``device``."""
        return Observation(*(_moved(part, device) for part in self))


class MaskTensors(NamedTuple):
    """Conditional legality, as `ActionMasks` but in bool tensors. ``*`` as in `Observation`."""

    op: Tensor
    """``[*, 6]``."""
    slot: Tensor
    """``[*, 6, S]`` given the operation."""
    blueprint: Tensor
    """``[*, S, K]`` for GERMINATE, given the slot."""
    blend: Tensor
    """``[*, 3]`` for GERMINATE."""
    tempo: Tensor
    """``[*, 3]``."""
    alpha_target: Tensor
    """``[*, S, 3]`` for GERMINATE or SET_ALPHA, given the slot: no slot ever allows both."""
    alpha_speed: Tensor
    """``[*, 4]``."""
    alpha_curve: Tensor
    """``[*, 3]``."""

    def to(self, device: torch.device) -> MaskTensors:
        """The same on ``device``."""
        return MaskTensors(*(_moved(part, device) for part in self))


def mask_tensors(masks: ActionMasks, device: torch.device) -> MaskTensors:
    """The lifecycle's masks of E environments as tensors on ``device``."""
    arrays: list[NDArray[np.bool_]] = [getattr(masks, name) for name in MaskTensors._fields]
    return MaskTensors(*(_moved(torch.from_numpy(np.ascontiguousarray(array)), device) for array in arrays))


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    # Nobody has to wait for what leaves the CPU; whoever reads what comes there has to.
    return tensor.to(device, non_blocking=tensor.device.type == "cpu")
