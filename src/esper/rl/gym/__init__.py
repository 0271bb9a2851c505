"""Growth as a Gymnasium environment."""
