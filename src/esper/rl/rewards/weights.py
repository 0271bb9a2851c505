"""The weights of a reward's terms."""

from __future__ import annotations

from pydantic import Field

from esper.rl.rewards.facts import RentBasis
from esper.settings import Settings


class Weights(Settings):
    """In units of the score, that is, 0.01 is worth a point of accuracy. A mode reads those of its own terms,
    and others are refused beside it."""

    rent_on: RentBasis = "parameters"
    """What rent is paid on."""
    progress: float = Field(default=0.02, ge=0, allow_inf_nan=False)
    """Advanced for each slot on its way from germination to holding, and taken back in the end."""
    attribution: float = Field(default=0.5, ge=0, allow_inf_nan=False)
    """Share of the seeds' contributions that is advanced, and taken back in the end."""
    intervention: float = Field(default=0.001, ge=0, allow_inf_nan=False)
    """Cost of every operation but wait."""
    intervention_after: float = Field(default=0.0, ge=0, lt=1)
    """Share of the training after which that cost sets in. It then grows evenly, and is whole halfway from there to the
    end: charged from the start, it can teach never to act before acting has ever paid."""
    shock: float = Field(default=0.002, ge=0, allow_inf_nan=False)
    """Cost of a seed's alpha moving by 1 in one step; it grows with the square of the change."""
    early_prune: float = Field(default=0.01, ge=0, allow_inf_nan=False)
    """Cost of pruning a seed before its time."""
    early_age: int = Field(default=5, ge=1, le=1000)
    """Steps since germination up to which pruning is before its time."""
