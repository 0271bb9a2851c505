"""Proximal policy optimisation (Schulman et al., 2017) of the recurrent policy, on whole aligned episodes.

`Learner.update` is the algorithm, from top to bottom; the loss that it descends is in `esper.rl.losses`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from esper.control.policy import Policy
from esper.errors import CheckpointError, ConfigError
from esper.lifecycle.actions import Head
from esper.numerics.arrays import merge_arrays
from esper.numerics.random_streams import torch_generator
from esper.rl.advantages import (
    discounted_returns,
    generalised_advantages,
    subtract_control_variate,
    subtract_group_mean,
)
from esper.rl.diagnostics import UpdateMetrics
from esper.rl.losses import MinibatchStats, PPOLoss
from esper.rl.rollout import SMALLEST, PPOBatch, Rollout, of_running, select_environments, select_steps, standardise
from esper.rl.settings import PPOSettings
from esper.serialization.state_files import take_prefix

KL_STOP = 1.5
"""An update ends once the KL divergence exceeds this multiple of its target."""
HEADS = tuple(head.name.lower() for head in Head)
FUSED_DEVICES = frozenset({"cpu", "cuda"})
"""Device types for which torch has a fused AdamW."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's tensors per parameter, of its shape; besides them it counts ``step``."""
LONGEST_NAME = 80
"""Characters of a tensor's name in messages: names from a file may be of any length."""


class Learner:
    """Owns the policy with its statistics and the optimizer; `state_tensors` is all that is needed to go on."""

    def __init__(self, policy: Policy, settings: PPOSettings, seed: int) -> None:
        """``seed`` and the number of the update decide the order of minibatches. The policy is on its final device.

        Raises ConfigError if the settings do not suit that device.
        """
        if settings.bf16 and policy.device.type != "cuda":
            raise ConfigError(
                f"ppo.bf16 speeds up CUDA devices only and the policy learns on {policy.device.type}: set it to false"
            )
        self.policy = policy
        self.settings = settings
        self.seed = seed
        self.updates = 0
        self._loss = PPOLoss(policy, settings)
        self._optimizer = PolicyOptimizer(policy, settings)

    def update(self, rollout: Rollout, progress: float, *others: Rollout) -> UpdateMetrics:
        """Learn from one rollout at ``progress`` (0 at the start of training, 1 at its end).

        ``others`` are rollouts of another shape, from other suites, of which every minibatch has its share.

        The policy's statistics stand still until all steps are done and then take in the rollouts once. If a loss or
        gradient is not finite, that step and the rest are left out and the statistics stay as they are.
        Raises ConfigError if the number of environments does not suit the settings.
        """
        settings, stats = self.settings, UpdateStats()
        rollouts = (rollout, *others)
        self._check([one.environments for one in rollouts])
        batches = [self.make_batch(one) for one in rollouts]
        scaled = standardise(batches) if settings.normalise_advantages else batches
        learning_rate = settings.learning_rate_at(progress)
        entropy_weights = torch.tensor(settings.entropy_weights(progress), device=self.policy.device)

        # Several epochs over the same rollouts, each in minibatches of whole episodes: the LSTM needs them whole.
        for environments in self._minibatches([one.environments for one in rollouts]):
            minibatch = [select_environments(*one) for one in zip(scaled, environments, strict=True) if len(one[1])]
            self._optimizer.clear()
            measured = self._loss.backward(minibatch, entropy_weights)
            if settings.bf16 and not stats.minibatches:
                # Rounding to bfloat16 would pass for a policy that learns otherwise than it acted, and hide one.
                measured = measured._replace(deviation=self._loss.deviation([one.rollout for one in minibatch]))
            stats.minibatches.append(measured)

            # The rollout is of no more use once the policy has moved away from the one that acted. This is known
            # before the step, so the step is not taken.
            stats.stopped_early = measured.kl.item() > KL_STOP * settings.target_kl
            if stats.stopped_early:
                break

            norms = self._optimizer.clip()
            stats.gradient_norms.append(norms)
            stats.finite = bool(norms[-1].isfinite())
            if not stats.finite:
                break
            self._optimizer.step(learning_rate)
            stats.optimizer_steps += 1
        self._optimizer.clear()

        # Statistics that moved between acting and learning would make the first ratio differ from 1: only now.
        if stats.finite:
            seen = [select_steps(one.observations, one.running) for one in rollouts]
            self.policy.recalibrate(seen, of_running(batches, lambda one: one.target))
        self.updates += 1
        return stats.metrics(batches, self._optimizer.module_names, settings, progress)

    def make_batch(self, rollout: Rollout) -> PPOBatch:
        """The rollout with its advantages and its returns.

        Both are relative to the control variate, where there is one, and advantages to the group, if there are groups.
        """
        settings, running = self.settings, rollout.running
        advantage = generalised_advantages(
            subtract_control_variate(rollout.reward, rollout.control_variate, running, settings.gamma),
            rollout.value,
            rollout.final_value,
            running,
            settings.gamma,
            settings.gae_lambda,
        )
        target = advantage + rollout.value
        if settings.group > 1:
            advantage = subtract_group_mean(advantage, settings.group)
        is_open = self.policy.open_heads(rollout.masks, rollout.actions) & running.unsqueeze(-1)
        return PPOBatch(rollout, advantage, target, is_open)

    def _minibatches(self, environments: Sequence[int]) -> Iterator[tuple[Tensor, ...]]:
        """Indices of each rollout's environments, in a new order each epoch, by the seed and the update's number."""
        generator = torch_generator(self.seed, self.updates)
        for _ in range(self.settings.epochs):
            orders = [torch.randperm(count, generator=generator).to(self.policy.device) for count in environments]
            yield from zip(*(order.tensor_split(self.settings.minibatches) for order in orders), strict=True)

    def _check(self, environments: Sequence[int]) -> None:
        minibatches, group = self.settings.minibatches, self.settings.group
        if max(environments) < minibatches:
            raise ConfigError(
                f"{max(environments)} environments cannot be split into {minibatches} minibatches: "
                "lower minibatches or raise the number of environments"
            )
        for count in environments:
            if count % group:
                raise ConfigError(
                    f"{count} environments cannot be split into groups of {group}: make one a multiple of the other"
                )

    def state_tensors(self) -> dict[str, Tensor]:
        """Copies of all that `load_state_tensors` needs to continue exactly: weights, statistics, moments, counters."""
        return {
            "updates": torch.tensor(self.updates),
            **{f"policy.{name}": value.clone() for name, value in self.policy.state_dict().items()},
            **{f"optimizer.{name}": value for name, value in self._optimizer.state_tensors().items()},
        }

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from the `state_tensors` of a learner with the same policy and settings.

        Raises CheckpointError, and changes nothing, if names, shapes or types differ.
        """
        policy, optimizer = take_prefix("policy.", tensors), take_prefix("optimizer.", tensors)
        expected = {"updates": torch.tensor(self.updates)}
        expected |= {f"policy.{name}": value for name, value in self.policy.state_dict().items()}
        if optimizer:
            expected |= {f"optimizer.{name}": value for name, value in self._optimizer.expected_tensors().items()}
        _check_tensors(tensors, expected)
        self.policy.load_state_dict(policy)
        self._optimizer.load_state_tensors(optimizer)
        self.updates = int(tensors["updates"])


@dataclass
class UpdateStats:
    """What has been seen and done in an update so far."""

    minibatches: list[MinibatchStats] = field(default_factory=list[MinibatchStats])
    """One entry per minibatch that was looked at."""
    gradient_norms: list[Tensor] = field(default_factory=list[Tensor])
    """``[modules + 1]``, the total last, per minibatch that did not end the update by its divergence."""
    optimizer_steps: int = 0
    stopped_early: bool = False
    """The KL divergence ended it."""
    finite: bool = True

    def metrics(
        self, batches: Sequence[PPOBatch], modules: tuple[str, ...], settings: PPOSettings, progress: float
    ) -> UpdateMetrics:
        """In numbers. ``batches`` are the whole rollouts'; ``modules`` names the gradient norms but for the total."""
        seen = merge_arrays(torch.stack, self.minibatches)
        norms = torch.stack(self.gradient_norms).mean(0) if self.gradient_norms else torch.zeros(len(modules) + 1)
        value, target = of_running(batches, lambda one: one.rollout.value), of_running(batches, lambda one: one.target)
        explained = 1 - (target - value).var() / (target.var() + SMALLEST)
        returns = target + of_running(
            batches, lambda one: discounted_returns(one.rollout.control_variate, settings.gamma)
        )
        return UpdateMetrics(
            policy_loss=seen.policy_loss.mean().item(),
            value_loss=seen.value_loss.mean().item(),
            entropy=seen.entropy.mean().item(),
            kl=seen.kl.amax().item(),
            clip_fraction=seen.clip_fraction.mean().item(),
            gradient_norm=norms[-1].item(),
            first_ratio_deviation=seen.deviation[0].item(),
            explained_variance=explained.clamp(min=-1).item(),
            return_mean=returns.mean().item(),
            return_deviation=returns.std().item(),
            advantage_deviation=of_running(batches, lambda one: one.advantage).std().item(),
            learning_rate=settings.learning_rate_at(progress),
            optimizer_steps=self.optimizer_steps,
            stopped_early=self.stopped_early,
            finite=self.finite,
            head_entropy=_by_name(HEADS, seen.head_entropy.mean(0)),
            head_entropy_weight=dict(zip(HEADS, settings.entropy_weights(progress), strict=True)),
            head_share=_by_name(HEADS, seen.head_share.mean(0)),
            head_clip_fraction=_by_name(HEADS, seen.head_clip_fraction.mean(0)),
            module_gradient_norm=_by_name(modules, norms[:-1]),
        )


def _by_name(names: tuple[str, ...], numbers: Tensor) -> dict[str, float]:
    return {name: number.item() for name, number in zip(names, numbers, strict=True)}


class PolicyOptimizer:
    """AdamW for a policy: clips and applies gradients, and has a state that can be saved.

    Parameters that the actor computes with are never decayed.
    """

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


def _check_tensors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError unless names, shapes and types are the same."""
    for name in sorted(found.keys() | expected.keys()):
        if name not in found:
            raise CheckpointError(f"the learner's checkpoint lacks {name}: it is of another version or policy")
        if name not in expected:
            raise CheckpointError(
                f"the learner's checkpoint holds {name[:LONGEST_NAME]!r}, which this policy has not: use its settings"
            )
        ours, theirs = _kind(expected[name]), _kind(found[name])
        if ours != theirs:
            raise CheckpointError(
                f"the learner's checkpoint holds {name} as {theirs} where this policy has {ours}: "
                "use the settings it was saved with"
            )


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
