"""Growth of one model, in a training loop of its owner's."""

from esper.grower.decision import Decision
from esper.grower.grower import Grower

__all__ = ["Decision", "Grower"]
