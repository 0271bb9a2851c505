"""Read a policy that a training run has saved, with as much of its configuration as playing it takes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import ConfigDict
from torch import Tensor

from esper.control.learned import LearnedController
from esper.control.observation import SPEC
from esper.control.policy import Policy, PolicySettings
from esper.lifecycle.rules import Rules
from esper.settings import Settings
from esper.state import from_plain
from esper.state_files import take_prefix


class PolicyOrigin(Settings):
    """What the configuration of a run says of the policy that it trained; how it was trained is left out."""

    model_config = ConfigDict(extra="ignore")

    suite: str
    """The distribution of learning problems on which it was trained."""
    rules: Rules = Rules()
    """What may happen to seeds there."""
    policy: PolicySettings = PolicySettings()
    """Its sizes."""


def restore_policy(tensors: Mapping[str, Tensor], settings: PolicySettings) -> LearnedController:
    """The policy in a checkpoint's ``tensors``, greedy, on the CPU.

    Raises:
        CheckpointError: they are of a policy with other settings.
    """
    policy = Policy(SPEC, settings, torch.Generator().manual_seed(0))
    saved = take_prefix("policy.", tensors)  # the others are the optimizer's and counters
    policy.load_state_dict(from_plain(policy.state_dict(), saved, "the checkpoint's policy"))
    return LearnedController(policy, greedy=True)
