"""Other libraries on growth: what needs an optional extra. Nothing else in Esper imports it."""
