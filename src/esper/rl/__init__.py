"""How a controller is learned: environment, rewards, rollouts and PPO.

Importing it makes ``esper/Growth-v0`` known to Gymnasium.
"""

import gymnasium

ENVIRONMENT = "esper/Growth-v0"

gymnasium.register(
    ENVIRONMENT,
    # By address: registering imports nothing.
    entry_point="esper.rl.gym.envs:GrowthEnv",
    vector_entry_point="esper.rl.gym.envs:make_vector",
)
