"""How a controller is learned: environment, rewards, rollouts and PPO.

Importing it makes ``esper/Growth-v0`` known to Gymnasium:

```python
import gymnasium
import esper.rl

envs = gymnasium.make_vec("esper/Growth-v0", num_envs=16)
```
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import gymnasium

if TYPE_CHECKING:
    from esper.engine.config import EpisodeConfig
    from esper.rl.gym import GrowthEnv, GrowthSettings, GrowthVectorEnv, make_vector
    from esper.rl.rewards import MODES, RewardInputs, RewardMode, RewardSettings, RewardState, register_reward
from esper.rl.settings import PPOSettings

ENVIRONMENT = "esper/Growth-v0"
"""The name by which Gymnasium knows the environment."""

__all__ = [
    "ENVIRONMENT",
    "MODES",
    "EpisodeConfig",
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

_HOMES = {
    "esper.rl.gym": ("GrowthEnv", "GrowthSettings", "GrowthVectorEnv", "make_vector"),
    "esper.rl.rewards": ("MODES", "RewardInputs", "RewardMode", "RewardSettings", "RewardState", "register_reward"),
    "esper.rl.settings": ("EpisodeConfig", "PPOSettings"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

gymnasium.register(
    ENVIRONMENT,
    # By address: registering imports nothing.
    entry_point="esper.rl.gym:GrowthEnv",
    vector_entry_point="esper.rl.gym:make_vector",
)


def __getattr__(name: str) -> Any:
    # Not at import: what is in this room imports the room first.
    if name not in _HOME_OF:
        raise AttributeError(f"module 'esper.rl' has no attribute {name!r}")
    return vars(import_module(_HOME_OF[name]))[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
