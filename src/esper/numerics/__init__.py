"""Arrays, random streams, devices, FLOPs and stacked modules: what several packages compute with."""
