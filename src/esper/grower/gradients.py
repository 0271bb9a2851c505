"""Records the gradients of a model's host and modules as backward passes bring them: before anything clips them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, cast
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn

from esper.engine.gradients import HealthTable, assess_health
from esper.growth.model import GrowingModel
from esper.growth.sharding import combine_norms, count_copies, local_part
from esper.numerics.arrays import Floats
from esper.serialization.state_files import to_plain


class GradientRecorder:
    """Records gradient norms at every step of the optimizer, without waiting for a device, but for other processes.

    The gradients of a step are those that its last backward pass left: accumulated over the passes since they were
    zeroed, before they are clipped or averaged over processes. A gradient that was written by hand is taken as it is
    after the step. Where processes share parameters (FSDP2), gradients arrive as averages, and the processes add up
    the norms of their parts.

    Args:
        model: Its host is recorded; modules are to be given to `watch` as they come.
        optimizer: Each of its steps counts as a minibatch.
        scaler: Where losses are scaled: norms are those of the losses themselves.
    """

    def __init__(
        self, model: GrowingModel, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None
    ) -> None:
        self._model = model
        self._scaler = scaler
        self._arrived: dict[Tensor, Tensor] = {}
        """The norms of gradients since the last step, by parameter."""
        self._norms: list[Tensor] = []
        """Gradient norms of the host and of the module in each slot, ``[1 + S]`` per minibatch since the last
        `clear`."""
        self._watched: WeakSet[nn.Module] = WeakSet()
        self.watch([model.host])
        # After the step: trainers such as Lightning compute the gradients within it.
        optimizer.register_step_post_hook(self._record_step)

    def watch(self, modules: Iterable[nn.Module]) -> None:
        """Record the gradients of all parameters in ``modules`` from now on."""
        register_gradient_hooks(modules, self.record_norm, self._watched)

    def record_norm(self, parameter: Tensor) -> None:
        """Record the norm of the gradient that ``parameter`` has now."""
        assert parameter.grad is not None
        self._arrived[parameter] = self._compute_norm(parameter.grad)

    @torch.no_grad()
    def _record_step(self, *_: Any) -> None:
        slots = self._model.slots.values()
        norms = torch.zeros(1 + len(slots), device=slots[0].anchor.device)
        for place, part in enumerate([self._model.host, *(slot.seed for slot in slots)]):
            part_norms = [
                self._arrived[parameter] if parameter in self._arrived else self._compute_norm(parameter.grad)
                for parameter in (() if part is None else part.parameters())
                if parameter.grad is not None
            ]
            if part_norms:
                norms[place] = torch.linalg.vector_norm(torch.stack([norm.to(norms.device) for norm in part_norms]))
        if self._model.sharded:
            norms = combine_norms(norms.to(next(self._model.host.parameters()).device))
        self._norms.append(norms if self._scaler is None else norms / self._scaler.scale(torch.ones_like(norms)))
        self._arrived.clear()

    def _compute_norm(self, gradient: Tensor) -> Tensor:
        """This process's part of the norm."""
        values = gradient.coalesce().values() if gradient.is_sparse else local_part(gradient)
        # Detached, as gradients that are differentiated again have a graph of their own.
        norm = cast(Tensor, torch.linalg.vector_norm(values.detach()))
        return norm / math.sqrt(count_copies(gradient)) if self._model.sharded else norm

    @property
    def stepped(self) -> bool:
        """Whether the optimizer has stepped since `clear`."""
        return bool(self._norms)

    @property
    def idle(self) -> bool:
        """Whether the optimizer has stepped since `clear`, and all gradients of the last minibatch were zero."""
        return bool(self._norms) and not bool(self._norms[-1].any())

    def report(self) -> tuple[Floats, Floats, HealthTable]:
        """Norms of the host ``[1]`` and of the modules ``[1, S]`` in the last minibatch, and the modules' health."""
        owners = [slot.seed for slot in self._model.slots.values()]
        if not self._norms:
            return np.zeros(1), np.zeros((1, len(owners))), HealthTable.none(1, len(owners))
        norms = torch.stack(self._norms).to("cpu", torch.float64).numpy()
        hosts, seeds = norms[:, :1], norms[:, None, 1:]
        health = assess_health(
            hosts,
            seeds,
            host_parameters=np.array([_count_learning(self._model.host)]),
            seed_parameters=np.array([[0 if seed is None else _count_learning(seed) for seed in owners]]),
            fossils=np.array([[seed is not None and seed.fossilized for seed in owners]]),
            learning=np.array([[seed is not None and _count_learning(seed) > 0 for seed in owners]]),
        )
        return hosts[-1], seeds[-1], health

    def clear(self) -> None:
        """Forget the minibatches so far: a decision was taken on them."""
        self._norms.clear()

    def state_dict(self) -> dict[str, Any]:
        """The norms since `clear`, as plain values."""
        return to_plain({"norms": self._norms})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was called."""
        device = self._model.slots.values()[0].anchor.device
        self._norms = [norms.to(device) for norms in state["norms"]]


def _count_learning(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def register_gradient_hooks(
    modules: Iterable[nn.Module], callback: Callable[[Tensor], None], seen: WeakSet[nn.Module]
) -> None:
    """Call ``callback`` with every parameter in ``modules`` whenever a backward pass has added to its gradient.

    Modules in ``seen`` are left out, and the others are added to it. Callbacks run in registration order.
    """
    for module in modules:
        if module in seen:
            continue
        seen.add(module)
        for parameter in module.parameters():
            if not (parameter.is_floating_point() or parameter.is_complex()):
                continue  # quantised: it cannot learn
            learns = parameter.requires_grad
            parameter.requires_grad_(True)  # only then torch takes a hook
            parameter.register_post_accumulate_grad_hook(callback)
            parameter.requires_grad_(learns)
