"""Measures what blueprints promise in a model that a user's loop trains, from the backward passes of that loop.

A loss that is a mean over examples brings to every slot the functional gradients that `esper.growth.promise` needs,
divided by the number of examples.
"""

import warnings
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter, methodcaller
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.engine.budget import TRAINING_PASSES
from esper.errors import ConfigError, LookError
from esper.growth.blueprints.registry import Blueprint, Context, LayerCall
from esper.growth.look import Look
from esper.growth.model import GrowingModel
from esper.growth.promise import GRAM_BYTES, GradientBatch, Promises, measure_promise, raise_precision, record_call
from esper.growth.slot import Slot
from esper.numerics.arrays import Bools
from esper.serialization import to_plain

_SEED, _DRAW = 0, 0
"""Random seed of the initial values of candidates, as in populations."""
MIN_EXAMPLES = 2
"""Fewest examples that can be split into two halves."""
MIN_USED_EXAMPLES = 32
"""Examples that are used however many parameters a blueprint has."""
_CALLER = 9
"""Calls between a warning and the loop that called `esper.Grower.step`."""


class PromiseRecorder:
    """Records features and functional gradients at the slots, and measures what the ``kinds`` promise by the newest.

    Of several processes only one is ``active``, and records.
    """

    def __init__(
        self,
        model: GrowingModel,
        kinds: Sequence[type[Blueprint]],
        examples: int,
        scaler: torch.amp.GradScaler | None,
        add_flops: Callable[[float], None],
        *,
        active: bool,
    ) -> None:
        self._model, self._kinds, self._examples = model, kinds, examples
        self._scaler, self._add_flops, self._active = scaler, add_flops, active
        self._batches: dict[str, deque[GradientBatch]] = {name: deque() for name in model.slots}
        self._warned: set[str] = set()

    @property
    def empty(self) -> bool:
        return not any(self._batches.values())

    def set_recording(self, recording: bool) -> None:
        for slot in self._model.slots.values():
            slot.feature_hook = self._record_features if recording and self._active else None

    def clear(self) -> None:
        """Drop all batches: they are of a model that has changed."""
        for batches in self._batches.values():
            batches.clear()

    def _record_features(self, slot: Slot, call: LayerCall, features: Tensor) -> Tensor:
        """Keep the slot's features until their gradient arrives, if it ever does."""
        if not torch.is_grad_enabled() or not features.is_floating_point() or features.is_nested:
            return features
        leaf = features
        if not features.requires_grad:  # nothing before it learns, but a module here would
            leaf = torch.zeros_like(features, requires_grad=True)
            features = features + leaf
        leaf.register_hook(partial(self._record_gradient, slot.name, record_call(slot, call, features, self._examples)))
        return features

    @torch.no_grad()
    def _record_gradient(self, name: str, batch: GradientBatch, gradient: Tensor) -> None:
        """Keep the newest examples: no minibatch more than it takes to have enough."""
        # The gradient is of a mean over the batch; in half precision the product, or a scaled loss, might overflow.
        gradients = raise_precision(gradient.detach()[: len(batch.inputs[0])]) * len(gradient)
        if self._scaler is not None:
            gradients = gradients / self._scaler.scale(torch.ones((), device=gradients.device))
        batches = self._batches[name]
        if batches and batches[-1].inputs[0] is batch.inputs[0]:  # another loss of the same forward pass
            batches[-1] = batches[-1]._replace(gradients=batches[-1].gradients + gradients)
            return
        batches.append(batch._replace(gradients=gradients))
        while sum(len(kept.gradients) for kept in batches) - len(batches[0].gradients) >= self._examples:
            batches.popleft()

    @torch.no_grad()
    def measure(self, free: Bools) -> Promises:
        """The promises in the slots ``free``, bool ``[1, S]``; missing if too little was recorded for any."""
        slots = self._model.slots.values()
        fitted, held_out = np.full((2, 1, len(slots), len(self._kinds)), np.nan)
        requested = False
        with torch.autocast(slots[0].like.device.type, enabled=False):
            for place, slot in enumerate(slots):
                for index, kind in enumerate(self._kinds):
                    if not (free[0, place] and kind.name in slot.blueprints and slot.enabled):
                        continue
                    requested = True
                    # By the newest examples, so few that their Gram matrix fits into memory.
                    parameters, flops = kind.cost_at(slot.site)
                    bound = GRAM_BYTES // (torch.float32.itemsize * max(parameters, 1))
                    batches = self._select_newest(slot.name, min(self._examples, max(bound, MIN_USED_EXAMPLES)))
                    examples = sum(len(batch.gradients) for batch in batches)
                    if examples < MIN_EXAMPLES:
                        self._warn_once(slot.name, f"no gradients were recorded at slot {slot.name!r}")
                        continue
                    # Cost: gradients with respect to the parameters for each example, and their inner products.
                    self._add_flops(TRAINING_PASSES * examples * flops + 2 * examples**2 * parameters)
                    try:
                        promise, other, _ = measure_promise(slot, kind, batches, [(_SEED, place, _DRAW)])
                    except LookError as error:
                        self._warn_once(kind.name, str(error))
                        continue
                    fitted[0, place, index], held_out[0, place, index] = promise, other
        return Promises(fitted, held_out, np.array([requested and not np.isfinite(fitted).any()]))

    def _select_newest(self, name: str, count: int) -> list[GradientBatch]:
        """The newest examples, at most ``count``, without minibatches whose gradients were not finite."""
        batches: list[GradientBatch] = []
        for batch in reversed(self._batches[name]):
            if count and bool(batch.gradients.isfinite().all()):
                part = slice(min(count, len(batch.gradients)))
                batches.insert(0, batch.map(itemgetter(part)))
                count -= len(batches[0].gradients)
        return batches

    def _warn_once(self, key: str, reason: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(f"{reason}: rules that use promises plant nothing there", stacklevel=_CALLER)

    def read_look(self, look: Look, free: Bools) -> Promises:
        """The promises that `GrowingModel.look` has measured in the slots ``free``, bool ``[1, S]``."""
        fitted, held_out = np.full((2, 1, len(self._model.slots), len(self._kinds)), np.nan)
        slots, names = list(self._model.slots), [kind.name for kind in self._kinds]
        for row in look.rows:
            if row.slot not in slots or row.blueprint not in names:
                raise ConfigError(f"look has {row.blueprint!r} in slot {row.slot!r}, which this model lacks")
            place = 0, slots.index(row.slot), names.index(row.blueprint)
            if free[0, place[1]]:
                fitted[place], held_out[place] = row.promise, row.promise_held_out
        return Promises(fitted, held_out, np.zeros(1, np.bool_))

    def state_dict(self) -> dict[str, Any]:
        return {name: to_plain([tuple(batch) for batch in batches]) for name, batches in self._batches.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for slot in self._model.slots.values():
            move = methodcaller("to", slot.like.device)
            self._batches[slot.name] = deque(
                GradientBatch(
                    tuple(inputs), gradients, {Context(name): tensor for name, tensor in contexts.items()}
                ).map(move)
                for inputs, gradients, contexts in state[slot.name]
            )
