"""Training a controller by reinforcement learning: environment, rewards, rollouts and PPO.

Importing it registers ``esper/Growth-v0`` with Gymnasium:

```python
import gymnasium
import esper.rl

envs = gymnasium.make_vec("esper/Growth-v0", num_envs=16)
```
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from esper.extras import require_extra

require_extra("train", "esper.rl", "gymnasium")
import gymnasium  # noqa: E402

if TYPE_CHECKING:
    from esper.engine.engine import GrowthConfig
    from esper.rl.gym import GrowthEnv, GrowthSettings, GrowthVectorEnv, make_vector
    from esper.rl.ppo import PPOSettings
    from esper.rl.rewards import MODES, RewardInputs, RewardMode, RewardSettings, RewardState, register_reward

ENVIRONMENT = "esper/Growth-v0"
"""The environment's name in Gymnasium."""

__all__ = [
    "ENVIRONMENT",
    "MODES",
    "GrowthConfig",
    "GrowthEnv",
    "GrowthSettings",
    "GrowthVectorEnv",
    "PPOSettings",
    "RewardInputs",
    "RewardMode",
    "RewardSettings",
    "RewardState",
    "make_vector",
    "register_reward",
]

_MODULES = ("esper.engine.engine", "esper.rl.ppo", "esper.rl.rewards", "esper.rl.gym")
"""Where the names of `__all__` are defined."""

gymnasium.register(
    ENVIRONMENT,
    # As text: registering imports nothing.
    entry_point="esper.rl.gym:GrowthEnv",
    vector_entry_point="esper.rl.gym:make_vector",
)


def _use_one_thread() -> None:
    # A fork does not copy the threads of torch's pool, so the child's first operation on several would wait for ever.
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_use_one_thread)


def __getattr__(name: str) -> Any:
    # Not at import: the modules of this package import the package first.
    if name in __all__:
        for module in _MODULES:
            if name in (names := vars(import_module(module))):
                return names[name]
    raise AttributeError(f"module 'esper.rl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
