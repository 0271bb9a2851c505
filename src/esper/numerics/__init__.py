"""Arrays, random streams, devices and FLOPs: what several rooms compute with."""
