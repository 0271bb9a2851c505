"""Watching a run in the terminal; needs the extra ``ui``."""
