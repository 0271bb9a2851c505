"""What growth and training take, in FLOPs and seconds, and a schedule of learning rates by the share that is spent."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook

from esper.config.arguments import Flops, NonNegativeFloat, Seconds, check_arguments
from esper.engine.budget import TRAINING_PASSES
from esper.errors import ConfigError
from esper.growth.model import MODEL_ADVICE, GrowingModel
from esper.serialization.state_files import from_plain, to_plain


class Spending:
    """Counts every pass through a model, whoever asks for it: training, validation, forks, and what is measured.

    A pass forward through the host takes what torch counted when slots were attached, in proportion to the size of the
    input, and each seed what its blueprint says. A backward pass takes as much once for the features, and once more for
    the parameters, if they learn (Kaplan et al. 2020, arXiv 2001.08361, section 2.1). It is counted when it comes, in
    training and in evaluation mode alike. A host that does not learn and has no seeds is not differentiated.

    A backward pass that skips some layers or parameters counts as a whole one. Not counted are calls of parts of the
    host alone, such as its encoder, and what gradient checkpointing within the host computes once more. Where the host
    returns tensors in a form that is not looked into (neither mapping, list, tuple nor dataclass), every pass forward
    that could be differentiated counts as if it were: evaluate under `torch.no_grad`.
    What a pass returns carries a hook: detach what is to be saved.

    A grower has one, `Grower.spending`; for growth by hand make it yourself:

    ```python
    spending = esper.Spending(model, training_flops=1e12)
    scheduler = LambdaLR(optimizer, lambda _: esper.warmup_stable_decay(spending.share))
    ```

    Args:
        model: Attached; from now on it is counted.
        training_flops: As many may be spent; None: any number.
        seconds: Likewise, since now.
        counted_in: What else the FLOPs belong to; None: nothing.

    Raises:
        ConfigError: an argument is of another kind; FLOPs are limited, and torch cannot count those of the host.
    """

    @check_arguments(ConfigError, model=MODEL_ADVICE, counted_in="give an esper.Spending")
    def __init__(
        self,
        model: GrowingModel,
        training_flops: Flops | None = None,
        *,
        seconds: Seconds | None = None,
        counted_in: Spending | None = None,
    ) -> None:
        self._model, self._most_flops, self._most_seconds = model, training_flops, seconds
        self._flops, self._earlier = 0.0, 0.0
        self._backward = 0.0
        """What a backward pass takes that belongs to the latest forward pass."""
        self._began = time.monotonic()
        self._counted_in = counted_in
        self._agreed: float | None = None
        self._unknown = "torch cannot count those of this model's host" if model.host_flops is None else ""
        if training_flops is not None:
            self._require_known()
        model.tap.pass_counters.append(self)

    @property
    def flops(self) -> float:
        """Spent by now.

        Raises:
            ConfigError: they cannot be counted, as where the model is compiled.
        """
        self._require_known()
        return self._flops

    @property
    def seconds(self) -> float:
        """Passed by now; not those between saving and loading."""
        return self._earlier + time.monotonic() - self._began

    @property
    def limited(self) -> bool:
        """Whether there is a budget."""
        return self._most_flops is not None or self._most_seconds is not None

    @property
    def share(self) -> float:
        """Of the budget that is spent, 1 at its end; in several processes each one's own.

        That of a grower is as the first one knew it at the last step.

        Raises:
            ConfigError: there is no budget; or FLOPs cannot be counted, as where the model is compiled.
        """
        if not self.limited:
            raise ConfigError("there is no budget of which a share could be spent: say training_flops or seconds")
        return self.compute_share() if self._agreed is None else self._agreed

    def agree_on(self, share: float) -> None:
        """Let this be the share until it is told anew, whatever this process spends meanwhile."""
        self._agreed = share

    def compute_share(self) -> float:
        """What this process knows of it by now; 0 without a budget."""
        by_flops = 0.0 if self._most_flops is None else self.flops / self._most_flops
        return max(by_flops, 0.0 if self._most_seconds is None else self.seconds / self._most_seconds)

    def add(self, flops: float) -> None:
        """What something else took."""
        self._flops += flops
        if self._counted_in is not None:
            self._counted_in.add(flops)

    def count_forward(self, inputs: Tensor) -> None:
        """A forward pass begins, of these inputs of the model; what is compiled is not seen."""
        model = self._model
        examples, host = inputs.numel() / model.example_size, model.host_flops or 0
        seeds = sum(slot.seed.flops_at(slot.site) for slot in model.slots.values() if slot.seed is not None)
        learns = any(parameter.requires_grad for parameter in model.host.parameters())
        passes = bool(model.seeds or learns or inputs.requires_grad) + learns
        self._backward = examples * (host * passes + seeds * (TRAINING_PASSES - 1))
        self.add(examples * (host + seeds))

    def count_backward(self, outputs: Sequence[Tensor]) -> None:
        """The forward pass is over: count any backward pass that begins at these of its outputs."""
        flops, self._backward = self._backward, 0.0
        if outputs:
            register_multi_grad_hook(outputs, lambda _: self.add(flops), mode="any")
        else:
            self.add(flops)

    def _require_known(self) -> None:
        why = "passes of a compiled model are not seen" if self._model.compilations.compiled else self._unknown
        if why:
            raise ConfigError(f"no FLOPs are known, since {why}: limit something else, such as decisions or seconds")

    def state_dict(self) -> dict[str, Any]:
        """What was spent, as plain values."""
        return to_plain({"flops": self._flops, "seconds": self.seconds})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was called.

        Raises:
            CheckpointError: it is of another make.
        """
        spent = from_plain({"flops": 0.0, "seconds": 0.0}, state, "what was spent")
        self._flops, self._earlier, self._began = spent["flops"], spent["seconds"], time.monotonic()


def limit_progress(progress: float, spending: Spending, planned: int | None) -> float:
    """The share of the growth that is over, as controllers are told: of decisions or of the budget, whichever is more.

    Without a number of decisions it is that of the budget alone.
    """
    if not spending.limited:
        return progress
    share = spending.compute_share()
    return min(share if planned is None else max(progress, share), 1.0)


@check_arguments(ConfigError)
def warmup_stable_decay(
    share: NonNegativeFloat, *, warmup: NonNegativeFloat = 0.02, decay: NonNegativeFloat = 0.2
) -> float:
    """The factor of learning rates where ``share`` of a budget is spent: it rises, stays, and falls to 0 at the end.

    ```python
    grower = esper.Grower(model, optimizer, evaluate=validate, training_flops=1e15)
    scheduler = LambdaLR(optimizer, lambda _: esper.warmup_stable_decay(grower.spending.share))
    ```

    Any scheduler survives growth, since slots have groups of parameters from the start; each group has a learning rate
    of its own, which is multiplied. Call ``scheduler.step()`` after the optimizer's: the first step, of which nothing
    was spent before, has a rate of 0. Policies see the learning rate. In several processes the share, and so the rate,
    changes at each decision only.

    The fall is ``1 - sqrt(x)`` in the share x of the decay that is over (Hägele et al. 2024, arXiv 2405.18392).

    Args:
        share: Of the budget, from 0 to 1; beyond it the factor is as at 1.
        warmup: Share in which the factor rises evenly from 0 to 1.
        decay: Share, at the end, in which it falls.

    Raises:
        ConfigError: an argument is no share, or the phases overlap.
    """
    if warmup + decay > 1:
        raise ConfigError(f"warmup {warmup} and decay {decay} must be at most 1 together")
    if share >= 1:
        return float(decay == 0)
    if share < warmup:
        return share / warmup
    over = share - (1 - decay)
    return 1.0 if over <= 0 else 1 - math.sqrt(min(over / decay, 1.0))
