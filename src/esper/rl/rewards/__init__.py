"""What a step is worth to a controller: terms, the modes made of them, and who is paid by which mode."""

from esper.rl.rewards.facts import Facts, Moment, Worth, rent_due
from esper.rl.rewards.modes import MODES, Terms
from esper.rl.rewards.scheme import Scheme, total
from esper.rl.rewards.settings import RewardSettings, RewardSpec

__all__ = ["MODES", "Facts", "Moment", "RewardSettings", "RewardSpec", "Scheme", "Terms", "Worth", "rent_due", "total"]
