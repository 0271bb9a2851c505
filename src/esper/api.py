"""What practitioners need, in one place: `import esper`."""

from esper.grower import Decision, Grower
from esper.growth.attach import attach
from esper.growth.model import GrowingModel

__all__ = ["Decision", "Grower", "GrowingModel", "attach"]
