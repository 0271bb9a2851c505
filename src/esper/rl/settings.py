"""Every hyperparameter of PPO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from esper.config.settings import LARGEST_COUNT, MOST_AT_ONCE, Settings
from esper.lifecycle.actions import PerHead


class PPOSettings(Settings):
    """How a policy learns from rollouts. Fields that change over training do so linearly in its progress, 0 to 1.

    The defaults are for few, noisy episodes: every rollout is used up to the KL limit, which ends most updates before
    their last epoch.
    """

    renamed: ClassVar[Mapping[str, str]] = {"twin": "no_growth_baseline"}

    # Returns and advantages
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per step. Below 1 a reward at the end of a long episode fades: .99 leaves .22 of it after 150 steps."""

    gae_lambda: float = Field(default=0.98, ge=0, le=1)
    """0 trusts the value function, 1 the rewards that followed."""

    group: int = Field(default=8, ge=1, le=MOST_AT_ONCE)
    """Environments in consecutive groups of this size share an instance; the advantage is then taken relative to the
    others of the group. 1 is off. It must divide the number of environments."""

    no_growth_baseline: bool = False
    """Run one more network per group that only waits on the group's instance, and subtract its rewards from those of
    the group before advantages and the values' targets are computed: what remains is what growth added. These networks
    cost their computation, are not learned from, and count in no figure but `environment_steps`. In groups of several
    members the mean of the others takes the same off the advantages, so there it only makes the values' task easier."""

    normalise_advantages: bool = True
    """Standardise advantages over the rollout."""

    # The update: its epochs and minibatches, and how it is computed
    epochs: int = Field(default=8, ge=1, le=100)
    """Passes over each rollout."""

    minibatches: int = Field(default=4, ge=1, le=MOST_AT_ONCE)
    """Optimizer steps per pass, each on whole episodes of a share of the environments."""

    chunk: int | None = Field(default=None, ge=1, le=LARGEST_COUNT)
    """Steps through which gradients flow back, for horizons whose activations do not fit into memory: an update needs
    less of it with shorter chunks. The loss is that of whole episodes. Null: all steps."""

    compile: bool = False
    """Compile the policy for updates with torch.compile, which needs a C++ compiler and takes a minute or two at the
    first update. On a CPU, runs of the usual length do not win that back. Acting and checkpoints stay as they are."""

    bf16: bool = False
    """Multiply matrices of the update in bfloat16, except those of the LSTM; only for policies on a CUDA device.
    Probabilities, losses and weights stay in float32."""

    # The loss
    surrogate: Literal["joint", "factored"] = "factored"
    """What is maximised, with A the advantage, r a probability ratio and c(r) the smaller of r A and clip(r) A.
    `joint`: (1 / N) sum_t c(r_t), over all N steps, with the whole action's ratio; a head with a choice in n of them
    learns n / N times as fast as one that always has. `factored`: sum_h (1 / n_h) sum_t c(r_th), with each head's own
    ratio over the n_h steps in which it had a choice; all heads learn equally fast. If a single head has a choice, in
    every step, they are the same."""

    clip: float = Field(default=0.2, gt=0, lt=1)
    """Probability ratios beyond 1 - clip .. 1 + clip gain nothing more."""

    target_kl: float = Field(default=0.03, gt=0)
    """The update ends before a step on a minibatch whose KL from the acting policy exceeds 1.5 times this."""

    value_weight: float = Field(default=0.5, ge=0)
    """Weight of the value loss, which is in units of the returns' variance."""

    entropy_start: PerHead = PerHead.fill(0.02)
    """Weight of each head's mean normalised entropy in the mean over heads, at the start of training. One number for
    all heads, or some of them by name."""

    entropy_floor: PerHead = PerHead.fill(0.005)
    """Weight of each head's entropy at the end of the annealing and from then on."""

    entropy_anneal: float = Field(default=0.7, gt=0, le=1)
    """Fraction of training over which entropy weights fall to their floors."""

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
    """What follows an anomaly of an update. `record`: it is recorded. `skip`: an update that was not finite, moved the
    policy too far or was nearly all clipped is undone, and the learning rate is halved from then on. `stop`: the run
    ends with an error once the iteration is saved, and can be resumed."""

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
