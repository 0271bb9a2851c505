"""What controllers have cost before they decide about anything: environment steps of learning, or of a search."""

from __future__ import annotations

from esper.config.loading import load_settings
from esper.control.shipped import ESPER, open_policy
from esper.serialization.checkpoints import Checkpoints
from esper.tasks.suite import Suite
from esper.train.baselines import baseline_settings, baselines
from esper.train.settings import TrainSettings


def count_trainings(name: str, suite: Suite) -> float:
    """Whole trainings of networks that the controller of that name has cost: to learn, or to tune for this suite.

    Of a policy those of its own training, twins included, and of the one that it started from, as that is now; those
    of policies that it was chosen among are not counted.

    Raises:
        ConfigError: there is no such controller.
        RunError, CheckpointError: the run is unusable.
    """
    if name != ESPER and name in {one.name for one in baselines(suite)}:
        return baseline_settings(suite).environment_steps.get(name, 0) / suite.steps
    run = open_policy(name)
    settings = load_settings(TrainSettings, run.config)
    each = settings.environments + (settings.environments // settings.ppo.group if settings.ppo.twin else 0)
    return Checkpoints(run.checkpoints).latest().iteration * each + count_start(settings, suite)


def count_start(settings: TrainSettings, suite: Suite) -> float:
    """Trainings that the policy had cost with which a run of these settings starts."""
    return 0.0 if settings.start_from is None else count_trainings(settings.start_from, suite)
