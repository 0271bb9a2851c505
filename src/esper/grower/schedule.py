"""A schedule of learning rates by what was spent, rather than by steps, of which growth makes each dearer."""

from __future__ import annotations

import math

from esper.errors import ConfigError


def warmup_stable_decay(share: float, *, warmup: float = 0.02, decay: float = 0.2) -> float:
    """The factor of learning rates where ``share`` of a budget is spent: it rises, stays, and falls to 0 at the end.

    ```python
    grower = esper.Grower(model, optimizer, evaluate=validate, training_flops=1e15)
    scheduler = LambdaLR(optimizer, lambda _: esper.warmup_stable_decay(grower.spending.share))
    ```

    Any scheduler survives growth, since slots have groups of parameters from the start; each group has a learning rate
    of its own, which is multiplied. Call ``scheduler.step()`` after the optimizer's. Policies see the learning rate.

    The fall is ``1 - sqrt(x)`` in the share x of the decay that is over (Hägele et al. 2024, arXiv 2405.18392).

    Args:
        share: Of the budget, from 0 to 1; beyond it the factor is 0.
        warmup: Share in which the factor rises evenly from 0 to 1.
        decay: Share, at the end, in which it falls.

    Raises:
        ConfigError: the phases are none, or overlap.
    """
    if not (0 <= warmup <= 1 and 0 <= decay <= 1 and warmup + decay <= 1):
        raise ConfigError(f"warmup {warmup} and decay {decay} must be shares, from 0 to 1, that are at most 1 together")
    if not share >= 0:
        raise ConfigError(f"share is {share}: give what is spent of the budget, from 0 on")
    if share < warmup:
        return share / warmup
    if share <= 1 - decay:
        return 1.0
    return max(1 - math.sqrt((share - (1 - decay)) / decay), 0.0) if decay else 0.0
