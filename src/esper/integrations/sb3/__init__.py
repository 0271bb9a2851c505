"""stable_baselines3 and sb3-contrib on growth. It needs the extra ``sb3``."""

from esper.errors import ConfigError
from esper.extras import find_missing

try:
    from esper.integrations.sb3.controller import ModelController
    from esper.integrations.sb3.environment import GrowthVecEnv
except ModuleNotFoundError as error:
    raise ConfigError(find_missing("sb3", "esper.integrations.sb3", error.name)) from error

__all__ = ["GrowthVecEnv", "ModelController"]
