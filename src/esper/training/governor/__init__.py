"""Rolls networks back when training blows up: rows of a population, or one model in a loop of your own."""

from esper.training.governor.model import Governor
from esper.training.governor.rows import RowGovernor
from esper.training.governor.settings import GovernorSettings
from esper.training.governor.vitals import Trouble

__all__ = ["Governor", "GovernorSettings", "RowGovernor", "Trouble"]
