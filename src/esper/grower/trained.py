"""Whether the optimizer that a grower was given is the one that trains the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from esper.errors import ConfigError


class TrainedBy:
    """Notices if ``host`` learns while ``optimizer`` makes no step, as where another one has taken its place."""

    def __init__(self, host: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._host = host
        self._stepped = False
        self._sums = self._summed()
        optimizer.register_step_post_hook(self._note)

    def require(self) -> None:
        """Look back on the time since the last call.

        Raises:
            ConfigError: another optimizer has trained the host.
        """
        sums, before = self._summed(), self._sums
        stepped, self._stepped, self._sums = self._stepped, False, sums
        learned = any(parameter.grad is not None for parameter in self._host.parameters())
        if learned and not stepped and len(sums) == len(before) and not torch.equal(sums, before.to(sums)):
            raise ConfigError(
                "the model has learned since the last decision, but the optimizer that the grower was given made no "
                "step: another one trains it, and would never train what grows; make that one from "
                "model.parameter_groups(lr=...), and a Grower with it that loads this one's state_dict()"
            )

    def rebase(self) -> None:
        """What changed the host just now was no training."""
        self._sums = self._summed()

    def _note(self, *_: Any) -> None:
        self._stepped = True

    @torch.no_grad()
    def _summed(self) -> Tensor:
        """Of the values of each learning parameter, ``[P]``."""
        learning = [parameter for parameter in self._host.parameters() if parameter.requires_grad]
        if not learning:
            return torch.zeros(0)
        return torch.stack([parameter.sum(dtype=torch.float64).to(learning[0].device) for parameter in learning])
