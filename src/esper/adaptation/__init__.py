"""Adapting a trained model to new data: which growth, and where, is found by trying."""
