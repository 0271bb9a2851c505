"""Families and hidden variants of the token suite: which sampler, which host, how much data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from esper.tasks.tokens.examples import Sampler
from esper.tasks.tokens.families.argmax import largest_mean, largest_power
from esper.tasks.tokens.families.context import context
from esper.tasks.tokens.families.halves import halves
from esper.tasks.tokens.families.order import order
from esper.tasks.tokens.families.pointer import pointer
from esper.tasks.tokens.families.product import product
from esper.tasks.tokens.families.vote import vote

FULL = (10, 10, 10)
TRAIN_SIZES = (384, 512, 768)


@dataclass(frozen=True)
class Variant:
    """One hidden setting of a family."""

    sampler: Sampler
    widths: tuple[int, int, int] = FULL
    linear: bool = False
    train_sizes: tuple[int, ...] = TRAIN_SIZES
    label_noise: float = 0.0
    after_drift: Sampler | None = None
    """Takes over from ``sampler`` at the instance's drift step."""


Family = Mapping[str, Variant]

_near_order, _far_order = partial(order, distance=1), partial(order, distance=4)
_near_pointer, _far_pointer = partial(pointer, distance=1), partial(pointer, distance=4)

TRAINING: Mapping[str, Family] = {
    "order": {
        "near_10_10_10": Variant(_near_order),
        "near_10_3_3": Variant(_near_order, widths=(10, 3, 3)),
        "near_3_3_10": Variant(_near_order, widths=(3, 3, 10)),
        "far_10_10_10": Variant(_far_order),
        "far_10_3_3": Variant(_far_order, widths=(10, 3, 3)),
    },
    "ctx": {
        "flipped": Variant(partial(context, flipped=True)),
        "direct": Variant(partial(context, flipped=False)),
    },
    "bott": {
        "2_10_10": Variant(largest_mean, widths=(2, 10, 10)),
        "10_2_10": Variant(largest_mean, widths=(10, 2, 10)),
        "10_10_2": Variant(largest_mean, widths=(10, 10, 2)),
    },
    "quad": {
        "linear": Variant(largest_power, linear=True),
        "relu": Variant(largest_power),
    },
    "vote": {
        "loud": Variant(partial(vote, spread=1.8)),
        "even": Variant(partial(vote, spread=0.2)),
    },
    "plain": {
        "mean": Variant(largest_mean),
        "noisy": Variant(partial(vote, spread=0.2), train_sizes=(96,), label_noise=0.4),
    },
    "drift": {
        "near": Variant(largest_mean, after_drift=_near_order),
        "far": Variant(largest_mean, after_drift=_far_order),
    },
}

TRANSFER: Mapping[str, Family] = {
    "pointer": {
        "near": Variant(_near_pointer),
        "far": Variant(_far_pointer),
    },
    "halves": {
        "10_10_10": Variant(halves),
        "10_3_10": Variant(halves, widths=(10, 3, 10)),
    },
    "product": {
        "linear": Variant(product, linear=True),
        "2_10_10": Variant(product, widths=(2, 10, 10)),
    },
}
