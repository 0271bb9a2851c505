"""Train a host on a task while it grows: what `esper grow` does."""
