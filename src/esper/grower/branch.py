"""Copies of a growing model that train separately: to be finished and exported while the model itself grows on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from esper.config.arguments import Flops, check_arguments
from esper.errors import ConfigError, SlotError
from esper.grower.spending import Spending
from esper.growth.copies import copy_with
from esper.growth.followers import unwrap_optimizer
from esper.growth.hooks import require_attached
from esper.growth.model import MODEL_ADVICE, OPTIMIZER_ADVICE, GrowingModel


@dataclass(frozen=True)
class Branch:
    """The copy that `branch` returns. It lives as long as you keep it, and is in no other state dict."""

    model: GrowingModel
    """The copy, with parameters, buffers and modules of its own."""
    optimizer: torch.optim.Optimizer
    """Optimizer of the copy, with the state of the original, such as moments."""
    spending: Spending
    """What the copy has cost: `flops`, `seconds`, and the `share` of its budget."""


@check_arguments(
    ConfigError,
    model=MODEL_ADVICE,
    optimizer=OPTIMIZER_ADVICE,
    counted_in="give an esper.Spending, such as grower.spending",
)
def branch(
    model: GrowingModel,
    optimizer: torch.optim.Optimizer,
    *,
    training_flops: Flops | None = None,
    counted_in: Spending | None = None,
) -> Branch:
    """Copy a growing model and its optimizer as they are now, to train the copy independently.

    One training gives models of several sizes: at each size a branch is trained to its end, at falling learning rates,
    and exported, while the model itself grows on at its own rate (as Hägele et al. 2024, arXiv 2405.18392, do for
    several budgets).

    ```python
    rung = esper.branch(model, optimizer, training_flops=1e12, counted_in=grower.spending)
    decay = LambdaLR(rung.optimizer, lambda _: esper.warmup_stable_decay(rung.spending.share, warmup=0, decay=1))
    while rung.spending.share < 1:
        train_one_step(rung.model, rung.optimizer)
        decay.step()
    rung.model.finalize()
    ```

    The branch starts with the present learning rates. A scheduler of its optimizer starts from the initial rates: those
    before the first scheduler of the original optimizer. The branch may grow by hand or by a grower of its own. The
    branch of a compiled model is not compiled. In several processes make it in all of them, wrap its model as the
    original one, and make the same passes in all; each process computes the share by itself.

    Args:
        model: From `esper.attach`.
        optimizer: The optimizer that trains it; of a wrapper, the one inside is copied.
        training_flops: Budget of the branch, for `spending.share`; None: no limit.
        counted_in: Another `Spending` to which the FLOPs of the branch are added too.

    Raises:
        ConfigError: an argument is of another kind; FLOPs are limited, and torch cannot count them.
        SlotError: a submodule with a slot was replaced, the model holds something that cannot be copied, or the
            optimizer was not made of the model's groups.
    """
    require_attached(model)
    optimizer = unwrap_optimizer(optimizer)
    model.link(optimizer)
    # Copied together, so that the optimizer's copy owns the parameters of the model's.
    model_copy, optimizer_copy = copy_with(model, (model, optimizer), SlotError)
    model.copies.unregister(model_copy.copies)
    model_copy.link(optimizer_copy)
    return Branch(model_copy, optimizer_copy, Spending(model_copy, training_flops, counted_in=counted_in))
