"""A rule's advice to a policy, which follows it at first and learns where to do better.

A policy that observes the choice of the look-ahead rule at each decision, and whose untrained heads prefer it, starts
as the rule with some exploration. Training adds to that, and chooses how seeds blend in, without advice. This is
residual policy learning (Silver et al., 2018, arXiv:1812.06298; Johannink et al., 2019, arXiv:1812.03201) for
discrete choices: logits add up instead of forces.
"""

from typing import NamedTuple

import numpy as np
import torch
from pydantic import Field, field_validator
from torch import Tensor

from esper.config.settings import Settings
from esper.control.rules import LookRule, LookSettings
from esper.engine.observation import Observation
from esper.lifecycle.actions import RELEVANT, Head, Op
from esper.lifecycle.rules import ActionMasks


class AdviceSettings(Settings):
    """The rule that advises a policy, and the initial weight of its advice.

    A weight is added to the logit of the advised choice. At 4, an untrained policy takes the advised one of four
    operations with probability 0.95. Training changes the weights.
    """

    rule: LookSettings = LookSettings()
    """Settings of the rule, including how promise is measured; the policy observes the same promise."""
    op: float = Field(default=4.0, allow_inf_nan=False)
    """Initial weight of the advised operation."""
    slot: float = Field(default=3.0, allow_inf_nan=False)
    """Initial weight of the advised slot."""
    blueprint: float = Field(default=3.0, allow_inf_nan=False)
    """Initial weight of the advised blueprint."""

    @field_validator("rule")
    @classmethod
    def _require_shown_promise(cls, rule: LookSettings) -> LookSettings:
        needed = {0.0: "held_out", 1.0: "fitted"}.get(rule.fitted, "both")
        if rule.promise.shown not in ("both", needed):
            raise ValueError(
                f"promise.shown is {rule.promise.shown}, but with fitted={rule.fitted:g} the rule needs {needed}: "
                "leave it at both, or change fitted"
            )
        return rule


ADVICE_NAMES = (tuple(f"advised_{op.name.lower()}" for op in Op), ("advised",), ("advised",))
"""Names of the features that `append_advice` adds to the three parts of an observation, each 0 or 1."""


def append_advice(rule: LookRule, observation: Observation, masks: ActionMasks) -> Observation:
    """The observation of E networks with the rule's choices as the last features of each part.

    Slot and blueprint are marked only where the advised operation reads them.
    """
    actions, _ = rule.act(observation, masks, None)
    # One-hot operation, and marks of the advised slot and blueprint.
    op, slot, blueprint = (actions[:, head] for head in (Head.OP, Head.SLOT, Head.BLUEPRINT))
    environments, slots, blueprints = observation.blueprints.shape[:3]
    rows = np.arange(environments)
    advised_op = np.zeros((environments, len(Op)), np.float32)
    advised_op[rows, op] = 1
    advised_slot = np.zeros((environments, slots, 1), np.float32)
    advised_slot[rows, slot, 0] = RELEVANT[op, Head.SLOT]
    advised_blueprint = np.zeros((environments, slots, blueprints, 1), np.float32)
    advised_blueprint[rows, slot, blueprint, 0] = RELEVANT[op, Head.BLUEPRINT]
    advice = (torch.from_numpy(marks) for marks in (advised_op, advised_slot, advised_blueprint))
    return Observation(
        *(torch.cat((part, marks.to(part)), -1) for part, marks in zip(observation, advice, strict=True))
    )


class Advice(NamedTuple):
    """The advised choices, each 0 or 1; ``*`` as in `Observation`."""

    ops: Tensor
    """``[*, 6]``."""
    slots: Tensor
    """``[*, S]``."""
    blueprints: Tensor
    """``[*, S, K]``."""


def read_advice(observation: Observation) -> Advice:
    """The advice in an observation from `append_advice`."""
    return Advice(observation.globals[..., -len(Op) :], observation.slots[..., -1], observation.blueprints[..., -1])
