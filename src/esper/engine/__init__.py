"""Growth of any number of networks: observe, mask, decide, apply, measure, roll back, record."""

from esper.engine.backend import GrowthBackend
from esper.engine.engine import GrowthEngine

__all__ = ["GrowthBackend", "GrowthEngine"]
