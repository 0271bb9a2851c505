"""Gradients of a model's host and seeds, as backward passes bring them: before anything clips them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, cast
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn

from esper.growth.model import GrowingModel
from esper.growth.sharding import combine_norms, count_copies, local_part
from esper.numerics.arrays import Floats, replace_where
from esper.population.gradients import GradientNorms, HealthTable, assess_health
from esper.serialization.state_files import to_plain


class Gradients:
    """Looks at the gradients of every step of the optimizer, without waiting for a device, but for other processes.

    What a step is said to have had are the gradients that its last backward pass left: added up over the passes since
    they were zeroed, before they are clipped or averaged over processes. A gradient that was put there by another hand
    is seen as it is after the step. Where processes share parameters (FSDP2), gradients arrive as averages, and
    the processes add up the norms of their parts.

    Args:
        model: Its host is watched; seeds are to be given to `watch` as they come.
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
        """Gradient norms of the host and of the seed in each slot, ``[1 + S]`` per minibatch since the last report."""
        self._watched: WeakSet[nn.Module] = WeakSet()
        self.watch([model.host])
        # After the step: trainers such as Lightning compute the gradients within it.
        optimizer.register_step_post_hook(self._observe)

    def watch(self, modules: Iterable[nn.Module]) -> None:
        """See the gradients of all parameters in ``modules`` from now on."""
        on_gradients(modules, self.take_in, self._watched)

    def take_in(self, parameter: Tensor) -> None:
        """See the gradient that ``parameter`` has now."""
        assert parameter.grad is not None
        self._arrived[parameter] = self._norm(parameter.grad)

    @torch.no_grad()
    def _observe(self, *_: Any) -> None:
        slots = self._model.slots.values()
        norms = torch.zeros(1 + len(slots), device=slots[0].anchor.device)
        for place, part in enumerate([self._model.host, *(slot.seed for slot in slots)]):
            learned = [] if part is None else [(own, own.grad) for own in part.parameters()]
            found = [
                self._get_norm(own, gradient).to(norms.device) for own, gradient in learned if gradient is not None
            ]
            if found:
                norms[place] = torch.linalg.vector_norm(torch.stack(found))
        if self._model.sharded:
            norms = combine_norms(norms.to(next(self._model.host.parameters()).device))
        self._norms.append(norms if self._scaler is None else norms / self._scaler.scale(torch.ones_like(norms)))
        self._arrived.clear()

    def _get_norm(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        return self._arrived[parameter] if parameter in self._arrived else self._norm(gradient)

    def _norm(self, gradient: Tensor) -> Tensor:
        """Of what this process has to add to that of the whole."""
        values = gradient.coalesce().values() if gradient.is_sparse else local_part(gradient)
        # Detached, as gradients that are differentiated again have a graph of their own.
        norm = cast(Tensor, torch.linalg.vector_norm(values.detach()))
        return norm / math.sqrt(count_copies(gradient)) if self._model.sharded else norm

    def state_dict(self) -> dict[str, Any]:
        """What was seen since the last report, as plain values."""
        return to_plain({"norms": self._norms})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take `state_dict`'s as what was seen since the last report."""
        device = self._model.slots.values()[0].anchor.device
        self._norms = [norms.to(device) for norms in state["norms"]]

    @property
    def stepped(self) -> bool:
        """Whether the optimizer stepped since the last report."""
        return bool(self._norms)

    @property
    def idle(self) -> bool:
        """Whether the optimizer stepped since the last report, and no gradient was there in the last minibatch."""
        return bool(self._norms) and not bool(self._norms[-1].any())

    def report(self) -> tuple[Floats, Floats, HealthTable]:
        """Norms in the last minibatch of the host ``[1]`` and of the seeds ``[1, S]``, and the seeds' health."""
        slots = len(self._model.slots)
        if not self._norms:
            return np.zeros(1), np.zeros((1, slots)), HealthTable.none(1, slots)
        norms = torch.stack(self._norms).to("cpu", torch.float64).numpy()
        self._norms.clear()
        hosts, seeds = norms[:, :1], norms[:, None, 1:]
        return hosts[-1], seeds[-1], self._health(hosts, seeds)

    def _health(self, hosts: Floats, seeds: Floats) -> HealthTable:
        """From norms ``[T, 1]`` and ``[T, 1, S]``; the incumbents of a seed are the host and all fossils."""
        owners = [slot.seed for slot in self._model.slots.values()]
        fossils = np.array([[seed is not None and seed.fossilized for seed in owners]])
        sizes = np.array([[0 if seed is None else _size(seed.parameters()) for seed in owners]])
        learning = np.array([[seed is not None and any(p.requires_grad for p in seed.parameters()) for seed in owners]])
        incumbents = np.sqrt(hosts**2 + np.where(fossils, seeds**2, 0.0).sum(2))[..., None]
        counted = np.array([[_size(self._model.host.parameters()) + int((sizes * fossils).sum())]])
        health = assess_health(GradientNorms(seeds, sizes), GradientNorms(incumbents, counted))
        return replace_where(learning, HealthTable.none(*sizes.shape), health)


def _size(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)


def on_gradients(modules: Iterable[nn.Module], told: Callable[[Tensor], None], known: WeakSet[nn.Module]) -> None:
    """Call ``told`` with every parameter in ``modules`` whenever a backward pass has added to its gradient.

    Those of ``known`` modules are left out; the others become known. What is told first hears first.
    """
    for module in modules:
        if module in known:
            continue
        known.add(module)
        for parameter in module.parameters():
            if not (parameter.is_floating_point() or parameter.is_complex()):
                continue  # quantised: it cannot learn
            learns = parameter.requires_grad
            parameter.requires_grad_(True)  # only then torch takes a hook
            parameter.register_post_accumulate_grad_hook(told)
            parameter.requires_grad_(learns)
