"""Turn a population and its history into what controllers see."""

from __future__ import annotations

import torch

from esper.control.features import BLUEPRINT_FEATURES, GLOBAL_FEATURES, SLOT_FEATURES, View, compute
from esper.control.spaces import Observation, ObservationSpec

SPEC = ObservationSpec(len(GLOBAL_FEATURES), len(SLOT_FEATURES), len(BLUEPRINT_FEATURES))
"""The feature counts of every observation that Esper makes."""


def observe(view: View) -> Observation:
    """What controllers see of E networks, on the CPU.

    Of a diverged network: the worst loss and gradient, 0 for comparisons of them.
    """
    parts = (compute(features, view) for features in (GLOBAL_FEATURES, SLOT_FEATURES, BLUEPRINT_FEATURES))
    return Observation(*(torch.from_numpy(part).nan_to_num(nan=0.0) for part in parts))
