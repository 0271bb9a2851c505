"""Gradient norms of a model's host and modules, recorded when backward passes add to gradients."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from esper.engine.gradients import GradientHealthSettings, HealthTable, assess_health
from esper.growth.model import GrowingModel
from esper.growth.slot import Seed
from esper.numerics.arrays import Bools, Floats
from esper.serialization import to_plain

MISSED_STEPS = 2
"""Steps of the optimizer without a gradient after which a module that never had one is warned of.

A single step may miss it rightly, as where experts are called by turns."""


def register_gradient_hooks(module: nn.Module, callback: Callable[[Tensor], None]) -> list[RemovableHandle]:
    """Call ``callback`` with every parameter in ``module`` whenever a backward pass has added to its gradient."""
    handles: list[RemovableHandle] = []
    for parameter in module.parameters():
        if not (parameter.is_floating_point() or parameter.is_complex()):
            continue  # quantised: it cannot learn
        learns = parameter.requires_grad
        parameter.requires_grad_(True)  # only then torch takes a hook
        handles.append(cast(RemovableHandle, parameter.register_post_accumulate_grad_hook(callback)))
        parameter.requires_grad_(learns)
    return handles


class GradientRecorder:
    """Records gradient norms at every step of the optimizer, without synchronizing the device.

    They are of what the last backward pass before the step left, accumulated since gradients were zeroed, before they
    are clipped or averaged over processes. A gradient that was written by hand is recorded as it is after the step.
    """

    def __init__(
        self,
        model: GrowingModel,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None,
        settings: GradientHealthSettings = GradientHealthSettings(),  # noqa: B008 (immutable)
    ) -> None:
        self._model, self._scaler, self._settings = model, scaler, settings
        self._arrived: dict[Tensor, Tensor] = {}
        """Norms since the last step."""
        self._norms: list[Tensor] = []
        """Norms of the host and of the module in each slot, ``[1 + S]`` per minibatch since `clear`."""
        self._watched: WeakSet[nn.Module] = WeakSet()
        self._reached: WeakSet[Seed] = WeakSet()
        """Modules that have had a gradient at some step, even if it was zero."""
        self._missed: WeakKeyDictionary[Seed, int] = WeakKeyDictionary()
        """Steps without a gradient, of modules that should learn and never had one, up to the last decision."""
        self.watch([model.host])
        # After the step: trainers such as Lightning compute the gradients within it.
        optimizer.register_step_post_hook(self._record_step)

    def watch(self, modules: Iterable[nn.Module]) -> None:
        """Record the gradients of all parameters in ``modules`` from now on."""
        for module in modules:
            if module not in self._watched:
                self._watched.add(module)
                register_gradient_hooks(module, self._record_norm)

    def _record_norm(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._arrived[parameter] = _compute_norm(parameter.grad)

    @torch.no_grad()
    def _record_step(self, *_: Any) -> None:
        slots = self._model.slots.values()
        norms = torch.zeros(1 + len(slots), device=slots[0].like.device)
        for place, part in enumerate([self._model.host, *(slot.seed for slot in slots)]):
            parameters = [] if part is None else list(part.parameters())
            part_norms = [
                self._arrived[parameter] if parameter in self._arrived else _compute_norm(parameter.grad)
                for parameter in parameters
                if parameter.grad is not None
            ]
            # One that was zeroed or dropped within the step did arrive.
            if isinstance(part, Seed) and (part_norms or any(parameter in self._arrived for parameter in parameters)):
                self._reached.add(part)
            if part_norms:
                norms[place] = torch.linalg.vector_norm(torch.stack([norm.to(norms.device) for norm in part_norms]))
        self._norms.append(norms if self._scaler is None else norms / self._scaler.scale(torch.ones_like(norms)))
        self._arrived.clear()

    @property
    def stepped(self) -> bool:
        """Whether the optimizer has stepped since `clear`."""
        return bool(self._norms)

    @property
    def idle(self) -> bool:
        """Whether the optimizer has stepped since `clear`, and all gradients of the last minibatch were zero."""
        return bool(self._norms) and not bool(self._norms[-1].any())

    def find_unreached(self, learning: Bools) -> Bools:
        """Slots of those ``learning``, bool ``[1, S]``, whose module no gradient ever reached although training steps.

        Called once per decision; a module is warned of once. A gradient that is zero is one.
        """
        unreached = np.zeros_like(learning)
        for place, slot in enumerate(self._model.slots.values()):
            seed = slot.seed
            if seed is None or not learning[0, place] or seed in self._reached:
                continue
            if all(name in seed.fixed for name, _ in seed.named_parameters()):
                continue  # nothing in it learns
            before = self._missed.get(seed, 0)
            self._missed[seed] = before + len(self._norms)
            unreached[0, place] = self._missed[seed] > 0
            if before < MISSED_STEPS <= self._missed[seed]:
                warnings.warn(_describe_unreached(slot.name, seed), stacklevel=5)
        return unreached

    def report(self) -> tuple[Floats, Floats, HealthTable]:
        """Norms of the host ``[1]`` and of the modules ``[1, S]`` in the last minibatch, and the modules' health."""
        seeds = [slot.seed for slot in self._model.slots.values()]
        if not self._norms:
            return np.zeros(1), np.zeros((1, len(seeds))), HealthTable.none(1, len(seeds))
        sizes = np.array([[0 if seed is None else _count_learning(seed) for seed in seeds]])
        norms = torch.stack(self._norms).to("cpu", torch.float64).numpy()
        host_norms, seed_norms = norms[:, :1], norms[:, None, 1:]
        health = assess_health(
            host_norms,
            seed_norms,
            host_parameters=np.array([_count_learning(self._model.host)]),
            seed_parameters=sizes,
            fossils=np.array([[seed is not None and seed.fossilized for seed in seeds]]),
            learning=sizes > 0,
            settings=self._settings,
        )
        return host_norms[-1], seed_norms[-1], health

    def clear(self) -> None:
        """Drop the norms on which a decision was based."""
        self._norms.clear()

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values."""
        return to_plain({"norms": self._norms})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was called."""
        device = self._model.slots.values()[0].like.device
        self._norms = [norms.to(device) for norms in state["norms"]]


def _describe_unreached(slot: str, seed: Seed) -> str:
    cause = (
        "its parameters do not require a gradient: leave requires_grad of what grows to the grower, and freeze parts "
        "of the host by attach(..., freeze_host=...)"
        if not _count_learning(seed)
        else "training does not run it, as through a handle that torch.compile made before esper.attach (compile what "
        "attach returns), through parts of the host without this slot, or under torch.no_grad"
    )
    return (
        f"the seed of {seed.blueprint.name!r} in slot {slot!r} has learned nothing, since no gradient has reached it "
        f"although the optimizer stepped: {cause}; until one does, it will not be kept"
    )


def _compute_norm(gradient: Tensor) -> Tensor:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    # Detached, as gradients that are differentiated again have a graph of their own.
    return cast(Tensor, torch.linalg.vector_norm(values.detach()))


def _count_learning(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
