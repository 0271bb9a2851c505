"""Proximal policy optimisation (Schulman et al., 2017) of the recurrent policy, on whole aligned episodes.

`PPO.update` is the algorithm, from top to bottom, and `PPO.backward` the loss that it descends. Before them stand its
hyperparameters, the meanings of its figures, and the terms of the loss.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from esper.config.settings import LARGEST_COUNT, MOST_AT_ONCE, Settings
from esper.control.policy import Policy
from esper.control.policy.heads import NON_NEGATIVE
from esper.errors import CheckpointError, ConfigError, plural
from esper.lifecycle.actions import Head, PerHead
from esper.numerics.arrays import merge_arrays
from esper.numerics.random_streams import torch_generator
from esper.rl.rollout import (
    SMALLEST,
    PPOBatch,
    Rollout,
    discount_rewards,
    estimate_advantages,
    select_environments,
    select_running,
    select_steps,
    standardise_advantages,
    subtract_control_variate,
    subtract_group_mean,
)
from esper.serialization import require_in_range, strip_prefix

KL_STOP = 1.5
"""An update ends once the KL divergence exceeds this multiple of its target."""
LOG_RATIO_BOUND = 10.0
"""Log-ratios are clipped to this, so that one absurd probability cannot make the loss infinite."""
FUSED_DEVICES = frozenset({"cpu", "cuda"})
"""Device types for which torch has a fused AdamW."""
SECOND_MOMENT = "exp_avg_sq"
MOMENTS = ("exp_avg", SECOND_MOMENT)
"""AdamW's tensors per parameter, of its shape; besides them it counts ``step``."""


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


Figures = Mapping[str, float]
"""The figures of one PPO update by the names of `FIGURES`; those of a head or module as ``name/head``."""
FIGURES: Mapping[str, str] = {
    "policy_loss": "the clipped surrogate",
    "value_loss": "half the squared error of values, in units of the returns' variance",
    "entropy": "mean over the heads that had a choice: 1 random, 0 certain",
    "kl": "largest estimate in an update of how far it moved the policy",
    "clip_fraction": "share of decisions whose ratio left the clip range",
    "gradient_norm": "of all parameters, before clipping",
    "first_ratio_deviation": "largest |ratio - 1| before the first optimizer step: rounding, "
    "unless acting and learning disagree",
    "explained_variance": "how well values predict returns: 1 perfectly, 0 as a constant",
    "return_mean": "mean of the returns as they were paid, before a no-growth baseline is subtracted",
    "return_deviation": "their standard deviation",
    "advantage_deviation": "standard deviation of advantages, before standardising",
    "learning_rate": "learning rate of the optimizer",
    "rate_scale": "its factor, below 1 if earlier updates were skipped",
    "optimizer_steps": "number of optimizer steps",
    "stopped_early": "1: the KL divergence ended the update before its last epoch",
    "finite": "0: a loss or gradient was not finite; the update ended there, without that step and new statistics",
    "skipped": "1: the update was undone because of an anomaly (`PPOSettings.on_anomaly`)",
    "head_entropy": "over decisions in which the head had a choice; 0 if never",
    "head_entropy_weight": "weight of a head's entropy in the mean over heads",
    "head_share": "share of decisions in which a head had a choice",
    "head_clip_fraction": "share of these whose own probability ratio left the clip range",
    "module_gradient_norm": "of encoder, lstm, value, or a head's own parameters, before clipping",
}
"""What each figure of an update means. All are stored; charts are chosen in `dash/static/js/views/learning.js` and
`lab/policy_figures.py`, and take their captions from here.

Means are over an update's minibatches, before their optimizer step.
"""


# Terms of the loss. Means are over ``count`` decisions, or over ``occurrences`` per head, which may be more than are in
# the arguments, so that the results of a minibatch's chunks add up to that of the minibatch.


def bound_log_ratio(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """Logarithm of the probability ratio of the present policy and the one that acted."""
    return (log_prob - old_log_prob).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def compute_joint_surrogate(ratio: Tensor, advantage: Tensor, clip: float, count: Tensor) -> Tensor:
    """-mean min(r A, clip(r, 1 - clip, 1 + clip) A), 0-d, with r the ratio of whole actions (Schulman et al., 2017).

    At r = 1 its gradient is -(1 / N) sum over N steps t of A_t sum over heads h of grad log p_th: a head that has a
    choice in n of them learns from each as much as the others do, and so n / N times as fast.
    """
    return -(_clip_gain(ratio, advantage, clip).sum() / count)


def compute_factored_surrogate(
    ratio: Tensor, advantage: Tensor, clip: float, is_open: Tensor, occurrences: Tensor
) -> Tensor:
    """The surrogate, 0-d, of each head by its own ratio over the steps in which it had a choice, summed over heads.

    -sum over heads h of (1 / n_h) sum over its n_h steps t of min(r_th A_t, clip(r_th, 1 - clip, 1 + clip) A_t): a head
    learns as fast from few steps as from many. The parts of an action are also clipped one by one by Han and Sung
    ("Dimension-wise importance sampling weight clipping", 2019) and Fan et al. ("Hybrid actor-critic reinforcement
    learning in parameterized action space", 2019).

    ``ratio`` and ``is_open`` are ``[T, E, 8]``, ``advantage`` ``[T, E]``, ``occurrences`` ``[8]``.
    """
    return -average_per_head(_clip_gain(ratio, advantage.unsqueeze(-1), clip), is_open, occurrences).sum()


def _clip_gain(ratio: Tensor, advantage: Tensor, clip: float) -> Tensor:
    return torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)


def compute_value_loss(value: Tensor, target: Tensor, scale: Tensor, count: Tensor) -> Tensor:
    """Half the mean squared error in units of ``scale``, the returns' standard deviation."""
    return 0.5 * (((value - target) / scale).square().sum() / count)


def average_per_head(figures: Tensor, is_open: Tensor, occurrences: Tensor) -> Tensor:
    """Mean ``[8]`` of ``figures [T, E, 8]`` over the steps in which each head had a choice; 0 if it never had one."""
    return (figures * is_open).sum((0, 1)) / occurrences.clamp(min=1)


def average_active_heads(figures: Tensor, occurrences: Tensor, weights: Tensor | float = 1.0) -> Tensor:
    """Mean, 0-d, of ``figures [8]`` times ``weights`` over the heads that had a choice at all; 0 if none had."""
    active = occurrences > 0
    # Weights are divided first: then equal ones give the same gradient, to the bit, as one that multiplies the mean.
    return (figures * (weights * active / active.sum().clamp(min=1))).sum()


def measure_change(log_ratio: Tensor, clip: float, count: Tensor) -> dict[str, Tensor]:
    """How far the policy has moved from the one that acted, by the probability ratios r of whole actions; all 0-d.

    ``kl`` is the k3 estimate of KL(old || new): the mean of r - 1 - log r >= 0 (Schulman, "Approximating KL
    divergence", 2020); ``clip_fraction`` that of ratios outside the clip range, whichever ratio the surrogate clips;
    ``deviation`` the largest |r - 1|.
    """
    change = log_ratio.exp() - 1
    return {
        "kl": (change - log_ratio).sum() / count,
        "clip_fraction": (change.abs() > clip).sum() / count,
        "deviation": change.abs().amax(),
    }


def fetch_figures(figures: Mapping[str, Tensor], heads: Sequence[Head]) -> dict[str, float]:
    """Figures of a device under flat names by one copy: 0-d ones, and ``[8]`` as ``name/head`` for these ``heads``."""
    flat: dict[str, Tensor] = {}
    for name, figure in figures.items():
        if figure.dim():
            flat |= {f"{name}/{head.name.lower()}": figure[head] for head in heads}
        else:
            flat[name] = figure
    numbers = cast("list[float]", torch.stack(list(flat.values())).tolist())
    return dict(zip(flat, numbers, strict=True))


def require_bf16(settings: PPOSettings, device: torch.device) -> None:
    """Refuse bfloat16 where it is not faster."""
    if settings.bf16 and device.type != "cuda":
        raise ConfigError(f"ppo.bf16 speeds up CUDA devices only, and the policy learns on {device}: set it to false")


class PPO:
    """Proximal policy optimisation of a policy, whose parameters, statistics and optimizer it updates.

    `state_tensors` is all that is needed to continue.
    """

    def __init__(self, policy: Policy, settings: PPOSettings, seed: int) -> None:
        """The policy is on its final device. ``seed`` and the number of the update decide the order of minibatches."""
        require_bf16(settings, policy.device)
        self.policy, self.settings, self.seed = policy, settings, seed
        self.updates = 0
        self._optimizer = PolicyOptimizer(policy, settings)
        # Only this method is compiled: the policy itself keeps its parameters' names and acts as before.
        self._evaluate = torch.compile(policy.evaluate) if settings.compile else policy.evaluate

    def update(
        self,
        rollout: Rollout,
        progress: float,
        *others: Rollout,
        rate_scale: float = 1.0,
        record: list[dict[str, float]] | None = None,
    ) -> Figures:
        """Learn from one rollout at ``progress`` (0 at the start of training, 1 at its end).

        ``others`` are rollouts of another shape, from other suites; every minibatch has its share of each rollout.
        The learning rate is multiplied by ``rate_scale``. Returns the update's `FIGURES`. All figures of each minibatch
        are appended to ``record``, with the gradient's norms where the update came that far.

        If a loss or gradient is not finite, that step and the rest are left out, and so is the update of statistics.
        """
        settings, policy, optimizer = self.settings, self.policy, self._optimizer
        heads, rollouts = policy.heads.present, (rollout, *others)
        self._require_divisible([rollout.environments for rollout in rollouts])

        # Advantages and returns, and the step size and entropy weights at this progress.
        batches = [self.make_batch(rollout) for rollout in rollouts]
        normalised = standardise_advantages(batches) if settings.normalise_advantages else batches
        learning_rate = settings.learning_rate_at(progress) * rate_scale
        weights = settings.entropy_weights(progress)
        entropy_weights = torch.tensor(weights, device=policy.device)

        # Several epochs over the same rollouts, each in minibatches of whole episodes: the LSTM needs them whole.
        generator = torch_generator(self.seed, self.updates)
        minibatches: list[tuple[Tensor, ...]] = []
        for _ in range(settings.epochs):
            orders = [
                torch.randperm(rollout.environments, generator=generator).to(policy.device, non_blocking=True)
                for rollout in rollouts
            ]
            minibatches += zip(*(order.tensor_split(settings.minibatches) for order in orders), strict=True)

        taken, all_norms = list[dict[str, Tensor]](), list[Tensor]()
        optimizer_steps, stopped_early, finite = 0, False, True
        for environments in minibatches:
            minibatch = [
                select_environments(batch, index)
                for batch, index in zip(normalised, environments, strict=True)
                if len(index)
            ]
            optimizer.zero_grad()
            figures = self.backward(minibatch, entropy_weights)
            if settings.bf16 and not taken:
                # Measured in float32: rounding to bfloat16 would look like a difference between acting and learning.
                figures["deviation"] = self.measure_deviation([batch.rollout for batch in minibatch])
            taken.append(figures)

            # Early stopping: the rollout is of no more use once the policy has moved too far from the one that acted.
            # This is known before the step, so the step is not taken. For both this and the gradient, which is clipped
            # for the step, the CPU waits once.
            gradient_norms = optimizer.clip_gradients()
            kl, gradient_norm = cast("list[float]", torch.stack((figures["kl"], gradient_norms[-1])).tolist())
            stopped_early = kl > KL_STOP * settings.target_kl
            if stopped_early:
                break

            # One step, unless the gradient is not finite.
            all_norms.append(gradient_norms)
            finite = math.isfinite(gradient_norm)
            if not finite:
                break
            optimizer.step(learning_rate)
            optimizer_steps += 1
        optimizer.zero_grad()

        # Normalisation statistics are updated once and last: if they moved between acting and learning, the first ratio
        # would differ from 1.
        target = select_running(batches, lambda batch: batch.target)
        if finite:
            observations = [select_steps(rollout.observations, rollout.running) for rollout in rollouts]
            policy.update_statistics(observations, target)
        self.updates += 1

        # Figures of single minibatches.
        norm_names = (*(f"module_gradient_norm/{name}" for name in optimizer.modules), "gradient_norm")
        if record is not None:
            for figures, norms in zip_longest(taken, all_norms):
                named = {} if norms is None else dict(zip(norm_names, norms.unbind(), strict=True))
                record.append(fetch_figures({**figures, **named}, heads))

        # Figures of the update: means over its minibatches, those of heads over the decisions in which they had a
        # choice, and figures of the rollout over the steps that belong to its episodes.
        columns = {name: torch.stack([figures[name] for figures in taken]) for name in taken[0]}
        choices = columns["head_choices"]
        in_all = choices.sum(0)
        per_head = {
            name: (columns[name] * choices).sum(0) / in_all.clamp(min=1)
            for name in ("head_entropy", "head_clip_fraction")
        }
        norms = torch.stack(all_norms).mean(0) if all_norms else torch.zeros(len(norm_names), device=policy.device)
        value = select_running(batches, lambda batch: batch.rollout.value)
        returns = target + select_running(
            batches, lambda batch: discount_rewards(batch.rollout.control_variate, settings.gamma)
        )
        explained_variance = 1 - (target - value).var() / (target.var() + SMALLEST)
        update = {
            **{name: columns[name].mean() for name in ("policy_loss", "value_loss", "clip_fraction")},
            "entropy": average_active_heads(per_head["head_entropy"], in_all),
            "kl": columns["kl"].amax(),
            "first_ratio_deviation": columns["deviation"][0],
            "explained_variance": explained_variance.clamp(min=-1),
            "return_mean": returns.mean(),
            "return_deviation": returns.std(),
            "advantage_deviation": select_running(batches, lambda batch: batch.advantage).std(),
            **per_head,
            "head_share": columns["head_share"].mean(0),
            **dict(zip(norm_names, norms.unbind(), strict=True)),
        }
        return {
            **fetch_figures(update, heads),
            **{f"head_entropy_weight/{head.name.lower()}": weights[head] for head in heads},
            "learning_rate": learning_rate,
            "rate_scale": rate_scale,
            "optimizer_steps": float(optimizer_steps),
            "stopped_early": float(stopped_early),
            "finite": float(finite),
            "skipped": 0.0,
        }

    def backward(self, batches: Sequence[PPOBatch], entropy_weights: Tensor) -> dict[str, Tensor]:
        """Accumulate the gradient of the minibatch's loss, one chunk of time after the other, and return its figures.

        The minibatch is all ``batches``, of different shapes; a decision counts alike, whichever batch it is in.
        ``entropy_weights`` are ``[8]``. A chunk hands its memory to the next, but no gradient, and frees its graph
        before it: truncated backpropagation through time (Williams and Peng, 1990).

        Figures are 0-d, or ``[8]`` per head, over the ``head_choices`` decisions in which it had a choice.
        """
        settings, policy, clip = self.settings, self.policy, self.settings.clip

        # Number of decisions, and of those in which each head had a choice. Means over both add up over the parts.
        count = torch.stack([batch.rollout.running.sum() for batch in batches]).sum()
        choices = torch.stack([batch.is_open.sum((0, 1)) for batch in batches]).sum(0)
        sums: list[dict[str, Tensor]] = []
        largest: list[dict[str, Tensor]] = []
        for batch in batches:
            rollout = batch.rollout
            length, state = settings.chunk or rollout.steps, rollout.state
            for start in range(0, rollout.steps, length):
                chunk = slice(start, start + length)
                running, is_open, advantage = rollout.running[chunk], batch.is_open[chunk], batch.advantage[chunk]
                if start and not running[0].any():
                    break  # the longest episode has ended
                places = running.nonzero(as_tuple=True)  # found once: a device is waited for to find them

                # The present policy on the observations and actions of the one that acted.
                observations, masks = select_steps(rollout.observations, chunk), select_steps(rollout.masks, chunk)
                with torch.autocast(policy.device.type, torch.bfloat16, enabled=settings.bf16):
                    evaluated = self._evaluate(observations, masks, rollout.actions[chunk], state)
                state = evaluated.state.detach()
                log_ratio = bound_log_ratio(evaluated.log_prob[places], rollout.log_prob[chunk][places])
                head_ratio = bound_log_ratio(evaluated.chosen_log_prob, rollout.chosen_log_prob[chunk]).exp()

                # loss = clipped surrogate + weight * value error - entropy bonus
                if settings.surrogate == "joint":
                    surrogate = compute_joint_surrogate(log_ratio.exp(), advantage[places], clip, count)
                else:
                    surrogate = compute_factored_surrogate(head_ratio, advantage, clip, is_open, choices)
                value, target = evaluated.value[places], batch.target[chunk][places]
                error = compute_value_loss(value, target, policy.value_head.scale, count)
                entropies = average_per_head(evaluated.entropy, is_open, choices)
                bonus = average_active_heads(entropies, choices, entropy_weights)
                (surrogate + settings.value_weight * error - bonus).backward()

                # Figures, from the same numbers.
                change = measure_change(log_ratio.detach(), clip, count)
                ratio = head_ratio.detach()
                deviation, spread = (ratio - 1).abs(), advantage.unsqueeze(-1).expand_as(ratio)
                sums.append(
                    {
                        "policy_loss": surrogate.detach(),
                        "value_loss": error.detach(),
                        "kl": change["kl"],
                        "clip_fraction": change["clip_fraction"],
                        "head_entropy": entropies.detach(),
                        "head_share": is_open.sum((0, 1)) / count,
                        "head_clip_fraction": average_per_head(deviation > clip, is_open, choices),
                        "head_ratio": average_per_head(ratio, is_open, choices),
                        "head_advantage": average_per_head(spread, is_open, choices),
                        "head_advantage_square": average_per_head(spread.square(), is_open, choices),
                    }
                )
                largest.append({"deviation": change["deviation"], "head_deviation": (deviation * is_open).amax((0, 1))})
        figures = merge_arrays(lambda column: torch.stack(column).sum(0), sums)
        figures |= merge_arrays(lambda column: torch.stack(column).amax(0), largest)
        return {**figures, "head_choices": choices.to(figures["kl"].dtype)}

    def make_batch(self, rollout: Rollout) -> PPOBatch:
        """The rollout with its advantages and returns.

        Both are less the control variate, if there is one; advantages are relative to the group, if there are groups.
        """
        settings, running = self.settings, rollout.running
        rewards = subtract_control_variate(rollout.reward, rollout.control_variate, running, settings.gamma)
        advantage = estimate_advantages(
            rewards, rollout.value, rollout.final_value, running, settings.gamma, settings.gae_lambda
        )
        target = advantage + rollout.value
        if settings.group > 1:
            advantage = subtract_group_mean(advantage, settings.group)
        # A head learns only from steps in which it had a choice.
        is_open = self.policy.find_open_heads(rollout.masks, rollout.actions) & running.unsqueeze(-1)
        return PPOBatch(rollout, advantage, target, is_open)

    @torch.no_grad()
    def measure_deviation(self, rollouts: Sequence[Rollout]) -> Tensor:
        """Largest |ratio - 1|, 0-d, in float32: by how much acting and learning disagree."""
        deviations: list[Tensor] = []
        for rollout in rollouts:
            evaluated = self.policy.evaluate(rollout.observations, rollout.masks, rollout.actions, rollout.state)
            log_ratio = (evaluated.log_prob - rollout.log_prob)[rollout.running]
            deviations.append(log_ratio.expm1().abs().amax())
        return torch.stack(deviations).amax()

    def _require_divisible(self, environments: Sequence[int]) -> None:
        minibatches, group = self.settings.minibatches, self.settings.group
        if max(environments) < minibatches:
            raise ConfigError(
                f"{plural(max(environments), 'environment')} cannot be split into {minibatches} minibatches: "
                "lower minibatches or raise the number of environments"
            )
        for count in environments:
            if count % group:
                raise ConfigError(
                    f"{plural(count, 'environment')} cannot be split into groups of {group}: make one a "
                    "multiple of the other"
                )

    def state_tensors(self) -> dict[str, Tensor]:
        """Copies of all that `load_state_tensors` needs to continue exactly: weights, statistics, moments, counters."""
        return {
            "updates": torch.tensor(self.updates),
            **{f"policy.{name}": value.clone() for name, value in self.policy.state_dict().items()},
            **{f"optimizer.{name}": value for name, value in self._optimizer.state_tensors().items()},
        }

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from the `state_tensors` of a `PPO` with the same policy and settings.

        Raises:
            CheckpointError: they are of another policy, or have impossible values; nothing is changed.
        """
        tensors = self.policy.drop_closed_heads(tensors)
        policy, optimizer = strip_prefix("policy.", tensors), strip_prefix("optimizer.", tensors)
        expected = {"updates": torch.tensor(self.updates)}
        expected |= {f"policy.{name}": value for name, value in self.policy.state_dict().items()}
        if optimizer:
            expected |= {f"optimizer.{name}": value for name, value in self._optimizer.expected_tensors().items()}
        for name in sorted(tensors.keys() ^ expected.keys()):
            found = "lacks" if name in expected else "has"
            raise CheckpointError(
                f"the learner's checkpoint {found} {name[:80]!r}, unlike this policy: use its settings"
            )
        for name, saved in tensors.items():
            own = expected[name]
            if (saved.dtype, saved.shape) != (own.dtype, own.shape):
                raise CheckpointError(
                    f"the learner's checkpoint holds {name} as {saved.dtype} {list(saved.shape)} where this policy has "
                    f"{own.dtype} {list(own.shape)}: use the settings it was saved with"
                )
        require_in_range(tensors, "the learner's checkpoint", (*NON_NEGATIVE, "updates", "step", SECOND_MOMENT))
        self.policy.load_state_dict(policy)
        self._optimizer.load_state_tensors(optimizer)
        self.updates = int(tensors["updates"])


class PolicyOptimizer:
    """AdamW for a policy, which clips gradients and can save its state. Only the value head is decayed."""

    def __init__(self, policy: Policy, settings: PPOSettings) -> None:
        critic = {f"value_head.{name}": parameter for name, parameter in policy.value_head.named_parameters()}
        actor = {name: parameter for name, parameter in policy.named_parameters() if name not in critic}
        # In the order in which AdamW numbers its parameters.
        self._named = {**actor, **critic}
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
        self.modules: dict[str, list[nn.Parameter]] = {
            **{head.name.lower(): policy.heads.output_parameters(head) for head in policy.heads.present},
            "encoder": list(policy.encoder.parameters()),
            "lstm": list(policy.lstm.parameters()),
            "value": list(critic.values()),
        }
        """Parameters by the module whose gradient's norm is measured."""

    def clip_gradients(self) -> Tensor:
        """Clip the gradients; returns the norms from before, ``[modules + 1]``, that of all parameters last."""
        norms = [
            nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
            for parameters in self.modules.values()
        ]
        return torch.stack((*norms, nn.utils.clip_grad_norm_(self._named.values(), self._max_norm)))

    def step(self, learning_rate: float) -> None:
        """Apply the gradients."""
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        self._adam.step()

    def zero_grad(self) -> None:
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
        """Tensors of the names, shapes and types that `load_state_tensors` takes besides an empty mapping."""
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
