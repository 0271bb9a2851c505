"""Every hyperparameter of PPO."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from esper.config.settings import LARGEST_COUNT, MOST_AT_ONCE, Settings
from esper.lifecycle.actions import PerHead


class PPOSettings(Settings):
    """Hyperparameters of PPO. Schedules are linear in the progress of training, from 0 to 1.

    The defaults suit few, noisy episodes: each rollout is used until the KL limit, which usually stops an update before
    its last epoch.
    """

    # Returns and advantages
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per step. Values below 1 weaken rewards at the end of long episodes: .99 leaves .22 after 150 steps."""

    gae_lambda: float = Field(default=0.98, ge=0, le=1)
    """Lambda of generalised advantage estimation: 0 relies on the value function, 1 on the observed rewards."""

    group: int = Field(default=8, ge=1, le=MOST_AT_ONCE)
    """Number of consecutive environments that share an instance. Advantages are relative to the others of the group. 1:
    off. It must divide the number of environments."""

    no_growth_baseline: bool = False
    """Run one more network per group that never grows, and subtract its rewards from those of the group. These networks
    cost computation, are not trained on, and count only in `environment_steps`. In groups of several environments,
    advantages already subtract the mean of the others, so there it only helps the value function."""

    normalise_advantages: bool = True
    """Standardise advantages over the rollout."""

    # The update: its epochs and minibatches, and how it is computed
    epochs: int = Field(default=8, ge=1, le=100)
    """Passes over each rollout."""

    minibatches: int = Field(default=4, ge=1, le=MOST_AT_ONCE)
    """Optimizer steps per pass, each on whole episodes of a part of the environments."""

    chunk: int | None = Field(default=None, ge=1, le=LARGEST_COUNT)
    """Steps of truncated backpropagation through time, to limit memory. The loss is still that of whole episodes.
    null: all steps."""

    compile: bool = False
    """Compile the policy for updates with torch.compile. It needs a C++ compiler and takes a minute or two at the first
    update, which runs of usual length on a CPU do not recover. Acting and checkpoints are not affected."""

    bf16: bool = False
    """Use bfloat16 in matrix products of the update, except in the LSTM. Requires a policy on a CUDA device.
    Probabilities, losses and weights stay in float32."""

    # The loss
    surrogate: Literal["joint", "factored"] = "factored"
    """Surrogate objective, where A is the advantage, r a probability ratio, and c(r) the smaller of r A and clip(r) A.
    `joint`: (1 / N) sum_t c(r_t) over all N steps, with the ratio of the whole action; a head with a choice in n steps
    learns n / N times as fast as one that always has a choice. `factored`: sum_h (1 / n_h) sum_t c(r_th), with the
    ratio of each head over the n_h steps in which it had a choice; all heads learn equally fast. They are equal if a
    single head has a choice, in every step."""

    clip: float = Field(default=0.2, gt=0, lt=1)
    """Probability ratios are clipped to 1 - clip .. 1 + clip."""

    target_kl: float = Field(default=0.03, gt=0)
    """An update stops before a minibatch whose KL divergence from the acting policy exceeds 1.5 times this."""

    value_weight: float = Field(default=0.5, ge=0)
    """Weight of the value loss, in units of the variance of returns."""

    entropy_start: PerHead = PerHead.fill(0.02)
    """Weight of each head's mean normalised entropy at the start of training: one number for all heads, or a mapping
    from heads to numbers."""

    entropy_floor: PerHead = PerHead.fill(0.005)
    """Weight of each head's entropy after annealing."""

    entropy_anneal: float = Field(default=0.7, gt=0, le=1)
    """Fraction of training during which entropy weights fall to their floors."""

    # The optimizer
    learning_rate: float = Field(default=3e-3, gt=0, le=1)
    """AdamW's step size at the start of training."""

    final_learning_rate: float = Field(default=5e-4, gt=0, le=1)
    """AdamW's step size at the end; equal to `learning_rate` for a constant one."""

    adam_betas: tuple[float, float] = (0.9, 0.999)
    """Decay of AdamW's moments."""

    adam_epsilon: float = Field(default=1e-5, gt=0)
    """AdamW's denominator offset."""

    value_weight_decay: float = Field(default=1e-4, ge=0)
    """Decoupled weight decay of the value head alone; parameters of the actor are never decayed."""

    max_gradient_norm: float = Field(default=0.5, gt=0)
    """The gradient over all parameters is scaled down to this norm."""

    # Anomalies
    on_anomaly: Literal["record", "skip", "stop"] = "record"
    """Reaction to an anomaly in an update. `record`: only record it. `skip`: undo an update that was not finite, moved
    the policy too far or was almost entirely clipped, and halve the learning rate from then on. `stop`: save the
    iteration and end the run with an error; it can be resumed."""

    def entropy_weights(self, progress: float) -> tuple[float, ...]:
        """The weight of each head's entropy at this progress, in the order of `Head`."""
        ends = zip(self.entropy_start.by_head, self.entropy_floor.by_head, strict=True)
        return tuple(_interpolate(start, floor, progress / self.entropy_anneal) for start, floor in ends)

    def learning_rate_at(self, progress: float) -> float:
        """The step size at this progress."""
        return _interpolate(self.learning_rate, self.final_learning_rate, progress)


def _interpolate(start: float, end: float, fraction: float) -> float:
    share = min(max(fraction, 0.0), 1.0)
    return start * (1.0 - share) + end * share  # exact at both ends
