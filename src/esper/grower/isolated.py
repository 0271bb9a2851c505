"""What learns apart from the loop, in passes of its own: seeds in isolation ``shadow``, and forks without a seed.

The loop hands over each minibatch and its loss. Gradients for whoever learns apart are computed at once, and arrive
with the backward pass of that loss, weighed as it weighs the loss; nothing else about the model is any different.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from esper.control.controller import Controller
from esper.control.rules import Never
from esper.errors import ConfigError
from esper.growth.model import GrowingModel
from esper.growth.seed import Seed
from esper.growth.side_pass import side_pass
from esper.growth.slot import Slot
from esper.lifecycle.rules import Isolation, Rules
from esper.lifecycle.stages import Stage
from esper.lifecycle.table import Evidence, SeedTable
from esper.serialization.state_files import from_plain, to_plain

T = TypeVar("T")


class _Whole(nn.Module):
    """Calls a function of a model which has other values meanwhile, and tells what its buffers are afterwards."""

    def __init__(self, model: GrowingModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], T]) -> tuple[T, dict[str, Tensor]]:
        return compute(), dict(self.named_buffers())


class SeedlessFork:
    """What ``model`` would be had the seed in ``slot`` been removed when the fork was made, and trained on without it.

    What a model loses when a seed is switched off is not what it has gained by it: host and seed have trained together,
    so the host has come to lean on the seed. Where both the model and a fork train on for a little while, the host gets
    over that, and the difference between the two is close to what the seed brings in the end.

    It has parameters, buffers and an optimizer of its own, copied from those of the model, for all that counts in the
    model's forward pass. All else is the model's: seeds that do not count yet, the weights of the others, and whatever
    lies outside of the model.

    Args:
        model: In training.
        optimizer: The one that trains it.
        slot: Of ``model``, with a seed.
        counting: The host and the seeds that count, without this one.
    """

    def __init__(
        self, model: GrowingModel, optimizer: torch.optim.Optimizer, slot: Slot, counting: Iterable[nn.Module]
    ) -> None:
        assert slot.seed is not None
        self.seed = slot.seed
        """The seed that is left out."""
        self._whole = _Whole(model)
        self._slot = slot
        self._theirs = optimizer
        self._parameters: dict[Tensor, nn.Parameter] = {}
        """The fork's, by the model's."""
        self._buffers: dict[str, Tensor] = {}
        # Its groups and state follow with the parameters.
        apart: dict[int, Any] = {id(optimizer.state): defaultdict(dict), id(optimizer.param_groups): []}
        self._optimizer = copy.deepcopy(optimizer, apart)
        self.sync_modules(counting)

    @torch.no_grad()
    def sync_modules(self, counting: Iterable[nn.Module]) -> None:
        """Copy what has begun to count in the model since, and let go of what is no more."""
        modules = list(counting)
        before, self._parameters = self._parameters, {}
        state = self._optimizer.state
        for theirs in (parameter for module in modules for parameter in module.parameters()):
            if theirs in before:
                self._parameters[theirs] = before[theirs]
            elif theirs not in self._parameters:
                own = self._parameters[theirs] = nn.Parameter(theirs.clone(), theirs.requires_grad)
                if theirs in self._theirs.state:
                    state[own] = copy.deepcopy(self._theirs.state[theirs])
        for gone in before.keys() - self._parameters.keys():
            state.pop(before[gone], None)
        alphas = {part.alpha for module in modules for part in module.modules() if isinstance(part, Seed)}
        counted = {buffer for module in modules for buffer in module.buffers()} - alphas
        named = {name: buffer for name, buffer in self._whole.named_buffers() if buffer in counted}
        kept = self._buffers
        self._buffers = {name: kept[name] if name in kept else buffer.clone() for name, buffer in named.items()}
        self.sync_optimizer()

    def sync_optimizer(self) -> None:
        """Give the optimizer the groups and hyperparameters that the model's has now."""
        self._optimizer.param_groups[:] = [
            {**group, "params": [self._parameters[one] for one in group["params"] if one in self._parameters]}
            for group in self._theirs.param_groups
        ]

    def run(self, compute: Callable[[], T]) -> T:
        """What ``compute`` returns, which calls the model, where the model is this fork."""
        named = dict(self._whole.named_parameters())
        mine = {name: self._parameters[theirs] for name, theirs in named.items() if theirs in self._parameters}
        with self._slot.disabled():
            result, buffers = functional_call(self._whole, {**mine, **self._buffers}, (compute,))
        self._buffers = {name: buffers[name].detach() for name in self._buffers}
        return result

    def gradients(self, loss: Callable[[], Tensor]) -> dict[nn.Parameter, Tensor]:
        """Gradients of ``loss``, which calls the model, by the fork's parameters.

        Raises:
            ConfigError: it does not depend on the fork, or on the model as well.
        """
        for theirs, own in self._parameters.items():
            own.requires_grad_(theirs.requires_grad)
        mine = [own for own in self._parameters.values() if own.requires_grad]
        learning = cast("list[nn.Parameter]", [theirs for theirs in self._parameters if theirs.requires_grad])
        # Within, as a backward pass may compute parts of the forward pass once more.
        found = self.run(lambda: compute_gradients(loss(), [*mine, *learning]))
        if not found.keys().isdisjoint(learning):
            raise ConfigError(
                "the loss that the grower was given uses parameters of the growing model that were taken from it "
                "before: it must take them from the model whenever it is called"
            )
        if not found:
            raise ConfigError(
                f"the loss that the grower was given does not depend on the model without the seed in slot "
                f"{self._slot.name!r}: it must call the growing model itself and return a loss that can be "
                "differentiated"
            )
        return found

    @torch.no_grad()
    def add(self, gradients: Mapping[nn.Parameter, Tensor], weight: Tensor, *, anew: bool) -> None:
        """Add ``gradients`` times ``weight`` to those since the last step, or begin ``anew`` with them."""
        if anew:
            self._optimizer.zero_grad()
        for own, gradient in gradients.items():
            add_gradient(own, gradient * weight)

    def step(self, average: Callable[[Tensor], None], *, only_finite: bool) -> None:
        """Let the optimizer make a step with gradients that ``average`` has averaged, unless they must be finite."""
        learned = [own for own in self._parameters.values() if own.grad is not None]
        for parameter in learned:
            average(parameter)
        if not only_finite or all(bool(own.grad.isfinite().all()) for own in learned if own.grad is not None):
            self._optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """All that is the fork's own, as plain values."""
        own, state = self._name_parameters(), self._optimizer.state
        moments = {name: state[parameter] for name, parameter in own.items() if parameter in state}
        kind = type(self._theirs).__name__
        return to_plain({"parameters": own, "buffers": self._buffers, "moments": moments, "optimizer": kind})

    @torch.no_grad()
    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Be what `state_dict` told; the model has the structure that it had then.

        Raises:
            CheckpointError: it has not.
        """
        own = self._name_parameters()
        like = {"parameters": own, "buffers": self._buffers}
        found = from_plain(like, {name: saved[name] for name in like}, "the state of a fork")
        for name, parameter in own.items():
            parameter.copy_(found["parameters"][name])
        self._buffers = found["buffers"]
        names = {parameter: name for name, parameter in own.items()}
        order = [names[parameter] for group in self._optimizer.param_groups for parameter in group["params"]]
        # Another optimizer may have taken the former's place: it begins anew.
        moments: Mapping[str, Any] = saved["moments"] if saved["optimizer"] == type(self._theirs).__name__ else {}
        state = {place: moments[name] for place, name in enumerate(order) if name in moments}
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": state})
        self.sync_optimizer()

    def _name_parameters(self) -> dict[str, nn.Parameter]:
        """The fork's parameters by the names of the model's."""
        named = cast("Sequence[tuple[str, nn.Parameter]]", list(self._whole.named_parameters()))
        return {name: self._parameters[theirs] for name, theirs in named if theirs in self._parameters}


def compute_gradients(loss: Tensor, parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """The gradients of those ``parameters`` on which ``loss`` depends."""
    if not loss.requires_grad:
        return {}
    found = cast("Sequence[Tensor | None]", torch.autograd.grad(loss, parameters, allow_unused=True))
    return {parameter: gradient for parameter, gradient in zip(parameters, found, strict=True) if gradient is not None}


def add_gradient(parameter: Tensor, part: Tensor) -> None:
    """Add to the gradient of ``parameter``, in its own type."""
    part = part.to(parameter.dtype)
    parameter.grad = part if parameter.grad is None else parameter.grad + part


Loss = Callable[..., Tensor]
"""The loss of a minibatch, from whatever stands for one: a scalar that can be differentiated."""

REFIT = 2
"""Decisions after which a fork has got over the loss of its seed."""
_LOSS_LINE = "Grower(..., loss=lambda inputs, labels: F.cross_entropy(model(inputs), labels))"
_BACKWARD_LINE = "grower.isolated_backward(loss, inputs, labels)"


class Counterfactual(StrEnum):
    """The model without a seed, from which it follows what the seed contributes."""

    DEPENDENCE = "dependence"
    """The model as it is, with the seed switched off (leave-one-out). A model comes to lean on what it trains with, so
    this says how much it would miss the seed now, which is more than it gains by having it."""
    REFIT = "refit"
    """While a seed is on trial: a fork of the model from when the trial began, which has trained without the seed on
    the same minibatches since. Before and after, as ``dependence``."""


def require_loss(
    rules: Rules,
    evidence: Counterfactual,
    controller: Controller,
    loss: Loss | None,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Refuse rules or evidence for which something must learn apart where it cannot, or for nobody's use.

    Raises:
        ConfigError: nobody said how to compute a ``loss``, the controller judges no seed by the evidence, or the
            optimizer computes losses by itself, which a fork's cannot.
    """
    if rules.isolation is Isolation.SHADOW and loss is None:
        raise ConfigError(
            "under isolation shadow a seed learns from a pass of its own over every minibatch: say how to compute its "
            f"loss, with {_LOSS_LINE}, and call {_BACKWARD_LINE} before each loss.backward()"
        )
    if evidence is not Counterfactual.REFIT:
        return
    if isinstance(controller, Never):
        raise ConfigError(
            f"evidence refit is what seeds on trial are judged by, but controller {controller.name!r} plants none: "
            "choose another controller, or leave evidence out"
        )
    if loss is None:
        raise ConfigError(
            "under evidence refit a fork without the seed learns from every minibatch as well: say how to compute its "
            f"loss, with {_LOSS_LINE}, and call {_BACKWARD_LINE} before each loss.backward()"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"evidence refit cannot step {type(optimizer).__name__}, which computes losses by itself: take an "
            "optimizer whose step needs no closure, or evidence dependence"
        )


class IsolatedTrainer:
    """Lets isolated seeds and forks learn whenever the model does.

    Args:
        model: Whose seeds they are.
        optimizer: Of the model; after each of its steps it is checked that all had a gradient, and forks step.
        evidence: Under ``dependence`` there are no forks.
        loss: Calls ``model``; None where nothing learns apart.
        scaler: Of the loop, if it has one; it multiplies losses before they are differentiated, against underflow.
        on_gradient: Called with every parameter of an isolated module whose gradient has grown.
        average: Makes a parameter's gradient that of all processes.
    """

    def __init__(
        self,
        model: GrowingModel,
        optimizer: torch.optim.Optimizer,
        evidence: Counterfactual,
        loss: Loss | None,
        scaler: torch.amp.GradScaler | None,
        *,
        on_gradient: Callable[[Tensor], None],
        average: Callable[[Tensor], None],
    ) -> None:
        self._model, self._optimizer, self._loss, self._scaler = model, optimizer, loss, scaler
        self._on_gradient, self._average = on_gradient, average
        self._forking = evidence is Counterfactual.REFIT
        self._forks: dict[str, SeedlessFork] = {}
        self._comparable: set[str] = set()
        """Slots whose forks are old enough to be compared with at the next decision."""
        self._arrived: set[str] = set()
        """Slots whose isolated seed or whose fork has had a gradient since the optimizer's last step."""
        self._minibatches = 0
        """From which forks have learned since the last decision."""
        optimizer.register_step_pre_hook(self._sync_fork_optimizers)
        optimizer.register_step_post_hook(self._step)

    @property
    def forks(self) -> dict[str, SeedlessFork]:
        """Forks by the slots whose seeds are on trial."""
        trials = {name: seed for name, seed in self._model.seeds.items() if not seed.fossilized}
        return {name: fork for name, fork in self._forks.items() if fork.seed is trials.get(name)}

    def comparable_forks(self) -> dict[str, SeedlessFork | None]:
        """For the seeds on trial: their forks, None until these are old enough to be compared with.

        Raises:
            ConfigError: no fork has learned since the last decision.
        """
        forks = self.forks
        if forks and not self._minibatches:
            raise ConfigError(
                f"under evidence refit the seed in slot {next(iter(forks))!r} is compared with a fork of the model, "
                f"which has learned nothing since the last decision: call {_BACKWARD_LINE} before each "
                "loss.backward()"
            )
        return {name: fork if name in self._comparable else None for name, fork in forks.items()}

    def update_forks(self, table: SeedTable, evidence: Evidence) -> Evidence:
        """After a decision that led to ``table``: fork the model for seeds that are held from now on.

        Returns the evidence without what was known of those seeds. Forks of seeds that are not held any more are gone.
        """
        begun = np.zeros(table.stage.shape, np.bool_)
        self._minibatches = 0
        if not self._forking:
            return evidence
        slots = self._model.slots.values()
        seeds = [slot.seed for slot, counts in zip(slots, table.blended[0].tolist(), strict=True) if counts]
        present, self._forks = self.forks, {}
        held = np.flatnonzero(table.stage[0] == Stage.HOLDING).tolist()
        for place in held:
            slot = slots[place]
            counting = [self._model.host, *(seed for seed in seeds if seed is not None and seed is not slot.seed)]
            fork = present.get(slot.name)
            if fork is None:
                fork = SeedlessFork(self._model, self._optimizer, slot, counting)
                begun[0, place] = True
            else:
                fork.sync_modules(counting)
            self._forks[slot.name] = fork
        self._comparable = {slots[place].name for place in held if table.stage_age[0, place] >= REFIT}
        return evidence.without(begun)

    def add_side_gradients(self, loss: Tensor, minibatch: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Let the backward pass of ``loss`` bring isolated seeds and forks what they learn from this minibatch.

        Raises:
            ConfigError: the loss that was given does not depend on such a seed, or on a fork alone.
        """
        compute, forks, isolated = self._loss, self.forks, self._find_isolated()
        if compute is None or not (forks or isolated) or not loss.requires_grad:
            return

        def compute_loss() -> Tensor:
            return self._scale(compute(*minibatch, **named))

        for_forks: list[dict[nn.Parameter, Tensor]] = []
        for fork in forks.values():
            with side_pass(self._model, ()), torch.enable_grad():
                for_forks.append(fork.gradients(compute_loss))
        for_seeds = self._compute_seed_gradients(isolated, compute_loss) if isolated else {}
        usual = self._scale(torch.ones_like(loss.detach()))

        @torch.no_grad()
        def add_gradients(weight: Tensor) -> None:
            # The one factor is in the gradients, the other in the weight; a fork's optimizer sees neither.
            anew = bool(forks) and self._are_zeroed()
            for fork, gradients in zip(forks.values(), for_forks, strict=True):
                fork.add(gradients, weight / usual / usual, anew=anew)
            for parameter, gradient in for_seeds.items():
                add_gradient(parameter, gradient * (weight / usual))
                self._on_gradient(parameter)
                self._average(parameter)
            self._arrived |= forks.keys() | isolated.keys()
            self._minibatches += bool(forks)

        loss.register_hook(add_gradients)

    def _compute_seed_gradients(
        self, isolated: Mapping[str, Seed], compute_loss: Callable[[], Tensor]
    ) -> dict[nn.Parameter, Tensor]:
        learning = [parameter for seed in isolated.values() for parameter in seed.parameters()]
        learning = [parameter for parameter in learning if parameter.requires_grad]
        with side_pass(self._model, isolated.values()), torch.enable_grad():
            gradients = compute_gradients(compute_loss(), learning)
        for name, seed in isolated.items():
            if gradients.keys().isdisjoint(seed.parameters()):
                raise ConfigError(
                    f"the loss that the grower was given does not depend on the seed in slot {name!r}: it must call "
                    "the growing model itself and return a loss that can be differentiated"
                )
        return gradients

    def state_dict(self) -> dict[str, Any]:
        """All forks, as plain values: each as large as the model and its optimizer's state."""
        forks = {name: fork.state_dict() for name, fork in self.forks.items()}
        return {"forks": forks, "minibatches": self._minibatches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let forks be what `state_dict` told, after `update_forks` by the table that there was.

        Raises:
            CheckpointError: it is of another model.
        """
        for name, fork in self.forks.items():
            fork.load_state_dict(state["forks"][name])
        self._minibatches = state["minibatches"]

    def _scale(self, loss: Tensor) -> Tensor:
        return loss if self._scaler is None else self._scaler.scale(loss)

    def _find_isolated(self) -> dict[str, Seed]:
        return {name: seed for name, seed in self._model.seeds.items() if seed.isolation is Isolation.SHADOW}

    def _are_zeroed(self) -> bool:
        """Whether the model's gradients were zeroed since they were last added to."""
        gradients = [parameter.grad for parameter in self._model.parameters()]
        return not any(gradient is not None and (gradient.is_sparse or gradient.any()) for gradient in gradients)

    def _sync_fork_optimizers(self, *_: Any) -> None:
        # Before the step, as some optimizers count in their groups.
        for fork in self.forks.values():
            fork.sync_optimizer()

    @torch.no_grad()
    def _step(self, *_: Any) -> None:
        isolated, forks = self._find_isolated(), self.forks
        arrived, self._arrived = self._arrived, set()
        if isolated and arrived.isdisjoint(isolated):
            raise ConfigError(
                f"the optimizer made a step without a gradient for the seed in slot {next(iter(isolated))!r}, which "
                f"learns in isolation shadow: call {_BACKWARD_LINE} before each loss.backward()"
            )
        if forks and arrived.isdisjoint(forks):
            raise ConfigError(
                f"the optimizer made a step without a gradient for the fork without the seed in slot "
                f"{next(iter(forks))!r}, which evidence refit needs: call {_BACKWARD_LINE} before each "
                "loss.backward()"
            )
        for fork in forks.values():
            fork.step(self._average, only_finite=self._scaler is not None)
