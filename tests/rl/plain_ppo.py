"""PPO with which the tests of learning were calibrated: no groups, and moderate rates."""

from __future__ import annotations

from typing import Any

from esper.rl.settings import PPOSettings

_PLAIN: dict[str, Any] = {
    "gae_lambda": 0.95,
    "group": 1,
    "epochs": 4,
    "entropy_start": 0.05,
    "entropy_floor": 0.01,
    "learning_rate": 1e-3,
    "final_learning_rate": 2e-4,
}


def plain_ppo(**changes: Any) -> PPOSettings:
    """Those settings, with changes."""
    return PPOSettings(**{**_PLAIN, **changes})
