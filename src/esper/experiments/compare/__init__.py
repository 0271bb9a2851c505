"""Is one way to train a controller better than another? Several seeds of each, side by side, and a verdict."""
