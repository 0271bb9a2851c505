"""AdamW for a policy: decay for the critic only, one gradient norm per module, and a state that can be saved."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from esper.control.policy import Policy
from esper.lifecycle.actions import Head
from esper.rl.settings import PPOSettings

FUSED_DEVICES = frozenset({"cpu", "cuda"})
"""Device types for which torch has a fused AdamW."""

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's tensors per parameter, of its shape; besides them it counts ``step``."""


class PolicyOptimizer:
    """Clips and applies gradients. Parameters that the actor computes with are never decayed."""

    def __init__(self, policy: Policy, settings: PPOSettings) -> None:
        named = dict(policy.named_parameters())
        critic = {f"value_head.{name}": parameter for name, parameter in policy.value_head.named_parameters()}
        actor = {name: parameter for name, parameter in named.items() if name not in critic}
        self._named = {**actor, **critic}  # in the order in which AdamW numbers its parameters
        self._max_norm = settings.max_gradient_norm
        self._adam = torch.optim.AdamW(
            [
                {"params": list(actor.values()), "weight_decay": 0.0},
                {"params": list(critic.values()), "weight_decay": settings.value_weight_decay},
            ],
            lr=settings.learning_rate,
            betas=settings.adam_betas,
            eps=settings.adam_epsilon,
            fused=policy.device.type in FUSED_DEVICES,
        )
        self._modules: dict[str, list[nn.Parameter]] = {
            **{head.name.lower(): policy.heads.output_parameters(head) for head in Head},
            "encoder": list(policy.encoder.parameters()),
            "lstm": list(policy.lstm.parameters()),
            "value": list(critic.values()),
        }

    @property
    def module_names(self) -> tuple[str, ...]:
        """What `clip` reports norms of, before the total."""
        return tuple(self._modules)

    def clip(self) -> Tensor:
        """Clip the gradients. Returns the norms before ``[modules + 1]``, the total last."""
        norms = [
            nn.utils.get_total_norm([parameter.grad for parameter in part if parameter.grad is not None])
            for part in self._modules.values()
        ]
        return torch.stack((*norms, nn.utils.clip_grad_norm_(self._named.values(), self._max_norm)))

    def step(self, learning_rate: float) -> None:
        """Apply the gradients."""
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        self._adam.step()

    def clear(self) -> None:
        """Drop the gradients."""
        self._adam.zero_grad()

    def state_tensors(self) -> dict[str, Tensor]:
        """Copies of moments and step counts under ``parameter.moment``; empty before the first step."""
        return {
            f"{name}.{key}": value.clone()
            for name, parameter in self._named.items()
            for key, value in self._adam.state.get(parameter, {}).items()
        }

    def expected_tensors(self) -> dict[str, Tensor]:
        """Tensors of the names, shapes and types that `load_state_tensors` takes, unless it is given nothing."""
        moments = {f"{name}.{moment}": p.detach() for name, p in self._named.items() for moment in MOMENTS}
        return {**moments, **{f"{name}.step": torch.zeros((), dtype=torch.float32) for name in self._named}}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace moments and step counts by copies of these."""
        state = {
            number: {key: tensors[f"{name}.{key}"].clone() for key in (*MOMENTS, "step")}
            for number, name in enumerate(self._named)
            if tensors
        }
        self._adam.load_state_dict({"state": state, "param_groups": self._adam.state_dict()["param_groups"]})
