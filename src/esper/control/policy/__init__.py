"""The learned controller."""

from esper.control.policy.recurrent import Policy, PolicyEvaluation, PolicyState, PolicyStep
from esper.control.policy.settings import PolicySettings

__all__ = ["Policy", "PolicyEvaluation", "PolicySettings", "PolicyState", "PolicyStep"]
