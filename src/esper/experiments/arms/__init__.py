"""Everybody whom a learned policy has to beat before it may claim that control pays, on the same instances."""
