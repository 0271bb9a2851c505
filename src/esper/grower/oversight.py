"""The governor of one growth: whether training is undone, what comes back, and whether anything shows what seeds do."""

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
from esper.grower.distributed import Processes
from esper.grower.evaluation import Measurement
from esper.grower.network import GrowingNetwork
from esper.grower.scores import LOSS, Figures, Scores
from esper.growth.sharding import local_part, reshard
from esper.lifecycle.actions import Op
from esper.lifecycle.transitions import Transitions
from esper.population.governor.model import Governor, GovernorVerdict, Rollback
from esper.serialization.state_files import from_plain, to_plain

CHECKS_AT_CHANCE = 8
"""A network that does no better than chance in so many checks in a row hardly will: its owner is told."""
LEAST_KEPT = 0.5
"""A network that keeps less of the way it once came from chance is nearer to chance than to what it was."""


class OptimizerCheck:
    """Notices if ``host`` learns while ``optimizer`` makes no step, as where another one has taken its place."""

    def __init__(self, host: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._host = host
        self._stepped = False
        self._sums = self._sum_parameters()
        optimizer.register_step_post_hook(self._note)

    def require(self) -> None:
        """Look back on the time since the last call.

        Raises:
            ConfigError: another optimizer has trained the host.
        """
        sums, before = self._sum_parameters(), self._sums
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
        self._sums = self._sum_parameters()

    def _note(self, *_: Any) -> None:
        self._stepped = True

    @torch.no_grad()
    def _sum_parameters(self) -> Tensor:
        """The sum of the values of each learning parameter, ``[P]``, as far as this process holds them."""
        reshard(self._host)
        learning = [parameter for parameter in self._host.parameters() if parameter.requires_grad]
        if not learning:
            return torch.zeros(0)
        device, held = learning[0].device, map(local_part, learning)
        return torch.stack([values.sum(dtype=torch.float64).to(device) for values in held])


class Oversight:
    """Judges training by its loss and by what was measured, and undoes what blew up; without a governor does neither.

    A network that does far worse than chance is in trouble whatever it did before. Chance is what guessing gives, where
    that is known, and otherwise what the network began with. One whose answer is the same to everything has no skill,
    whatever the frequencies of answers make of its figures. A network that goes on without being better than chance may
    have nothing to return to: its owner is warned. None of its seeds is kept until it is better, none while its
    gradients are zero, and none is kept or pruned as long as anything is unusual.

    Args:
        network: The model with its lifecycle table.
        optimizer: That trains it.
        settings: Of the governor; None: there is none.
        scores: Of what is measured.
        processes: Those that the growth is in; the first one's verdict holds.
        scaled: Whether losses are scaled: then a step with infinite gradients was skipped, which is no trouble.
    """

    def __init__(
        self,
        network: GrowingNetwork,
        optimizer: torch.optim.Optimizer,
        settings: GovernorSettings | None,
        scores: Scores,
        processes: Processes,
        *,
        scaled: bool,
    ) -> None:
        self._network, self._scores, self._processes, self._scaled = network, scores, processes, scaled
        self.trained = OptimizerCheck(network.model.host, optimizer)
        """Whether the optimizer is what trains the model."""
        self.governor = None if settings is None else Governor(network.model, optimizer, settings)
        self._best_loss = math.nan
        """The least validation loss so far."""
        self._last_loss = math.nan
        self._best_gone = np.full(4, math.nan)
        """The greatest shares of losses that were gone so far, by `Scores.gone` and `Scores.gone_since`."""
        self._checks_without_progress = 0
        """In a row, in which there was nothing to show that the network has learned."""
        self._learned = self._changed = False

    @property
    def rollbacks_used(self) -> float:
        """The share of the allowed rollbacks that there have been, in [0, 1]."""
        return 0.0 if self.governor is None else self.governor.rollbacks_used

    def is_measurable(self, train_loss: float) -> bool:
        """Whether all that should be finite is; without a governor nobody looks."""
        governor = self.governor
        if governor is None:
            return True

        def is_finite() -> bool:
            healthy = governor.finite(gradients=not self._scaled)  # which all processes may be needed for
            return healthy and math.isfinite(train_loss)

        return self._processes.agree_on_model(is_finite)

    def judge(self, train_loss: float, measurement: Measurement | None) -> GovernorVerdict | None:
        """The verdict on a model of which that was ``measurement``; None: it could not be measured."""
        governor = self.governor
        if governor is None:
            return None

        def judge() -> GovernorVerdict:
            finite = measurement is not None and math.isfinite(measurement.usual[LOSS])
            if measurement is None or not (finite and math.isfinite(self._scores.score(measurement.usual))):
                return governor.judge(train_loss, (math.nan, math.nan), finite=False)
            skills = self._scores.skills(measurement.usual, train_loss)
            diverged = self._is_diverged(governor.settings, measurement.usual[LOSS], *skills)
            skills = (0.0, 0.0) if measurement.blind else skills
            return governor.judge(train_loss, skills, finite=True, hopeless=diverged)

        return self._processes.agree(judge)

    def _is_diverged(self, settings: GovernorSettings, loss: float, by_accuracy: float, by_losses: float) -> bool:
        """Whether both losses are far above those of chance, and that of validation is worse than it was.

        A loss on a scale of its own, such as a sum, may be far above however healthy the network is; but then it falls,
        or stays for a while.
        """
        self._best_loss = loss if math.isnan(self._best_loss) else min(self._best_loss, loss)
        worse = bool(improves(np.array(self._best_loss), np.array(loss)))
        return worse and by_losses < 1 - settings.multiple and not by_accuracy >= settings.lead

    def find_barred(
        self, verdict: GovernorVerdict | None, train_loss: float, measurement: Measurement, *, idle: bool
    ) -> tuple[Op, ...]:
        """Operations for which there are no grounds now; ``idle`` if all gradients are zero.

        Warns of a network that shows nothing for `CHECKS_AT_CHANCE` decisions.
        """
        if self.governor is None or verdict is None:
            return ()
        loss, lead = measurement.usual[LOSS], self.governor.settings.lead
        better = self._beats_chance(measurement.usual, train_loss, lead, usual=verdict.usual) and not measurement.blind
        self._learned |= better and not idle
        self._changed |= not math.isnan(self._last_loss) and loss != self._last_loss
        self._last_loss = loss
        shown = better and self._learned and self._changed
        self._checks_without_progress = 0 if shown else self._checks_without_progress + 1
        if self._checks_without_progress == CHECKS_AT_CHANCE:
            chance = "that of guessing, as a mean in nats, is" if self._scores.guessing_is_known else "it began with"
            lost = self._learned and self._changed
            what = "has lost most of what it had learned, or overfits," if lost else "has learned nothing"
            seen = ", its answer is the same to everything" if measurement.blind else ""
            seen += ", its gradients are zero" if idle else ""
            warnings.warn(
                f"the network {what} for {CHECKS_AT_CHANCE} decisions: its validation loss is {loss:.4g}, {chance} "
                f"{self._scores.chance_loss:.4g}{seen}; no seed is kept until it does better: check the learning rate, "
                "the loss and the data",
                stacklevel=3,
            )
        if not verdict.usual:
            return Op.FOSSILIZE, Op.PRUNE
        return (Op.FOSSILIZE,) if idle or not better else ()

    def _beats_chance(self, figures: Figures, train_loss: float, lead: float, *, usual: bool) -> bool:
        """Whether the network does better than chance, as far as figures tell, and has not lost most of what it had.

        Its validation loss shows it; or its training loss together with the score, where it overfits; or, where losses
        are on a scale of their own, such as sums, both of them together with the accuracy, beside what they began with.
        """
        scores = self._scores
        trifle = PLATEAU_IMPROVEMENT if scores.guessing_is_known else 0.0
        gone = np.array([*scores.gone(figures, train_loss), *scores.gone_since(figures, train_loss)])
        enough = gone > np.fmax([trifle, trifle, lead, lead], self._best_gone * LEAST_KEPT)
        if usual:
            self._best_gone = np.fmax(self._best_gone, gone)
        by_training, by_validation = enough[:2].tolist()
        overfits = by_training and scores.shows_skill(figures, lead)
        return by_validation or overfits or (bool(enough[2:].all()) and scores.accuracy_gained(figures) > lead)

    def undo(self, verdict: GovernorVerdict | None) -> tuple[Rollback | None, Transitions]:
        """Undo the training since the last good state, if it blew up.

        Raises:
            DivergedError: it did so more often than the governor allows; the model is restored all the same.
        """
        governor = self.governor
        if governor is None or verdict is None or not governor.accept(verdict):
            return None, Transitions.none()
        try:
            rollback = governor.rollback()
        finally:  # the one too many prunes as well before it raises
            self.trained.rebase()
            gone = np.array([[slot.seed is None for slot in self._network.model.slots.values()]])
            changes = self._network.revoke(gone)
        return rollback, changes

    def expect_loss(self, *, forget: bool) -> None:
        """A seed was taken away on purpose: the model may do worse. ``forget`` how well it did, if that seed helped."""
        if self.governor is not None:
            self.governor.expect_change()
            if forget:  # the network may do as badly again as before that seed came
                self._best_gone[:] = math.nan
                self.governor.forget()

    def state_dict(self) -> dict[str, Any]:
        """What was seen so far, as plain values."""
        return to_plain(self._memory())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was called.

        Raises:
            CheckpointError: it is of another make.
        """
        known = from_plain(self._memory(), state, "the watch")
        self._best_loss, self._last_loss, self._best_gone = known["best_loss"], known["last_loss"], known["best_gone"]
        self._checks_without_progress, self._learned = known["astray"], known["learned"]
        self._changed = known["changed"]

    def _memory(self) -> dict[str, Any]:
        return {
            "best_loss": self._best_loss,
            "last_loss": self._last_loss,
            "best_gone": self._best_gone,
            "astray": self._checks_without_progress,
            "learned": self._learned,
            "changed": self._changed,
        }
