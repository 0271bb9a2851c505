"""What blueprints promise in a model that somebody trains, from the passes that the loop makes anyway.

Where a minibatch's loss is a mean over its examples, its backward pass brings to every slot the functional gradients
that `esper.growth.promise` asks for, divided by the number of examples. So nobody need say how to compute a loss: the
newest examples are kept, features and gradients, and candidates are measured by them when it is time to.
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

from esper.engine.budget import TRAINING_PASSES
from esper.engine.promises import PromiseRecord, PromiseSettings
from esper.errors import ConfigError, LookError, SlotError
from esper.growth.blueprints.registry import Blueprint, Context, LayerCall
from esper.growth.look import Candidate, Look, measure_promise, raise_precision
from esper.growth.model import GrowingModel
from esper.growth.promise import GRAM_BYTES
from esper.growth.side_pass import RecordedGradients
from esper.growth.slot import Slot
from esper.numerics.arrays import Bools, Floats
from esper.serialization.state_files import to_plain

_SEED, _DRAW = 0, 0
"""Of the initial values of newborns, as in populations."""
LEAST = 2
"""Examples of which there are two halves."""
FEWEST_EXAMPLES = 32
"""Asked however many parameters a blueprint has."""
_BYTES = torch.float32.itemsize
_CALLER = 10
"""Calls between a warning and the loop that called `esper.Grower.step`."""


class _Heard(NamedTuple):
    """Some examples of one minibatch at one slot."""

    features: Tensor
    """``[B, ...]``."""
    inputs: Tensor | None
    """Of the network, ``[B, ...]``; None where nobody reads them, or they are not known."""
    wishes: Tensor
    """Gradient of each example's own loss with respect to the features, ``[B, ...]``, up to one factor for all."""
    first: Tensor | None
    """The layer's first argument, ``[B, ...]``; None where nobody reads it, or it is no tensor."""
    alone: bool
    """Whether the layer had no other argument."""

    def map(self, change: Callable[[Tensor], Tensor]) -> _Heard:
        """The recorded batch with its tensors changed."""
        first, inputs = (None if part is None else change(part) for part in (self.first, self.inputs))
        return _Heard(change(self.features), inputs, change(self.wishes), first, self.alone)


class Listener:
    """Hears what training asks for at the slots, and tells what blueprints promise there.

    Args:
        model: Attached; nobody else may listen to it.
        kinds: The K blueprints in the order of the record.
        settings: How often, and by how many examples.
        scaler: Of the loop, where it scales losses.
        spend: Is told what FLOPs measuring takes.
        active: Whether it listens at all: of several processes the first does, and all where they share the model,
            since to listen may change what a backward pass computes.
    """

    def __init__(
        self,
        model: GrowingModel,
        kinds: Sequence[type[Blueprint]],
        settings: PromiseSettings,
        scaler: torch.amp.GradScaler | None,
        spend: Callable[[float], None],
        *,
        active: bool,
    ) -> None:
        self._active, self._owed = active, False
        self._model, self._kinds, self._scaler, self._spend = model, kinds, scaler, spend
        self.record = PromiseRecord(1, len(model.slots), len(kinds), settings)
        """What controllers see."""
        self._heard: dict[str, deque[_Heard]] = {name: deque() for name in model.slots}
        self._warned: set[str] = set()

    def prepare(self, decision: int, look: Look | None, *, trained: bool) -> None:
        """Before anything is measured for a decision: refuse what could not be decided.

        Raises:
            ConfigError: it is time to measure, the optimizer stepped, but nothing was heard of it, and there is no
                ``look``.
        """
        if look is None and trained and self.is_due(decision) and not any(self._heard.values()):
            raise ConfigError(
                "the controller goes by what blueprints promise, and listens to the backward passes of training, but "
                "heard none, as where a model is compiled: call step(look=model.look(loss, batches)) where "
                "grower.looks_next says so, or take another controller"
            )

    def measure(self, decision: int, look: Look | None, free: Bools, *, trained: bool, undone: bool) -> bool:
        """Take a decision into account, and measure what is promised in ``free`` slots, bool ``[S]``, if it is time to.

        ``look`` tells what was measured by other hands. ``undone`` says that the training was rolled back, so that
        nothing is known of the model as it is: then, as where no finite gradient was heard, it is due at the next, as
        the answer says.

        Raises:
            ConfigError: ``look`` is of another model.
        """
        everyone, due = np.ones(1, np.bool_), self.is_due(decision)
        self.record.advance_age(everyone)
        found = None
        if look is not None:
            found = self._read(look, free)
        elif due and trained and not undone:
            found = self._compute(free)
        if found is not None:
            self.record.record(everyone, *found)
        return due and found is None

    def forget(self, *, owed: bool) -> None:
        """Forget what was heard; whether that was of no use, and measuring is due at the next decision."""
        self._owed = owed
        for heard in self._heard.values():
            heard.clear()

    def listen_before(self, decision: int) -> None:
        """Listen from now on, if it is to be measured at the decision of that number, from 1."""
        self._listen(self.is_due(decision))

    def is_due(self, decision: int) -> bool:
        """Whether it is to be measured at the decision of that number."""
        return self._owed or bool(self.record.settings.is_due(np.array([decision]))[0])

    def rest(self) -> None:
        """Listen no more until `listen_before`."""
        self._listen(False)

    def _listen(self, listening: bool) -> None:
        for slot in self._model.slots.values():
            slot.feature_hook = self._hear if listening and self._active else None

    def _hear(self, slot: Slot, call: LayerCall, passed: Tensor) -> Tensor:
        """Keep the slot's features until their gradient arrives, if it ever does."""
        if not torch.is_grad_enabled() or not passed.is_floating_point() or passed.is_nested:
            return passed
        hearing = passed
        if not passed.requires_grad:  # nothing before it learns, but a seed here would
            hearing = torch.zeros_like(passed, requires_grad=True)
            passed = passed + hearing
        most = self.record.settings.examples
        first = call.first_argument if self._offers(slot, Context.LAYER) else None
        heard = _Heard(
            passed.detach()[:most].clone(),
            self._find_inputs(slot, passed),
            passed.detach()[:0],
            None if first is None or len(first) != len(passed) else first.detach()[:most].clone(),
            call.has_single_argument,
        )
        hearing.register_hook(partial(self._keep, slot.name, heard))
        return passed

    def _offers(self, slot: Slot, context: Context) -> bool:
        """Whether a blueprint on offer there reads such."""
        return any(kind.context is context for kind in self._kinds if kind.name in slot.blueprints)

    def _find_inputs(self, slot: Slot, passed: Tensor) -> Tensor | None:
        """The network's, for as many examples, where somebody reads them and they are of this pass."""
        if not self._offers(slot, Context.NETWORK):
            return None
        try:
            inputs = slot.tap.inputs
        except SlotError:  # a part of the host was called alone
            return None
        return inputs.detach()[: self.record.settings.examples] if len(inputs) == len(passed) else None

    @torch.no_grad()
    def _keep(self, name: str, found: _Heard, gradient: Tensor) -> None:
        """Keep the newest examples: no minibatch more than it takes to have enough."""
        # Of the mean over so many; in half precision the product, or a scaled loss, might overflow.
        wishes = raise_precision(gradient.detach()[: len(found.features)]) * len(gradient)
        if self._scaler is not None:
            wishes = wishes / self._scaler.scale(torch.ones((), device=wishes.device))
        heard, enough = self._heard[name], self.record.settings.examples
        if heard and heard[-1].features is found.features:  # another loss of the same forward pass
            heard[-1] = heard[-1]._replace(wishes=heard[-1].wishes + wishes)
            return
        heard.append(found._replace(wishes=wishes))
        while sum(len(one.wishes) for one in heard) - len(heard[0].wishes) >= enough:
            heard.popleft()

    def _compute(self, free: Bools) -> tuple[Floats, Floats] | None:
        """Fitted and held-out promise ``[1, S, K]``, NaN in taken slots and where too little was heard.

        None: there are free slots to measure, but too little was heard in all of them.
        """
        fitted, held_out = np.full((2, *self.record.fitted.shape), np.nan)
        wanted = False
        with torch.no_grad(), torch.autocast(self._model.slots.values()[0].anchor.device.type, enabled=False):
            for place, slot in enumerate(self._model.slots.values()):
                for index, kind in enumerate(self._kinds):
                    if free[place] and kind.name in slot.blueprints and slot.enabled:
                        wanted = True
                        found = self._promise_of(place, slot, kind)
                        if found is not None:
                            fitted[0, place, index], held_out[0, place, index] = found.promise, found.promise_held_out
        return (fitted, held_out) if np.isfinite(fitted).any() or not wanted else None

    def _promise_of(self, place: int, slot: Slot, kind: type[Blueprint]) -> Candidate | None:
        """By the newest examples, as many as are wanted, or fewer where a blueprint has very many parameters."""
        if kind.context is Context.CALL and slot.sharding is not None:
            # All processes would have to gather the block's parameters, and one measures.
            self._warn(kind.name, f"blueprint {kind.name!r} copies a block whose parameters processes share")
            return None
        bound = GRAM_BYTES // (_BYTES * max(kind.parameters_at(slot.site), 1))
        heard = self._newest(slot.name, min(self.record.settings.examples, max(bound, FEWEST_EXAMPLES)))
        firsts = [one.first for one in heard if one.first is not None]
        alone = all(one.alone for one in heard)
        asked = RecordedGradients([], [one.features for one in heard], [one.wishes for one in heard], firsts, alone)
        inputs = [one.inputs for one in heard if one.inputs is not None]
        if sum(map(len, asked.gradients)) < LEAST:
            self._warn(slot.name, f"nothing was heard of what training asks for at slot {slot.name!r}")
            return None
        if kind.context is Context.NETWORK and len(inputs) < len(heard):
            self._warn(kind.name, f"blueprint {kind.name!r} reads the network's input, of which nothing was heard")
            return None
        examples = sum(map(len, asked.gradients))
        gram = 2 * examples**2 * kind.parameters_at(slot.site)
        self._spend(TRAINING_PASSES * examples * kind.flops_at(slot.site) + gram)
        try:
            return measure_promise(slot, kind, asked, inputs, [(_SEED, place, _DRAW)])
        except LookError as error:
            self._warn(kind.name, str(error))
            return None

    def _newest(self, name: str, wanted: int) -> list[_Heard]:
        """The newest examples, no more than are ``wanted``, without minibatches whose gradients were not finite."""
        found: list[_Heard] = []
        for one in reversed(self._heard[name]):
            if wanted and bool(one.wishes.isfinite().all()):
                part = slice(min(wanted, len(one.wishes)))
                found.insert(0, one.map(lambda tensor, part=part: tensor[part]))
                wanted -= len(found[0].wishes)
        return found

    def _warn(self, about: str, why: str) -> None:
        """Warn once."""
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(f"{why}: controllers that go by promises plant nothing there", stacklevel=_CALLER)

    def _read(self, looked: Look, free: Bools) -> tuple[Floats, Floats]:
        """What `GrowingModel.look` found in free slots, in the order of the record."""
        fitted, held_out = np.full((2, *self.record.fitted.shape), np.nan)
        slots, names = list(self._model.slots), [kind.name for kind in self._kinds]
        for row in looked.rows:
            if row.slot not in slots or row.blueprint not in names:
                raise ConfigError(
                    f"look: it tells of {row.blueprint!r} in slot {row.slot!r}, which is not of this model"
                )
            place = 0, slots.index(row.slot), names.index(row.blueprint)
            if free[place[1]]:
                fitted[place], held_out[place] = row.promise, row.promise_held_out
        return fitted, held_out

    def state_dict(self) -> dict[str, Any]:
        """What is known, and what was heard since the last decision, as plain values."""
        heard = {name: [tuple(one) for one in kept] for name, kept in self._heard.items()}
        return {"record": self.record.state_dict(), "owed": self._owed, "heard": to_plain(heard)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was called.

        Raises:
            CheckpointError: it is of other slots.
        """
        self.record.load_state_dict(state["record"])
        self._owed = bool(state["owed"])
        for slot in self._model.slots.values():
            device = slot.anchor.device
            self._heard[slot.name] = deque(
                _Heard(*one).map(lambda tensor, device=device: tensor.to(device)) for one in state["heard"][slot.name]
            )
