"""Observations and the controllers that decide by them."""
