"""Arrays, random streams, devices, FLOPs and stacked modules, shared by several packages."""
