"""Rolls networks back when training blows up: rows of a population, or one model in a loop of your own."""

from esper.training.governor.detectors import GovernorSettings, Trouble
from esper.training.governor.model import Governor
from esper.training.governor.population import PopulationGovernor

__all__ = ["Governor", "GovernorSettings", "PopulationGovernor", "Trouble"]
