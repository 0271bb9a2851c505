"""A rule's advice to a policy, which begins by taking it: what is learned is where to do better.

The rule that looks needs nobody to learn for it and serves any host. A policy that sees at each decision what the rule
would do, and whose untrained heads prefer that, is the rule, with some exploration, before it has learned anything;
what it learns is added, and how fast seeds blend in, of which it is not advised. This is residual policy learning
(Silver et al., 2018, arXiv:1812.06298; Johannink et al., 2019, arXiv:1812.03201) for choices instead of forces: logits
add up, and what is advised is a choice like any other.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from pydantic import Field, field_validator
from torch import Tensor

from esper.config.settings import Settings
from esper.control.rules import LookRule, LookSettings
from esper.engine.observation import Observation
from esper.lifecycle.actions import RELEVANT, Head, Op
from esper.lifecycle.legality import ActionMasks


class AdviceSettings(Settings):
    """Who advises a policy, and how much it heeds that before it learns.

    A weight is the first logit of what is advised, above all other legal choices of that head: at 4, an untrained
    policy takes the one of four operations that is advised with probability .95. The weights are learned on from there.
    """

    rule: LookSettings = LookSettings()
    """How the rule decides, and how what it goes by is measured; the policy sees of that what the rule sees."""
    op: float = Field(default=4.0, allow_inf_nan=False)
    """Of the operation."""
    slot: float = Field(default=3.0, allow_inf_nan=False)
    """Of the slot."""
    blueprint: float = Field(default=3.0, allow_inf_nan=False)
    """Of the blueprint."""

    @field_validator("rule")
    @classmethod
    def _rule_sees_what_it_goes_by(cls, rule: LookSettings) -> LookSettings:
        needed = {0.0: "held_out", 1.0: "fitted"}.get(rule.fitted, "both")
        if rule.promise.shown not in ("both", needed):
            raise ValueError(
                f"promise.shown is {rule.promise.shown}, but with fitted at {rule.fitted:g} the rule goes by {needed}: "
                "leave it at both, or change fitted"
            )
        return rule


ADVICE_NAMES = (tuple(f"advised_{op.name.lower()}" for op in Op), ("advised",), ("advised",))
"""Of the features that `advise` adds to the three parts of an observation, each 0 or 1."""


def append_advice(rule: LookRule, observation: Observation, masks: ActionMasks) -> Observation:
    """What E networks show, with what the rule would do there as the last features of each part.

    The slot and the blueprint are marked where the operation that is advised has one.

    Raises:
        ConfigError: nobody measured what is promised.
    """
    actions, _ = rule.act(observation, masks, None)
    op, slot, blueprint = (actions[:, head] for head in (Head.OP, Head.SLOT, Head.BLUEPRINT))
    environments, slots, blueprints = observation.blueprints.shape[:3]
    rows = np.arange(environments)
    ops = np.zeros((environments, len(Op)), np.float32)
    ops[rows, op] = 1
    places = np.zeros((environments, slots, 1), np.float32)
    places[rows, slot, 0] = RELEVANT[op, Head.SLOT]
    kinds = np.zeros((environments, slots, blueprints, 1), np.float32)
    kinds[rows, slot, blueprint, 0] = RELEVANT[op, Head.BLUEPRINT]
    added = (torch.from_numpy(part) for part in (ops, places, kinds))
    return Observation(*(torch.cat((own, new.to(own)), -1) for own, new in zip(observation, added, strict=True)))


class Advice(NamedTuple):
    """What is advised, each 0 or 1; ``*`` as in `Observation`."""

    ops: Tensor
    """``[*, 6]``."""
    slots: Tensor
    """``[*, S]``."""
    blueprints: Tensor
    """``[*, S, K]``."""


def read_advice(observation: Observation) -> Advice:
    """What `advise` added."""
    return Advice(observation.globals[..., -len(Op) :], observation.slots[..., -1], observation.blueprints[..., -1])
