"""One number for each head of the action, as a setting."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from esper.lifecycle.actions import Head
from esper.settings import Settings

_Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class PerHead(Settings):
    """A number of at least 0 for each `Head`. A single number in its place stands for all of them."""

    op: _Number
    slot: _Number
    blueprint: _Number
    blend: _Number
    tempo: _Number
    alpha_target: _Number
    alpha_speed: _Number
    alpha_curve: _Number

    @classmethod
    def every(cls, number: float) -> Self:
        """The same number for all heads."""
        return cls.model_validate(number)

    @property
    def by_head(self) -> tuple[float, ...]:
        """The numbers in the order of `Head`."""
        numbers = self.model_dump()
        return tuple(numbers[head.name.lower()] for head in Head)

    @model_validator(mode="before")
    @classmethod
    def _one_for_all(cls, given: Any) -> Any:
        # YAML reads 1e-3 as text, which is a number to pydantic all the same.
        return dict.fromkeys(cls.model_fields, given) if isinstance(given, int | float | str) else given
