"""stable_baselines3 and sb3-contrib on growth. It needs the extra ``sb3``."""

from esper.integrations.sb3.controller import ModelController
from esper.integrations.sb3.environment import GrowthVecEnv

__all__ = ["GrowthVecEnv", "ModelController"]
