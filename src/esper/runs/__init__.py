"""Typed events and the run store that keeps them."""
