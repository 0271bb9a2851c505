"""What each seed earns: Shapley values and pairwise interactions of the seeds of a network."""
