"""Growth of any number of networks: observe, mask, decide, apply, measure, roll back, record."""

from esper.engine.engine import GrowthBackend, GrowthEngine

__all__ = ["GrowthBackend", "GrowthEngine"]
