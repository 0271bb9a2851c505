"""How one update went, minibatch by minibatch, and its metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from esper.lifecycle.actions import Head
from esper.rl.batch import SMALLEST, Batch
from esper.rl.diagnostics import UpdateMetrics
from esper.rl.objective import Measured
from esper.rl.settings import PPOSettings
from esper.rl.twins import to_go

HEADS = tuple(head.name.lower() for head in Head)


@dataclass
class Course:
    """What has been seen and done in an update so far."""

    measured: list[Measured] = field(default_factory=list[Measured])
    """Per minibatch that was looked at."""
    norms: list[Tensor] = field(default_factory=list[Tensor])
    """Gradient norms ``[modules + 1]``, the total last, per minibatch that did not end the update by its divergence."""
    steps: int = 0
    stopped: bool = False
    """The KL divergence ended it."""
    finite: bool = True

    def metrics(self, batch: Batch, modules: tuple[str, ...], settings: PPOSettings, progress: float) -> UpdateMetrics:
        """In numbers. ``batch`` is the whole rollout's; ``modules`` names the gradient norms but for the total."""
        seen = Measured(*(torch.stack(column) for column in zip(*self.measured, strict=True)))
        norms = torch.stack(self.norms).mean(0) if self.norms else torch.zeros(len(modules) + 1)
        running = batch.rollout.running
        value, target = batch.rollout.value[running], batch.target[running]
        explained = 1 - (target - value).var() / (target.var() + SMALLEST)
        returns = target + to_go(batch.rollout.twin_reward, settings.gamma)[running]
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
            advantage_deviation=batch.advantage[running].std().item(),
            learning_rate=settings.learning_rate_at(progress),
            optimizer_steps=self.steps,
            stopped_early=self.stopped,
            finite=self.finite,
            head_entropy=_named(HEADS, seen.head_entropy.mean(0)),
            head_entropy_weight=dict(zip(HEADS, settings.entropy_weights(progress), strict=True)),
            head_share=_named(HEADS, seen.head_share.mean(0)),
            head_clip_fraction=_named(HEADS, seen.head_clip_fraction.mean(0)),
            module_gradient_norm=_named(modules, norms[:-1]),
        )


def _named(names: tuple[str, ...], numbers: Tensor) -> dict[str, float]:
    return {name: number.item() for name, number in zip(names, numbers, strict=True)}
