"""Populations: E networks as one program, with row-wise optimizers and fused counterfactuals."""
