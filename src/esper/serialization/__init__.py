"""Saved state: whole files or none, read without believing what lies in them."""
