"""Rolls networks back when training blows up: rows of a population, or one model in a loop of your own."""

from esper.engine.governor import GovernorSettings, Trouble
from esper.population.governor.model import Governor
from esper.population.governor.population import PopulationGovernor

__all__ = ["Governor", "GovernorSettings", "PopulationGovernor", "Trouble"]
