"""What `evaluate` may return: a loss, a pair of loss and accuracy, or named figures with the loss among them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from esper import arguments
from esper.arguments import Kind, describe
from esper.errors import ConfigError
from esper.telemetry.metric import ACCURACY, LOSS

ROUNDING = 1e-6
"""By which the mean of float32 hits may exceed 1."""
EXPECTED = (
    "a number (a loss), a pair (loss, accuracy), or a mapping of names to numbers that has 'loss', such as "
    "{'loss': 0.3, 'f1': 0.8}"
)

_NUMBER = Kind(arguments.number, "give a number, or a tensor that holds a single one")

Figures = dict[str, float]
"""What was measured of a model on validation data, by name; ``loss`` is always among them."""


def number(value: object, what: str) -> float:
    """A number, or a tensor or array that holds a single one; what is too large for a float is infinite.

    Raises:
        ConfigError: it is something else; ``what`` says where it came from.
    """
    return _NUMBER.taken(what, value, ConfigError)


def figures(returned: object) -> Figures:
    """What `evaluate` returned, checked and by name.

    A loss that is not finite is no mistake of the user's, as training may have blown up; nor is then any accuracy.

    Raises:
        ConfigError: it is none of what is `EXPECTED`, or the accuracy is no fraction.
    """
    found = _named(returned)
    loss, accuracy = found[LOSS], found.get(ACCURACY)
    if accuracy is None or not math.isfinite(loss):
        return found
    if 0 <= accuracy <= 1 + ROUNDING:
        return {**found, ACCURACY: min(accuracy, 1.0)}
    advice = "return the fraction that is right, which is 0 where nothing is"
    if accuracy > 1:
        advice = "divide percentages by 100"
        if 0 <= loss <= 1:
            advice += ", or return (loss, accuracy) in this order if the two are swapped"
        advice += "; a figure that is no fraction needs a name of its own, and metric=..."
    raise ConfigError(f"evaluate gave loss {loss:g} and accuracy {accuracy:g}, which is not in [0, 1]: {advice}")


def _named(returned: object) -> Figures:
    if isinstance(returned, Mapping):
        given = cast("Mapping[Any, Any]", returned)
        if LOSS in given and all(isinstance(name, str) for name in given):
            return {name: number(value, f"{name!r} of what evaluate returned") for name, value in given.items()}
    elif isinstance(returned, tuple | list):
        pair = cast("Sequence[Any]", returned)
        if len(pair) == 2:
            return {
                name: number(value, f"the {name} of evaluate")
                for name, value in zip((LOSS, ACCURACY), pair, strict=True)
            }
    else:
        try:
            return {LOSS: number(returned, "the loss of evaluate")}
        except ConfigError:
            pass  # the sentence below says more
    raise ConfigError(f"evaluate returned {describe(cast(object, returned))}: it must return {EXPECTED}")
