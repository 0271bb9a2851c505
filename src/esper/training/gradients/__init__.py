"""Whether gradients reach seeds in proportion: rows of a population, or one model's seeds in a loop of your own."""

from esper.training.gradients.health import HealthTable, SeedHealth
from esper.training.gradients.model import GradientHealth

__all__ = ["GradientHealth", "HealthTable", "SeedHealth"]
