"""Evidence ``refit``: every seed on trial is compared with a model that trains on without it.

What a model loses when a seed is switched off is not what it has gained by it: host and seed have trained together, so
the host has come to lean on the seed. Where both the model and a fork without the seed train on for a little while, the
host gets over that, and the difference between the two is close to what the seed brings in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from esper.errors import ConfigError
from esper.grower.counterfactual import Counterfactual
from esper.grower.fork import Fork
from esper.grower.passes import Passes
from esper.grower.shadow import LEARN_APART_LINE, Loss
from esper.growth.aside import aside
from esper.growth.model import GrowingModel
from esper.lifecycle.stages import Stage
from esper.lifecycle.table import Evidence, SeedTable

T = TypeVar("T")

REFIT = 2
"""Decisions after which a fork has got over the loss of its seed."""


class Refit:
    """Measures as `Passes`, but seeds on trial against forks that it trains beside the model.

    Args:
        passes: How the model and its other seeds are measured.
        optimizer: The model's.
        kind: Under ``dependence`` there are no forks.
        loss: As in `esper.grower.shadow.require_loss`.
        scaler: Where losses are scaled.
        average: Makes a parameter's gradient that of all processes.
    """

    def __init__(
        self,
        passes: Passes,
        optimizer: torch.optim.Optimizer,
        kind: Counterfactual,
        loss: Loss | None,
        scaler: torch.amp.GradScaler | None,
        average: Callable[[Tensor], None],
    ) -> None:
        self.model: GrowingModel = passes.model
        self._passes = passes
        self._optimizer = optimizer
        self._loss = loss if kind is Counterfactual.REFIT else None
        self._scaler = scaler
        self._average = average
        self._forks: dict[str, Fork] = {}
        self._ripe: set[str] = set()
        """Slots whose forks are old enough to be compared with at the next decision."""
        self._arrived = False
        """Whether forks have had a gradient since the optimizer's last step."""
        self._minibatches = 0
        """From which forks have learned since the last decision."""
        optimizer.register_step_pre_hook(self._arrange)
        optimizer.register_step_post_hook(self._step)

    @property
    def forks(self) -> dict[str, Fork]:
        """By the slots whose seeds are on trial."""
        trials = {name: seed for name, seed in self.model.seeds.items() if not seed.fossilized}
        return {name: fork for name, fork in self._forks.items() if fork.seed is trials.get(name)}

    def attend(self, table: SeedTable, evidence: Evidence) -> Evidence:
        """After a decision that led to ``table``: fork the model for seeds that are held from now on.

        Returns the evidence without what was known of those seeds. Forks of seeds that are not held any more are gone.
        """
        begun = np.zeros(table.stage.shape, np.bool_)
        self._minibatches = 0
        if self._loss is None:
            return evidence
        slots = self.model.slots.values()
        seeds = [slot.seed for slot, counts in zip(slots, table.blended[0].tolist(), strict=True) if counts]
        present, self._forks = self.forks, {}
        held = np.flatnonzero(table.stage[0] == Stage.HOLDING).tolist()
        for place in held:
            slot = slots[place]
            counting = [self.model.host, *(seed for seed in seeds if seed is not None and seed is not slot.seed)]
            fork = present.get(slot.name)
            if fork is None:
                fork = Fork(self.model, self._optimizer, slot, counting)
                begun[0, place] = True
            else:
                fork.take_in(counting)
            self._forks[slot.name] = fork
        self._ripe = {slots[place].name for place in held if table.stage_age[0, place] >= REFIT}
        return evidence.without(begun)

    def follow(self, loss: Tensor, minibatch: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Let the backward pass of ``loss`` bring forks what they learn from this minibatch.

        Their gradients are computed at once, and weighed as that pass weighs ``loss``.

        Raises:
            ConfigError: the loss that was given does not depend on a fork alone.
        """
        compute, forks = self._loss, list(self.forks.values())
        if compute is None or not forks or not loss.requires_grad:
            return
        brought: list[dict[torch.nn.Parameter, Tensor]] = []
        for fork in forks:
            with aside(self.model, ()), torch.enable_grad():
                brought.append(fork.gradients(lambda: self._scaled(compute(*minibatch, **named))))
        usual = self._scaled(torch.ones_like(loss.detach()))

        def arrived(weight: Tensor) -> None:
            first = self._at_rest()
            for fork, gradients in zip(forks, brought, strict=True):
                # The one factor is in the gradients, the other in the weight.
                fork.add(gradients, weight / usual / usual, anew=first)
            self._arrived = True
            self._minibatches += 1

        loss.register_hook(arrived)

    def measure(
        self, evaluate: Callable[[GrowingModel], T], changes: Mapping[str, float], whole: T | None = None
    ) -> tuple[T, dict[str, T]]:
        """As `Passes.measure`; a seed on trial is left out until it can be compared with a fork that is old enough.

        Raises:
            ConfigError: no fork has learned since the last decision.
        """
        forks = self.forks
        if forks and not self._minibatches:
            raise ConfigError(
                f"under evidence refit the seed in slot {next(iter(forks))!r} is compared with a fork of the model, "
                f"which has learned nothing since the last decision: call {LEARN_APART_LINE} before each "
                "loss.backward()"
            )
        others = {name: weight for name, weight in changes.items() if name not in forks}
        usual, found = self._passes.measure(evaluate, others, whole)
        for name, fork in forks.items():
            if name in changes and name in self._ripe:
                found[name] = fork.run(lambda: evaluate(self.model))
        return usual, found

    def state_dict(self) -> dict[str, Any]:
        """All forks, as plain values: each as large as the model and its optimizer's state."""
        forks = {name: fork.state_dict() for name, fork in self.forks.items()}
        return {"forks": forks, "minibatches": self._minibatches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let forks be what `state_dict` told, after `attend` to the table that there was.

        Raises:
            CheckpointError: it is of another model.
        """
        for name, fork in self.forks.items():
            fork.load_state_dict(state["forks"][name])
        self._minibatches = state["minibatches"]

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss if self._scaler is None else self._scaler.scale(loss)

    def _at_rest(self) -> bool:
        """Whether the model's gradients were zeroed since they were last added to."""
        gradients = [parameter.grad for parameter in self.model.parameters()]
        return not any(gradient is not None and (gradient.is_sparse or gradient.any()) for gradient in gradients)

    def _arrange(self, *_: Any) -> None:
        # Before the step, as some optimizers count in their groups.
        for fork in self.forks.values():
            fork.arrange()

    @torch.no_grad()
    def _step(self, *_: Any) -> None:
        forks = self.forks
        arrived, self._arrived = self._arrived, False
        if forks and not arrived:
            raise ConfigError(
                f"the optimizer made a step without a gradient for the fork without the seed in slot "
                f"{next(iter(forks))!r}, which evidence refit needs: call {LEARN_APART_LINE} before each "
                "loss.backward()"
            )
        for fork in forks.values():
            for parameter in fork.learned:
                self._average(parameter)
            if self._scaler is None or all(bool(p.grad.isfinite().all()) for p in fork.learned if p.grad is not None):
                fork.step()
