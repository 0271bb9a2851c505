"""Experiments: comparisons, arms, statistics, searches and benchmarks. No package of the product imports it."""
