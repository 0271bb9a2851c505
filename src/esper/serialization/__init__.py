"""Saved state in files, which are written completely or not at all, and read without trust."""
