"""What a grower was told: what its run says of it, and what must be the same where its state is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from esper.errors import CheckpointError
from esper.grower.counterfactual import Counterfactual
from esper.lifecycle.rules import Rules
from esper.rl.episode_config import EpisodeConfig

_SAME = ("metric", "higher_is_better", "classes", "seed", "evidence")
"""Terms to which all that a grower remembers belongs; any other may be changed between decisions."""


@dataclass(frozen=True)
class Terms:
    """The arguments of `esper.Grower` that are plain values or settings."""

    controller: str
    """A rule by name, or the directory of a run as it was given."""
    horizon: int | None
    rules: Rules
    """Those in use."""
    conduct: EpisodeConfig
    rent: float
    train_size: int
    classes: int | None
    metric: str | None
    higher_is_better: bool | None
    evidence: Counterfactual
    seed: int
    """That of the first process, in all of them."""

    def told(self) -> dict[str, Any]:
        """All by name; evidence as text."""
        return {**vars(self), "evidence": self.evidence.value}

    def signature(self) -> dict[str, Any]:
        """What must be the same where a state is saved and where it is loaded; plain values."""
        told = self.told()
        return {name: told[name] for name in _SAME}


def require_same(state: Mapping[str, Any], signature: Mapping[str, Any], parts: Sequence[str]) -> None:
    """Refuse a saved ``state`` with another ``signature`` than the grower's, or without one of its ``parts``.

    Raises:
        CheckpointError: it is one.
    """
    for key, here in signature.items():
        if key not in state or state[key] != here:
            saved = f"was saved with {key} {state[key]!r}" if key in state else f"says nothing of its {key}"
            raise CheckpointError(
                f"the grower's state {saved}, but here it is {here!r}: load it into a grower that is told the same, or "
                "begin anew without it"
            )
    for part in parts:
        if not isinstance(state.get(part), dict):
            raise CheckpointError(f"the grower's state is damaged (it has no {part}): give what state_dict() returned")
