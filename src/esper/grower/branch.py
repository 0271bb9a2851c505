"""Copies of a growing model that train separately: to be finished and exported while the model itself grows on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from esper.config.arguments import Flops, check_arguments
from esper.errors import ConfigError, SlotError
from esper.grower.spending import Spending
from esper.growth.copies import copy_with
from esper.growth.model import MODEL_ADVICE, OPTIMIZER_ADVICE, GrowingModel, require_attached
from esper.growth.optimizers import unwrap_optimizer


@dataclass(frozen=True)
class Branch:
    """An independent copy of a model and its optimizer, returned by `branch`."""

    model: GrowingModel
    """The copied model, with its own parameters, buffers and modules."""
    optimizer: torch.optim.Optimizer
    """The copied optimizer, with the original's state, such as moments."""
    spending: Spending
    """Cost of the copy: `flops`, `seconds`, and the `share` of its budget."""


@check_arguments(
    ConfigError,
    model=MODEL_ADVICE,
    optimizer=OPTIMIZER_ADVICE,
    counted_in="give an esper.grower.spending.Spending, such as grower.spending",
)
def branch(
    model: GrowingModel,
    optimizer: torch.optim.Optimizer,
    *,
    training_flops: Flops | None = None,
    counted_in: Spending | None = None,
) -> Branch:
    """Copy a growing model and its optimizer, to train the copy independently.

    This gives models of several sizes from one training. At each size, a branch is trained with decaying learning rates
    and exported, while the model continues to grow at its own rate (Hägele et al. 2024, arXiv 2405.18392, do this for
    several budgets).

    ```python
    rung = branch(model, optimizer, training_flops=1e12, counted_in=grower.spending)
    decay = LambdaLR(rung.optimizer, lambda _: warmup_stable_decay(rung.spending.share, warmup=0, decay=1))
    while rung.spending.share < 1:
        train_one_step(rung.model, rung.optimizer)
        decay.step()
    rung.model.finalize()
    ```

    The branch starts with the current learning rates. A scheduler of its optimizer starts from the initial rates, as
    they were before the first scheduler of the original optimizer. The branch may grow by hand or with its own grower.
    The branch of a compiled model is not compiled. With several processes, branch in all of them, wrap the branch's
    model like the original, and run the same passes; each process computes its own share.

    Args:
        model: From `esper.attach`.
        optimizer: Its optimizer; of a wrapper, the inner optimizer is copied.
        training_flops: FLOP budget of the branch, for `spending.share`; None: no limit.
        counted_in: Another `Spending` that also counts the FLOPs of the branch.

    Raises:
        ConfigError: an argument has the wrong type; or FLOPs are limited, but torch cannot count them.
        SlotError: a submodule with a slot was replaced, the model cannot be copied, or the optimizer was not made from
            the model's parameter groups.
    """
    require_attached(model)
    optimizer = unwrap_optimizer(optimizer)
    model.link(optimizer)
    # Copied together, so that the optimizer's copy owns the parameters of the model's.
    model_copy, optimizer_copy = copy_with(model, (model, optimizer), SlotError)
    model.copies.unregister(model_copy.copies)
    model_copy.link(optimizer_copy)
    return Branch(model_copy, optimizer_copy, Spending(model_copy, training_flops, counted_in=counted_in))
