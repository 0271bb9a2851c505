"""Growth of any number of networks: observe, mask, decide, apply, measure, judge, record."""

from esper.engine.backend import GrowthBackend
from esper.engine.engine import GrowthEngine

__all__ = ["GrowthBackend", "GrowthEngine"]
