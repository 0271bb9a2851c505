"""The cost of training, in FLOPs and seconds, and the share of a budget that is spent."""

import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook

from esper.config.arguments import Flops, Seconds, check_arguments
from esper.engine.budget import TRAINING_PASSES
from esper.errors import ConfigError
from esper.growth.model import MODEL_ADVICE, GrowingModel
from esper.serialization import from_plain, to_plain


class Spending:
    """Counts the FLOPs of every pass through a model: training, validation, forks and promises.

    Torch counts those of the host's forward pass at `esper.attach`; they are scaled by the size of the input. The FLOPs
    of a module are those its blueprint declares. A backward pass costs one forward pass for the features, and another
    one for the parameters, if they learn (Kaplan et al. 2020, arXiv 2001.08361, section 2.1).

    A backward pass that skips layers counts in full; direct calls of parts of the host and recomputation by gradient
    checkpointing do not count. If the host returns something other than tensors, mappings, lists, tuples or
    dataclasses, every forward pass with gradients enabled counts as if a backward pass followed: evaluate under
    `torch.no_grad`. Outputs carry a hook: detach what you save.

    A grower has one, `Grower.spending`. If you grow by hand, make your own.

    Args:
        model: An attached model; counting starts now.
        training_flops: Budget of FLOPs; None: no limit.
        seconds: Budget of seconds from now on; None: no limit.

    Raises:
        ConfigError: an argument has the wrong type; or FLOPs are limited, but torch cannot count all of the host's.
    """

    @check_arguments(ConfigError, model=MODEL_ADVICE)
    def __init__(
        self,
        model: GrowingModel,
        training_flops: Flops | None = None,
        *,
        seconds: Seconds | None = None,
    ) -> None:
        self._model, self._max_flops, self._max_seconds = model, training_flops, seconds
        self.limited = training_flops is not None or seconds is not None
        self._flops = self._backward_flops = 0.0
        """FLOPs in all, and of the backward pass that belongs to the latest forward pass."""
        self._started = time.monotonic()
        """When counting of seconds started, less those before loading."""
        self.shared_share: float | None = None
        """The `share` until the next decision, which several processes have in common; None: it is computed anew."""
        if training_flops is not None:
            self._require_countable()
        model.input_hook.before_pass.append(self.count_forward)
        model.input_hook.after_pass.append(self.count_backward)

    @property
    def flops(self) -> float:
        """FLOPs spent so far; raises ConfigError if they cannot be counted."""
        self._require_countable()
        return self._flops

    @property
    def seconds(self) -> float:
        """Seconds spent so far, without those between saving and loading."""
        return time.monotonic() - self._started

    @property
    def share(self) -> float:
        """The share of the budget that is spent, from 0 to 1; raises ConfigError if there is none.

        With several processes each has its own. For a grower's, all use that of the first process when it last decided.
        """
        if not self.limited:
            raise ConfigError("there is no budget: give training_flops or seconds")
        return self.compute_share() if self.shared_share is None else self.shared_share

    def compute_share(self) -> float:
        """The share that this process has spent, of FLOPs or seconds, whichever is more; 0 without a budget."""
        by_flops = 0.0 if self._max_flops is None else self.flops / self._max_flops
        return max(by_flops, 0.0 if self._max_seconds is None else self.seconds / self._max_seconds)

    def add(self, flops: float) -> None:
        """Add FLOPs, also those of something else than passes through the model."""
        self._flops += flops

    def count_forward(self, inputs: Tensor) -> None:
        """Called before each forward pass."""
        # Forward: in proportion to the size of the input.
        model = self._model
        examples, host = inputs.numel() / model.example_size, model.host_flops or 0
        seeds = sum(slot.seed.flops_at(slot.site) for slot in model.slots.values() if slot.seed is not None)
        # Backward through the host: once for its features if anything before it learns, once for its own parameters.
        learns = any(parameter.requires_grad for parameter in model.host.parameters())
        passes = bool(model.seeds or learns or inputs.requires_grad) + learns
        self._backward_flops = examples * (host * passes + seeds * (TRAINING_PASSES - 1))
        self.add(examples * (host + seeds))

    def count_backward(self, outputs: Sequence[Tensor]) -> None:
        """Called after each forward pass with its outputs that require grad; empty if they are unknown."""
        flops, self._backward_flops = self._backward_flops, 0.0
        if outputs:
            register_multi_grad_hook(outputs, lambda _: self.add(flops), mode="any")
        else:
            self.add(flops)

    def _require_countable(self) -> None:
        if self._model.host_flops is None:
            raise ConfigError(
                f"FLOPs are unknown, because torch cannot count {self._model.uncounted_flops}: limit decisions or "
                "seconds instead"
            )

    def state_dict(self) -> dict[str, Any]:
        """What was spent, as plain values."""
        return to_plain({"flops": self._flops, "seconds": self.seconds})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was called."""
        values = from_plain({"flops": 0.0, "seconds": 0.0}, state, "what was spent")
        self._flops, self._started = values["flops"], time.monotonic() - values["seconds"]
