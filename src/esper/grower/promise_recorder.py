"""Measures what blueprints promise in a model that a user's loop trains, from the passes that the loop makes anyway.

Where a minibatch's loss is a mean over its examples, its backward pass brings to every slot the functional gradients
that `esper.growth.promise` needs, divided by the number of examples. So no loss function is needed: features and
gradients of the newest examples are recorded, and candidates are measured by them when promises are due.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper.engine.backend import Promises
from esper.engine.budget import TRAINING_PASSES
from esper.errors import ConfigError, LookError
from esper.growth.blueprints.registry import Blueprint, Context, LayerCall
from esper.growth.look import Candidate, Look, measure_promise, raise_precision
from esper.growth.model import GrowingModel
from esper.growth.promise import GRAM_BYTES
from esper.growth.side_pass import RecordedGradients
from esper.growth.slot import Slot
from esper.numerics.arrays import Bools
from esper.serialization.state_files import to_plain

_SEED, _DRAW = 0, 0
"""Random seed of the initial values of candidates, as in populations."""
MIN_EXAMPLES = 2
"""Fewest examples that can be split into two halves."""
MIN_USED_EXAMPLES = 32
"""Examples that are used however many parameters a blueprint has."""
_BYTES = torch.float32.itemsize
_CALLER = 9
"""Calls between a warning and the loop that called `esper.Grower.step`."""


class RecordedBatch(NamedTuple):
    """Some examples of one minibatch at one slot."""

    features: Tensor
    """Features of the slot, ``[B, ...]``."""
    inputs: Tensor | None
    """Inputs of the network, ``[B, ...]``; None where no blueprint reads them, or they are not available."""
    gradients: Tensor
    """Gradient of each example's own loss with respect to the features, ``[B, ...]``, up to one factor for all."""
    first: Tensor | None
    """First argument of the layer, ``[B, ...]``; None where no blueprint reads it, or it is not a tensor."""
    single_argument: bool
    """Whether the layer had no other argument."""
    source: Tensor | None = None
    """Input of the layer that makes the hidden units which the layer reads, ``[B, ...]``; None where no blueprint reads
    it."""

    def map(self, change: Callable[[Tensor], Tensor]) -> RecordedBatch:
        """The recorded batch with its tensors changed."""
        return RecordedBatch._make(change(part) if isinstance(part, Tensor) else part for part in self)


class PromiseRecorder:
    """Records features and functional gradients at the slots, and measures what the ``kinds`` promise there.

    It measures by so many of the newest ``examples``, and calls ``add_flops`` with the FLOPs that this takes. Of
    several processes only one is ``active``, and records.
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
        self._batches: dict[str, deque[RecordedBatch]] = {name: deque() for name in model.slots}
        self._warned: set[str] = set()

    @property
    def empty(self) -> bool:
        """Whether nothing is recorded."""
        return not any(self._batches.values())

    def set_recording(self, recording: bool) -> None:
        """Record from now on, or stop."""
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
        # What blueprints here read, where it is of the same examples: part of the host may be called alone.
        read = {kind.context for kind in self._kinds if kind.name in slot.blueprints}
        inputs = slot.tap.inputs if Context.NETWORK in read else None
        first = call.first_argument if Context.LAYER in read else None
        source = slot.source.inputs if slot.source is not None and Context.HIDDEN in read else None
        inputs, first, source = (
            None if tensor is None or len(tensor) != len(features) else tensor.detach()[: self._examples].clone()
            for tensor in (inputs, first, source)
        )
        # Without its gradient yet, which the backward pass brings.
        kept, no_gradients = features.detach()[: self._examples].clone(), features.detach()[:0]
        batch = RecordedBatch(kept, inputs, no_gradients, first, call.has_single_argument, source)
        leaf.register_hook(partial(self._record_gradient, slot.name, batch))
        return features

    @torch.no_grad()
    def _record_gradient(self, name: str, batch: RecordedBatch, gradient: Tensor) -> None:
        """Keep the newest examples: no minibatch more than it takes to have enough."""
        # The gradient is of a mean over the batch; in half precision the product, or a scaled loss, might overflow.
        gradients = raise_precision(gradient.detach()[: len(batch.features)]) * len(gradient)
        if self._scaler is not None:
            gradients = gradients / self._scaler.scale(torch.ones((), device=gradients.device))
        batches = self._batches[name]
        if batches and batches[-1].features is batch.features:  # another loss of the same forward pass
            batches[-1] = batches[-1]._replace(gradients=batches[-1].gradients + gradients)
            return
        batches.append(batch._replace(gradients=gradients))
        while sum(len(kept.gradients) for kept in batches) - len(batches[0].gradients) >= self._examples:
            batches.popleft()

    def measure(self, free: Bools) -> Promises:
        """Measure the promises in the slots ``free``, bool ``[1, S]``; missing if too little was recorded for any."""
        fitted, held_out = np.full((2, 1, len(self._model.slots), len(self._kinds)), np.nan)
        requested = False
        with torch.no_grad(), torch.autocast(self._model.slots.values()[0].anchor.device.type, enabled=False):
            for place, slot in enumerate(self._model.slots.values()):
                for index, kind in enumerate(self._kinds):
                    if free[0, place] and kind.name in slot.blueprints and slot.enabled:
                        requested = True
                        candidate = self._measure_candidate(place, slot, kind)
                        if candidate is not None:
                            fitted[0, place, index] = candidate.promise
                            held_out[0, place, index] = candidate.promise_held_out
        return Promises(fitted, held_out, np.array([requested and not np.isfinite(fitted).any()]))

    def _measure_candidate(self, place: int, slot: Slot, kind: type[Blueprint]) -> Candidate | None:
        """The candidate measured by the newest examples, fewer for a very large blueprint; None: there are too few."""
        # Few enough examples that their Gram matrix fits into memory.
        bound = GRAM_BYTES // (_BYTES * max(kind.parameters_at(slot.site), 1))
        batches = self._select_newest(slot.name, min(self._examples, max(bound, MIN_USED_EXAMPLES)))
        examples = sum(len(batch.gradients) for batch in batches)
        inputs = [batch.inputs for batch in batches if batch.inputs is not None]
        if examples < MIN_EXAMPLES:
            self._warn_once(slot.name, f"no gradients were recorded at slot {slot.name!r}")
            return None
        if kind.context is Context.NETWORK and len(inputs) < len(batches):
            self._warn_once(kind.name, f"blueprint {kind.name!r} reads the network's input, which was not recorded")
            return None
        # Cost: gradients with respect to the parameters for each example, and their inner products.
        gram = 2 * examples**2 * kind.parameters_at(slot.site)
        self._add_flops(TRAINING_PASSES * examples * kind.flops_at(slot.site) + gram)
        recorded = RecordedGradients(
            [],
            [batch.features for batch in batches],
            [batch.gradients for batch in batches],
            [batch.first for batch in batches if batch.first is not None],
            all(batch.single_argument for batch in batches),
            [batch.source for batch in batches if batch.source is not None],
        )
        try:
            return measure_promise(slot, kind, recorded, inputs, [(_SEED, place, _DRAW)])
        except LookError as error:
            self._warn_once(kind.name, str(error))
            return None

    def _select_newest(self, name: str, count: int) -> list[RecordedBatch]:
        """The newest examples, at most ``count``, without minibatches whose gradients were not finite."""
        batches: list[RecordedBatch] = []
        for batch in reversed(self._batches[name]):
            if count and bool(batch.gradients.isfinite().all()):
                part = slice(min(count, len(batch.gradients)))
                batches.insert(0, batch.map(lambda tensor, part=part: tensor[part]))
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
        """The recorded batches, as plain values."""
        return {name: to_plain([tuple(batch) for batch in batches]) for name, batches in self._batches.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was called."""
        for slot in self._model.slots.values():
            device = slot.anchor.device
            self._batches[slot.name] = deque(
                RecordedBatch(*batch).map(lambda tensor, device=device: tensor.to(device)) for batch in state[slot.name]
            )
