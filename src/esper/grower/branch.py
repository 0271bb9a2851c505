"""A copy of a growing model that goes its own way: to be finished and exported while the model itself grows on."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch

from esper.config.arguments import Flops, check_arguments
from esper.errors import ConfigError
from esper.grower.spending import Spending
from esper.growth.hooks import require_attached
from esper.growth.model import MODEL_ADVICE, OPTIMIZER_ADVICE, GrowingModel


@dataclass(frozen=True)
class Branch:
    """What `branch` returns. It lives as long as you keep it, and is not in anybody's state dict."""

    model: GrowingModel
    """A model with parameters, buffers and seeds of its own."""
    optimizer: torch.optim.Optimizer
    """Of the branch, with all that the other one remembers, such as moments."""
    spending: Spending
    """What the branch took: `flops`, `seconds`, and `share` of the budget that it was given."""


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
    """Copy a growing model and its optimizer as they are now; what happens to the copy does not touch them.

    One training gives several sizes: at each of them a branch is trained to its end, at falling learning rates, and
    exported, while the model goes on at its own and grows (Hägele et al. 2024, arXiv 2405.18392, for sizes of budgets).

    ```python
    rung = esper.branch(model, optimizer, training_flops=1e12, counted_in=grower.spending)
    decay = LambdaLR(rung.optimizer, lambda _: esper.warmup_stable_decay(rung.spending.share, warmup=0, decay=1))
    while rung.spending.share < 1:
        train_one_step(rung.model, rung.optimizer)
        decay.step()
    rung.model.finalize()
    ```

    The branch begins with the learning rates that the optimizer has by now; a scheduler that is made of its optimizer
    takes those that the optimizer had when its own first scheduler was made. Slots of the branch may grow by hand, and
    a grower of its own may be made of it. The branch of a compiled model is not compiled.
    In several processes make it in all of them, wrap its model as you did the other one, and let all make the same
    passes: its share is each one's own.

    Args:
        model: That grows, as `esper.attach` returned it.
        optimizer: That trains it.
        training_flops: What the branch may take, which `spending.share` goes by; None: any number.
        counted_in: Where the FLOPs of the branch are counted as well; None: nowhere.

    Raises:
        ConfigError: an argument is of another kind; FLOPs are limited, and torch cannot count them.
        SlotError: a submodule with a slot was replaced, or the optimizer was not made of the model's groups.
    """
    require_attached(model)
    model.link(optimizer)
    own, its = copy.deepcopy((model, optimizer))
    model.copies.unregister(own.copies)
    own.link(its)
    return Branch(own, its, Spending(own, training_flops, counted_in=counted_in))
