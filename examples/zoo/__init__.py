"""Small hosts and data sets, which the examples, the benchmarks (by the link benchmarks/zoo) and some tests share."""
