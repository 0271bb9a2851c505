"""How hosts learn: the population, row-wise optimizers and fused counterfactuals."""
