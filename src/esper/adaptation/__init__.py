"""`esper.adapt`: growth on a frozen host, chosen by cross-validation on new data."""
