"""Which reward mode, in which units, with which weights."""

from __future__ import annotations

from typing import Annotated, Any, Self, cast

from pydantic import BeforeValidator, Field, field_validator, model_validator

from esper.errors import ConfigError
from esper.rl.rewards.facts import Family
from esper.rl.rewards.modes import MODES, look_up
from esper.rl.rewards.weights import Weights


class RewardSettings(Weights):
    """How a controller is paid."""

    mode: str = "outcome"
    """Name of a reward mode."""
    family: Family = "accuracy"
    """Unit of scores and contributions: accuracy, or the relative decrease of the loss."""

    @field_validator("mode")
    @classmethod
    def _mode_exists(cls, name: str) -> str:
        try:
            look_up(name)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return name

    @model_validator(mode="after")
    def _family_suits(self) -> Self:
        families = MODES[self.mode].families
        if self.family not in families:
            able = [name for name, mode in MODES.items() if self.family in mode.families]
            raise ValueError(
                f"reward mode '{self.mode}' pays in {' or '.join(families)}, not in {self.family}; "
                f"modes for {self.family} are {', '.join(able)}"
            )
        return self

    @model_validator(mode="after")
    def _weights_are_read(self) -> Self:
        read = MODES[self.mode].weights
        for name, field in Weights.model_fields.items():
            if name not in (*read, "rent_on") and getattr(self, name) != field.default:
                able = [mode for mode in MODES if name in MODES[mode].weights]
                raise ValueError(
                    f"reward mode '{self.mode}' does not read {name}: leave it out, or choose {' or '.join(able)}"
                )
        return self

    def at(self, progress: float) -> RewardSettings:
        """The settings at that share of the training, 0 to 1: the cost of interventions may not be whole yet."""
        if self.intervention_after == 0:
            return self
        whole_after = (1 - self.intervention_after) / 2
        share = min(max((progress - self.intervention_after) / whole_after, 0.0), 1.0)
        return self.model_copy(update={"intervention": self.intervention * share})


def _several(value: Any) -> Any:
    """One mode by its name, the settings of one, or a list of either."""
    entries = list(cast("list[Any]", value)) if isinstance(value, list | tuple) else [value]
    return tuple({"mode": entry} if isinstance(entry, str) else entry for entry in entries)


RewardSpec = Annotated[tuple[RewardSettings, ...], BeforeValidator(_several), Field(min_length=1)]
"""Modes that the environments are paid by, in turns; a name or one mode's settings stand for a single one."""

OUTCOME = RewardSettings()
"""The default."""
