"""What blueprints promise in a model that somebody trains, from the passes that the loop makes anyway.

Where a minibatch's loss is a mean over its examples, its backward pass brings to every slot the functional gradients
that `esper.growth.promise` asks for, divided by the number of examples. So nobody need say how to compute a loss: the
newest examples are kept, features and gradients, and candidates are measured by them when it is time to.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper.arrays import Floats
from esper.control.promises import PromiseRecord, PromiseSettings
from esper.errors import ConfigError, LookError
from esper.growth.blueprints.registry import Blueprint
from esper.growth.functional_gradients import Asked
from esper.growth.look import Look, promise_of
from esper.growth.model import GrowingModel
from esper.growth.slot import Slot
from esper.state import to_plain

_SEED, _DRAW = 0, 0
"""Of the initial values of newborns, as in populations."""


class _Heard(NamedTuple):
    """Some examples of one minibatch at one slot."""

    features: Tensor
    """``[B, ...]``."""
    inputs: Tensor
    """Of the network, ``[B, ...]``; the features where nobody reads them."""
    wishes: Tensor
    """Gradient of each example's own loss with respect to the features, ``[B, ...]``, up to one factor for all."""


class Listener:
    """Hears what training asks for at the slots, and tells what blueprints promise there.

    Args:
        model: Attached; nobody else may listen to it.
        kinds: The K blueprints in the order of the record.
        settings: How often, and by how many examples.
        scaler: Of the loop, where it scales losses.
        active: Whether it listens at all: of several processes the first does.
    """

    def __init__(
        self,
        model: GrowingModel,
        kinds: Sequence[type[Blueprint]],
        settings: PromiseSettings,
        scaler: torch.amp.GradScaler | None,
        *,
        active: bool,
    ) -> None:
        self._active, self._listening = active, False
        self._model, self._kinds, self._scaler = model, kinds, scaler
        self.record = PromiseRecord(1, len(model.slots), len(kinds), settings)
        """What controllers see."""
        self._heard: dict[str, deque[_Heard]] = {name: deque() for name in model.slots}
        self._warned: set[str] = set()

    def listen_before(self, decision: int) -> None:
        """Listen from now on if it is to be measured at the decision of that number, from 1; forget what was heard."""
        for heard in self._heard.values():
            heard.clear()
        self._listen(self._is_due(decision))

    def measure(self, decision: int, looked: Look | None, *, trained: bool, undone: bool) -> None:
        """Take a decision into account, and measure what is promised where it is time to.

        ``looked`` tells what was measured by other hands. ``trained`` says whether the optimizer stepped since the last
        decision, ``undone`` whether that was rolled back, so that nothing is known of the model as it is.

        Raises:
            ConfigError: the model trained, but nothing was heard of it.
        """
        everyone = np.ones(1, np.bool_)
        self.record.wait(everyone)
        if looked is not None:
            self.record.record(everyone, *self._read(looked))
        elif self._is_due(decision) and not undone:
            if trained and not any(self._heard.values()):
                raise ConfigError(
                    "controllers that go by what blueprints promise listen to the backward passes of training, and "
                    "heard none, as where a model is compiled: call step(look=model.look(loss, batches)), or take "
                    "another controller, such as 'heuristic'"
                )
            self.record.record(everyone, *self._compute())

    def _listen(self, listening: bool) -> None:
        self._listening = listening
        for slot in self._model.slots.values():
            slot.listener = self._hear if listening and self._active else None

    def _is_due(self, decision: int) -> bool:
        return bool(self.record.settings.due(np.array([decision]))[0])

    def _hear(self, slot: Slot, passed: Tensor) -> Tensor:
        """Keep the slot's features until their gradient arrives, if it ever does."""
        if not torch.is_grad_enabled() or not passed.is_floating_point() or passed.is_nested:
            return passed
        hearing = passed
        if not passed.requires_grad:  # nothing before it learns, but a seed here would
            hearing = torch.zeros_like(passed, requires_grad=True)
            passed = passed + hearing
        examples = self.record.settings.examples
        features = passed.detach()[:examples].clone()
        reads = any(kind.reads_inputs for kind in self._kinds if kind.name in slot.blueprints)
        inputs = slot.tap.inputs.detach()[:examples] if reads else features
        hearing.register_hook(partial(self._keep, slot.name, features, inputs))
        return passed

    @torch.no_grad()
    def _keep(self, name: str, features: Tensor, inputs: Tensor, gradient: Tensor) -> None:
        """Keep the newest examples: no minibatch more than it takes to have enough."""
        # Of the mean over so many.
        wishes = gradient.detach()[: len(features)] * len(gradient)
        if self._scaler is not None:
            wishes = wishes / self._scaler.scale(torch.ones((), device=wishes.device))
        heard, enough = self._heard[name], self.record.settings.examples
        heard.append(_Heard(features, inputs, wishes))
        while sum(len(one.wishes) for one in heard) - len(heard[0].wishes) >= enough:
            heard.popleft()

    def _compute(self) -> tuple[Floats, Floats]:
        """Fitted and held-out promise ``[1, S, K]``; NaN where too little was heard."""
        fitted, held_out = np.full((2, *self.record.fitted.shape), np.nan)
        with torch.no_grad(), torch.autocast(self._model.slots.values()[0].anchor.device.type, enabled=False):
            for place, slot in enumerate(self._model.slots.values()):
                asked, inputs = self._newest(slot.name)
                if sum(map(len, asked.wishes)) < 2:
                    self._warn(slot.name, f"nothing is known of what training asks for at slot {slot.name!r}")
                    continue
                for index, kind in enumerate(self._kinds):
                    if kind.name not in slot.blueprints:
                        continue
                    try:
                        found = promise_of(slot, kind, asked, inputs, [(_SEED, place, _DRAW)])
                    except LookError as error:
                        self._warn(kind.name, str(error))
                        continue
                    fitted[0, place, index], held_out[0, place, index] = found.promise, found.promise_held_out
        return fitted, held_out

    def _warn(self, about: str, why: str) -> None:
        """Once."""
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(f"{why}: controllers that go by promises plant nothing there", stacklevel=6)

    def _newest(self, name: str) -> tuple[Asked, list[Tensor]]:
        """The newest examples, no more than are wanted, without minibatches whose loss was not finite."""
        asked, inputs, left = Asked(), list[Tensor](), self.record.settings.examples
        for one in reversed(self._heard[name]):
            if left and bool(one.wishes.isfinite().all()):
                count = min(left, len(one.wishes))
                asked.features.insert(0, one.features[:count])
                asked.wishes.insert(0, one.wishes[:count])
                inputs.insert(0, one.inputs[:count])
                left -= count
        return asked, inputs

    def _read(self, looked: Look) -> tuple[Floats, Floats]:
        """What `GrowingModel.look` found, in the order of the record."""
        fitted, held_out = np.full((2, *self.record.fitted.shape), np.nan)
        slots, names = list(self._model.slots), [kind.name for kind in self._kinds]
        for row in looked.rows:
            if row.slot not in slots or row.blueprint not in names:
                raise ConfigError(
                    f"look: it tells of {row.blueprint!r} in slot {row.slot!r}, which is not of this model"
                )
            place = 0, slots.index(row.slot), names.index(row.blueprint)
            fitted[place], held_out[place] = row.promise, row.promise_held_out
        return fitted, held_out

    def state_dict(self) -> dict[str, Any]:
        """What is known, and what was heard since the last decision, as plain values."""
        heard = {name: [tuple(one) for one in kept] for name, kept in self._heard.items()}
        return {"record": self.record.state_dict(), "listening": self._listening, "heard": to_plain(heard)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was called.

        Raises:
            CheckpointError: it is of other slots.
        """
        self.record.load_state_dict(state["record"])
        for slot in self._model.slots.values():
            kept = (tuple(part.to(slot.anchor.device) for part in one) for one in state["heard"][slot.name])
            self._heard[slot.name] = deque(_Heard(*one) for one in kept)
        self._listen(state["listening"])
