"""How a controller is learned: environment, rewards, rollouts and PPO."""
