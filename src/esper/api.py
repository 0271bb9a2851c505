"""What practitioners need, in one place: `import esper`."""

from esper.engine.config import EpisodeConfig
from esper.grower import (
    Constrained,
    Decision,
    Grower,
    GrowerConfig,
    Metric,
    PrintDecisions,
    Refit,
    RunRecorder,
)
from esper.grower.branch import branch
from esper.grower.scores import Score
from esper.grower.spending import Spending, warmup_stable_decay
from esper.grower.validation import Validation
from esper.growth.attach import attach
from esper.growth.export import export
from esper.growth.model import GrowingModel
from esper.growth.persist import load, save
from esper.ladders.ladder import ladder, plan_ladder

__all__ = [
    "Constrained",
    "Decision",
    "EpisodeConfig",
    "Grower",
    "GrowerConfig",
    "GrowingModel",
    "Metric",
    "PrintDecisions",
    "Refit",
    "RunRecorder",
    "Score",
    "Spending",
    "Validation",
    "attach",
    "branch",
    "export",
    "ladder",
    "load",
    "plan_ladder",
    "save",
    "warmup_stable_decay",
]
