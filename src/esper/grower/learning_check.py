"""Checks whether one model learns: that the given optimizer trains it, and that it does better than chance."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from esper.engine.governor import GovernorSettings
from esper.engine.history import PLATEAU_IMPROVEMENT, improves
from esper.errors import ConfigError
from esper.grower.scores import LOSS, Metrics, Scores
from esper.lifecycle.actions import Op
from esper.serialization.state_files import from_plain, to_plain

CHECKS_AT_CHANCE = 8
"""Checks in a row at the level of chance after which the user is warned: such a network hardly gets better."""
SMALLEST_KEPT_SHARE = 0.5
"""A network that keeps less than this of its best improvement over chance is nearer to chance than to its best."""


class OptimizerCheck:
    """Detects a ``host`` that learns while ``optimizer`` makes no step, because another optimizer trains it."""

    def __init__(self, host: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._host = host
        self._stepped = False
        self._sums = self._sum_parameters()
        self._warned = False
        optimizer.register_step_post_hook(self._record_step)

    def require_steps(self) -> None:
        """Refuse a host that has changed since the last call without a step of the optimizer.

        Warns once if the host has not changed at all without such a step.
        """
        # Training changes the sums of parameters; keeping a copy of them all is not needed to notice it.
        sums, before = self._sum_parameters(), self._sums
        stepped, self._stepped, self._sums = self._stepped, False, sums
        has_gradients = any(parameter.grad is not None for parameter in self._host.parameters())
        same = len(sums) == len(before) and torch.equal(sums, before.to(sums))
        if has_gradients and not stepped and len(sums) == len(before) and not same:
            raise ConfigError(
                "the model has changed since the last decision, but the grower's optimizer made no step, so another "
                "optimizer trains it, which would never train new modules: make that one from "
                "model.parameter_groups(lr=...), and a Grower with it that loads this one's state_dict()"
            )
        if same and len(sums) and not stepped and not self._warned:
            self._warned = True
            warnings.warn(
                "the optimizer made no step since the last decision, so there is nothing new to measure: train between "
                "calls of Grower.step, and call it once per epoch or every n minibatches",
                stacklevel=3,
            )

    def accept_changes(self) -> None:
        """Ignore changes of the host so far: they do not come from training, but from a rollback, say."""
        self._sums = self._sum_parameters()

    def _record_step(self, *_: Any) -> None:
        self._stepped = True

    @torch.no_grad()
    def _sum_parameters(self) -> Tensor:
        """The sum of the values of each learning parameter, ``[P]``."""
        learning = [parameter for parameter in self._host.parameters() if parameter.requires_grad]
        if not learning:
            return torch.zeros(0)
        device = learning[0].device
        return torch.stack([values.sum(dtype=torch.float64).to(device) for values in learning])


class LearningCheck:
    """Decides whether a network shows that it has learned, and which operations that rules out.

    Chance is the loss of guessing, where it is known, and otherwise the loss at the beginning. No module is kept in a
    network that is not better than chance, whose gradients are zero or whose output is the same for all examples. None
    is kept or pruned as long as the loss is unusual. Without a governor, whose ``settings`` are then None, nothing is
    checked.
    """

    def __init__(self, settings: GovernorSettings | None, scores: Scores) -> None:
        self._settings, self._scores = settings, scores
        self._best_loss = math.nan
        """The least validation loss so far."""
        self._last_loss = math.nan
        self._best_improvement = np.full(4, math.nan)
        """The greatest improvements of losses over chance and over the start, of training and validation."""
        self._checks_without_progress = 0
        """Checks in a row in which nothing showed that the network has learned."""
        self._learned = self._changed = False

    def has_diverged(self, metrics: Metrics, train_loss: float) -> bool:
        """Whether both losses are far above those of chance, and that of validation is worse than it was.

        A loss on another scale, such as a sum, may be far above in a healthy network too; but then it falls, or stays
        the same for a while.
        """
        if self._settings is None:
            return False
        loss = float(metrics[LOSS])
        by_accuracy, by_losses = self._scores.compute_skills(metrics, train_loss)
        self._best_loss = loss if math.isnan(self._best_loss) else min(self._best_loss, loss)
        worse = bool(improves(np.array(self._best_loss), np.array(loss)))
        return worse and by_losses < 1 - self._settings.multiple and not by_accuracy >= self._settings.lead

    def find_disallowed_operations(
        self, metrics: Metrics, train_loss: float, *, usual: bool, constant_output: bool, idle: bool
    ) -> set[Op]:
        """Operations that are ruled out now; warns once the network has shown no learning for long.

        The loss is ``usual`` if the governor found it so, and a network is ``idle`` if all gradients are zero.
        """
        if self._settings is None:
            return set()
        # Learned: at some time it did better than chance by gradients that are not zero, and its loss changed.
        loss = float(metrics[LOSS])
        better = self._beats_chance(metrics, train_loss, self._settings.lead, usual=usual) and not constant_output
        self._learned |= better and not idle
        self._changed |= not math.isnan(self._last_loss) and loss != self._last_loss
        self._last_loss = loss
        shown = better and self._learned and self._changed
        self._checks_without_progress = 0 if shown else self._checks_without_progress + 1
        if self._checks_without_progress == CHECKS_AT_CHANCE:
            chance = "that of guessing (mean, in nats) is" if self._scores.has_chance_level else "the initial one was"
            forgot = self._learned and self._changed
            what = "has lost most of its progress, or overfits," if forgot else "has not learned anything"
            signs = ", and its output is the same for all examples" if constant_output else ""
            signs += ", its gradients are zero" if idle else ""
            warnings.warn(
                f"the network {what} for {CHECKS_AT_CHANCE} decisions: its validation loss is {loss:.4g}, {chance} "
                f"{self._scores.chance_loss:.4g}{signs}. No module is kept until it improves: check the learning "
                "rate, the loss and the data",
                stacklevel=3,
            )
        # An unusual loss is no evidence for or against modules.
        if not usual:
            return {Op.FOSSILIZE, Op.PRUNE}
        return {Op.FOSSILIZE} if idle or not better else set()

    def _beats_chance(self, metrics: Metrics, train_loss: float, lead: float, *, usual: bool) -> bool:
        """Whether the network does better than chance, and has not lost most of its best improvement.

        Its validation loss shows that. For a network that overfits, the training loss together with the score does. For
        losses on another scale than cross-entropy, such as sums, both losses relative to the start, together with the
        accuracy, do.
        """
        scores = self._scores
        least = PLATEAU_IMPROVEMENT if scores.has_chance_level else 0.0
        improvement = np.array(
            [
                *scores.improvement_over_chance(metrics, train_loss),
                *scores.improvement_over_start(metrics, train_loss),
            ]
        )
        enough = improvement > np.fmax([least, least, lead, lead], self._best_improvement * SMALLEST_KEPT_SHARE)
        if usual:
            self._best_improvement = np.fmax(self._best_improvement, improvement)
        by_training, by_validation = enough[:2].tolist()
        overfits = by_training and scores.shows_skill(metrics, lead)
        return by_validation or overfits or (bool(enough[2:].all()) and scores.improvement_of_accuracy(metrics) > lead)

    def forget_best(self) -> None:
        """Forget the best improvement, after a module was pruned: the network may do as badly as before it came."""
        self._best_improvement[:] = math.nan

    def state_dict(self) -> dict[str, Any]:
        """Losses and improvements so far, as plain values."""
        return to_plain(self._state())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was called."""
        for name, value in from_plain(self._state(), state, "the learning check").items():
            setattr(self, f"_{name}", value)

    def _state(self) -> dict[str, Any]:
        return {
            name: getattr(self, f"_{name}")
            for name in ("best_loss", "last_loss", "best_improvement", "checks_without_progress", "learned", "changed")
        }
