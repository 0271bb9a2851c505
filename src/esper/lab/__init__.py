"""The laboratory: comparisons, arms, statistics, searches, benchmarks, figures, reports. No product room imports it."""
