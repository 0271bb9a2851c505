"""Which settings train well? Many trials, one run directory each, ranked by what their policies score."""
