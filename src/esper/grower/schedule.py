"""A schedule of learning rates by what was spent, rather than by steps, of which growth makes each dearer."""

from __future__ import annotations

import math

from esper.config.arguments import NonNegativeFloat, check_arguments
from esper.errors import ConfigError


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
