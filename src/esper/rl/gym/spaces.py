"""What a Gymnasium agent sees and does: spaces, and arrays that lie in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from esper.control.observation import BLUEPRINT_FEATURES, GLOBAL_FEATURES, SLOT_FEATURES, Feature, Observation
from esper.lifecycle.actions import head_sizes
from esper.lifecycle.legality import ActionMasks
from esper.tasks.suite import Suite

Array = NDArray[Any]
Arrays = dict[str, Array]


def sizes_of(suite: Suite) -> tuple[int, ...]:
    """How many choices each of the eight heads has on a suite."""
    return head_sizes(len(suite.sites), len(suite.blueprints))


def action_space(suite: Suite) -> spaces.MultiDiscrete:
    """One choice per head, in the order of `esper.lifecycle.actions.Head`."""
    return spaces.MultiDiscrete(list(sizes_of(suite)))


def observation_space(suite: Suite) -> spaces.Dict:
    """One network's observation: the declared features in their declared ranges, and the flat action mask.

    ``globals`` ``[G]``, ``slots`` ``[S, F]``, ``blueprints`` ``[S, K, D]``, ``action_mask`` ``[sum(head sizes)]``.
    """
    slots, blueprints = len(suite.sites), len(suite.blueprints)
    parts: dict[str, spaces.Space[Any]] = {
        "globals": _ranges(GLOBAL_FEATURES, ()),
        "slots": _ranges(SLOT_FEATURES, (slots,)),
        "blueprints": _ranges(BLUEPRINT_FEATURES, (slots, blueprints)),
        "action_mask": spaces.MultiBinary(sum(sizes_of(suite))),
    }
    return spaces.Dict(parts)


def _ranges(features: Sequence[Feature], leading: tuple[int, ...]) -> spaces.Box:
    shape = (*leading, len(features))
    low, high = (
        np.broadcast_to(np.array(ends, np.float32), shape)
        for ends in ([feature.low for feature in features], [feature.high for feature in features])
    )
    return spaces.Box(low, high, shape, np.float32)


def observation_arrays(observation: Observation, masks: ActionMasks) -> Arrays:
    """The observations of E networks, each array ``[E, ...]`` in the order of `observation_space`."""
    arrays = {name: part.cpu().numpy() for name, part in observation._asdict().items()}
    return {**arrays, "action_mask": masks.flat().astype(np.int8)}


def conditional_masks(masks: ActionMasks) -> Arrays:
    """The exact masks by head, each bool ``[E, ...]``: a choice's legality given the choices before it.

    The flat mask of an observation cannot say that a blueprint fits one slot and not the other; these can. Shapes as
    in `esper.lifecycle.legality.ActionMasks`.
    """
    exact = {
        "op": masks.op,
        "slot": masks.slot,
        "blueprint": masks.blueprint,
        "blend": masks.blend,
        "tempo": masks.tempo,
        "alpha_target": masks.alpha_target,
        "alpha_speed": masks.alpha_speed,
        "alpha_curve": masks.alpha_curve,
    }
    # Copies: an agent may write into what it was given, and the environment still decides by the originals.
    return {name: mask.copy() for name, mask in exact.items()}
