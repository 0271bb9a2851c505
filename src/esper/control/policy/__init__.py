"""The learned controller: a recurrent policy for any number of slots and blueprints."""

from esper.control.policy.network import Policy, PolicyEvaluation, PolicyState, PolicyStep
from esper.control.policy.settings import OpPrior, PolicySettings

__all__ = ["OpPrior", "Policy", "PolicyEvaluation", "PolicySettings", "PolicyState", "PolicyStep"]
