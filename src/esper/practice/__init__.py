"""What `esper grow` does: train a host on a task while it grows."""
