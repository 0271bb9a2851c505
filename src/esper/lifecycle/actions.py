"""The factored action: one operation per environment and step, with its choices."""

from collections.abc import Sequence
from enum import IntEnum
from typing import Annotated, Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from esper.config.settings import Settings
from esper.errors import IllegalActionError
from esper.numerics.arrays import Bools, Ints

# Selections of slots and environments

Places: TypeAlias = tuple[NDArray[np.intp], ...]
"""Indices of slots in an ``[E, S]`` array: environments and slots, as from `numpy.nonzero`."""
Rows: TypeAlias = slice | NDArray[np.integer] | Bools
"""A selection of environments."""


# What an action consists of


class Op(IntEnum):
    """The operation in one environment in one step."""

    WAIT = 0
    GERMINATE = 1
    ADVANCE = 2
    SET_ALPHA = 3
    FOSSILIZE = 4
    PRUNE = 5


class Head(IntEnum):
    """The columns of an action array ``int64 [E, 8]``, in the order in which they are chosen."""

    OP = 0
    SLOT = 1
    BLUEPRINT = 2
    BLEND = 3
    TEMPO = 4
    ALPHA_TARGET = 5
    ALPHA_SPEED = 6
    ALPHA_CURVE = 7


class Blend(IntEnum):
    """How a seed's output s is added to the features h; chosen when it germinates, for its whole life."""

    ADD = 0
    """h + alpha * s."""
    GATE = 1
    """A learned gate between h and s."""
    MULTIPLY = 2
    """h * (1 + alpha * tanh s)."""


class Curve(IntEnum):
    """The shape of alpha's ramp to its target."""

    LINEAR = 0
    COSINE = 1
    SIGMOID = 2


TEMPOS = (3, 5, 8)
"""Steps a new seed takes to reach its alpha target. The action column holds an index into this."""
ALPHA_TARGETS = (0.5, 0.7, 1.0)
"""Values that alpha may move to. The action column holds an index into this."""
ALPHA_SPEEDS = (0, 3, 5, 8)
"""Steps that a change of alpha takes; 0 is at once. The action column holds an index into this."""

CHOICES: dict[Head, tuple[str, ...]] = {
    Head.BLEND: tuple(blend.name.lower() for blend in Blend),
    Head.TEMPO: tuple(map(str, TEMPOS)),
    Head.ALPHA_TARGET: tuple(map(str, ALPHA_TARGETS)),
    Head.ALPHA_SPEED: tuple(map(str, ALPHA_SPEEDS)),
    Head.ALPHA_CURVE: tuple(curve.name.lower() for curve in Curve),
}
"""Names of the choices of the heads besides operation, slot and blueprint."""


def describe_choices(action: Sequence[int]) -> dict[str, str]:
    """Names of an action's choices besides operation, slot and blueprint, by relevant head."""
    relevant = RELEVANT[action[Head.OP]]
    return {head.name.lower(): values[action[head]] for head, values in CHOICES.items() if relevant[head]}


# The heads that each operation reads, besides OP.
_READS: dict[Op, set[Head]] = {
    Op.WAIT: set(),
    Op.GERMINATE: {Head.SLOT, Head.BLUEPRINT, Head.BLEND, Head.TEMPO, Head.ALPHA_TARGET},
    Op.ADVANCE: {Head.SLOT},
    Op.SET_ALPHA: {Head.SLOT, Head.ALPHA_TARGET, Head.ALPHA_SPEED, Head.ALPHA_CURVE},
    Op.FOSSILIZE: {Head.SLOT},
    Op.PRUNE: {Head.SLOT, Head.ALPHA_SPEED, Head.ALPHA_CURVE},
}
RELEVANT: Bools = np.array([[head is Head.OP or head in _READS[op] for head in Head] for op in Op])
"""``bool [6, 8]``: whether an operation (row) reads a head (column). Heads that it does not read must be 0."""


def count_choices(slots: int, blueprints: int) -> tuple[int, ...]:
    """The number of choices of each head, in the order of `Head`."""
    return len(Op), slots, blueprints, len(Blend), len(TEMPOS), len(ALPHA_TARGETS), len(ALPHA_SPEEDS), len(Curve)


def make_wait_actions(environments: int) -> Ints:
    """WAIT in every environment: actions ``int64 [E, 8]``."""
    return np.zeros((environments, len(Head)), dtype=np.int64)


def clear_irrelevant_heads(actions: Ints) -> Ints:
    """Set the heads that an action's operation does not read to 0, in actions ``[E, 8]``.

    Raises IllegalActionError for an unknown operation.
    """
    ops = actions[:, Head.OP]
    unknown = (ops < 0) | (ops >= len(Op))
    if unknown.any():
        environment = int(unknown.argmax())
        raise IllegalActionError(
            f"environment {environment}: operation {ops[environment]} is unknown, it must be 0 to {len(Op) - 1}"
        )
    # One form per action: equal effects are equal arrays.
    return np.where(RELEVANT[ops], actions, 0)


def make_action(
    op: Op,
    slot: int = 0,
    blueprint: int = 0,
    *,
    blend: Blend = Blend.ADD,
    tempo: int = 3,
    alpha_target: float = 1.0,
    alpha_speed: int = 0,
    alpha_curve: Curve = Curve.LINEAR,
) -> Ints:
    """An action ``int64 [8]`` from values instead of indices: tempo and speed in steps, the target as alpha.

    Heads that ``op`` does not read are 0. Raises IllegalActionError for a value that is not on offer.
    """
    # Values become indices, the form in which policies choose.
    row = np.zeros((1, len(Head)), dtype=np.int64)
    row[0, Head.OP] = op
    row[0, Head.SLOT] = slot
    row[0, Head.BLUEPRINT] = blueprint
    row[0, Head.BLEND] = blend
    row[0, Head.TEMPO] = _find_index(tempo, TEMPOS, "tempo")
    row[0, Head.ALPHA_TARGET] = _find_index(alpha_target, ALPHA_TARGETS, "alpha_target")
    row[0, Head.ALPHA_SPEED] = _find_index(alpha_speed, ALPHA_SPEEDS, "alpha_speed")
    row[0, Head.ALPHA_CURVE] = alpha_curve
    return clear_irrelevant_heads(row)[0]


def _find_index(value: float, choices: Sequence[float], head: str) -> int:
    if value not in choices:
        raise IllegalActionError(f"{head} {value} is not on offer, choose one of {', '.join(map(str, choices))}")
    return choices.index(value)


_Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class PerHead(Settings):
    """A number of at least 0 for each `Head`. A single number is valid for all of them."""

    op: _Number
    slot: _Number
    blueprint: _Number
    blend: _Number
    tempo: _Number
    alpha_target: _Number
    alpha_speed: _Number
    alpha_curve: _Number

    @classmethod
    def fill(cls, number: float) -> Self:
        """The same number for all heads."""
        return cls.model_validate(number)

    @property
    def by_head(self) -> tuple[float, ...]:
        """The numbers in the order of `Head`."""
        numbers = self.model_dump()
        return tuple(numbers[head.name.lower()] for head in Head)

    @model_validator(mode="before")
    @classmethod
    def _expand_number(cls, value: Any) -> Any:
        # YAML reads 1e-3 as text, which pydantic converts to a number.
        return dict.fromkeys(cls.model_fields, value) if isinstance(value, int | float | str) else value
