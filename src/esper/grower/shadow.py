"""Isolation ``shadow`` in a loop of your own: isolated seeds learn from a pass of their own; nobody else notices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from esper.errors import ConfigError
from esper.growth.model import GrowingModel
from esper.growth.seed import Seed
from esper.growth.side_pass import side_pass
from esper.lifecycle.rules import Isolation, Rules

Loss = Callable[..., Tensor]
"""The loss of a minibatch, from whatever stands for one: a scalar that can be differentiated."""

LOSS_LINE = "Grower(..., loss=lambda inputs, labels: F.cross_entropy(model(inputs), labels))"
LEARN_APART_LINE = "grower.learn_apart(loss, inputs, labels)"


def require_loss(rules: Rules, loss: Loss | None) -> None:
    """Refuse rules under which seeds need a pass of their own where nobody said how to compute it.

    Raises:
        ConfigError: the isolation is ``shadow``, and ``loss`` is None.
    """
    if rules.isolation is Isolation.SHADOW and loss is None:
        raise ConfigError(
            "under isolation shadow a seed learns from a pass of its own over every minibatch: say how to compute its "
            f"loss, with {LOSS_LINE}, and call {LEARN_APART_LINE} before each loss.backward()"
        )


class Shadow:
    """Adds, in the backward pass of a minibatch's loss, the gradients of isolated seeds.

    Args:
        model: Whose seeds they are.
        optimizer: After each of its steps it is checked that they had a gradient.
        loss: As in `require_loss`; it calls ``model``.
        scaler: Of the loop, if it has one; it multiplies losses before they are differentiated, against underflow.
        received: Told of every parameter whose gradient has grown, in this order.
    """

    def __init__(
        self,
        model: GrowingModel,
        optimizer: torch.optim.Optimizer,
        loss: Loss | None,
        scaler: torch.amp.GradScaler | None,
        received: Sequence[Callable[[Tensor], None]],
    ) -> None:
        self._model = model
        self._loss = loss
        self._scaler = scaler
        self._received = received
        self._arrived = False
        """Whether isolated seeds have had a gradient since the optimizer's last step."""
        optimizer.register_step_post_hook(self._require)

    def follow(self, loss: Tensor, minibatch: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Let the backward pass of ``loss`` bring isolated seeds what they learn from this minibatch.

        Their gradients are computed at once, and weighed as that pass weighs ``loss``.

        Raises:
            ConfigError: the loss that was given does not depend on an isolated seed.
        """
        isolated = self._find_isolated()
        if self._loss is None or not isolated or not loss.requires_grad:
            return
        learning = [parameter for seed in isolated.values() for parameter in seed.parameters()]
        with side_pass(self._model, isolated.values()), torch.enable_grad():
            scaled = self._scale(self._loss(*minibatch, **named))
            gradients = compute_gradients(scaled, learning)
        for name, seed in isolated.items():
            if gradients.keys().isdisjoint(seed.parameters()):
                raise ConfigError(
                    f"the loss that the grower was given does not depend on the seed in slot {name!r}: it must call "
                    "the growing model itself and return a loss that can be differentiated"
                )
        usual = self._scale(torch.ones_like(scaled.detach()))

        def add_gradients(weight: Tensor) -> None:
            self._add(gradients, weight / usual)

        loss.register_hook(add_gradients)

    @torch.no_grad()
    def _add(self, gradients: Mapping[nn.Parameter, Tensor], weight: Tensor) -> None:
        for parameter, gradient in gradients.items():
            own = (gradient * weight).to(parameter.dtype)
            parameter.grad = own if parameter.grad is None else parameter.grad + own
            for told in self._received:
                told(parameter)
        self._arrived = True

    def _scale(self, loss: Tensor) -> Tensor:
        return loss if self._scaler is None else self._scaler.scale(loss)

    def _find_isolated(self) -> dict[str, Seed]:
        return {name: seed for name, seed in self._model.seeds.items() if seed.isolation is Isolation.SHADOW}

    def _require(self, *_: Any) -> None:
        arrived, self._arrived = self._arrived, False
        isolated = self._find_isolated()
        if isolated and not arrived:
            raise ConfigError(
                f"the optimizer made a step without a gradient for the seed in slot {next(iter(isolated))!r}, which "
                f"learns in isolation shadow: call {LEARN_APART_LINE} before each loss.backward()"
            )


def compute_gradients(loss: Tensor, parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """The gradients of those ``parameters`` on which ``loss`` depends."""
    if not loss.requires_grad:
        return {}
    found = cast("Sequence[Tensor | None]", torch.autograd.grad(loss, parameters, allow_unused=True))
    return {parameter: gradient for parameter, gradient in zip(parameters, found, strict=True) if gradient is not None}
