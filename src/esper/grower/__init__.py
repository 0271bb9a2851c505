"""Growth of one model, in a training loop of the user's."""

from esper.grower.callbacks import GrowerCallback, PrintDecisions, RunRecorder
from esper.grower.config import GrowerConfig
from esper.grower.decision import Decision, Ending
from esper.grower.evaluation import Constrained, Metric, Refit
from esper.grower.grower import Grower

__all__ = [
    "Constrained",
    "Decision",
    "Ending",
    "Grower",
    "GrowerCallback",
    "GrowerConfig",
    "Metric",
    "PrintDecisions",
    "Refit",
    "RunRecorder",
]
