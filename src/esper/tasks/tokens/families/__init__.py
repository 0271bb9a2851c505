"""The token suite's families: pure samplers of examples, one idea per file."""
