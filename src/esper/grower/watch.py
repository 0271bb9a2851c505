"""Whether training is to be undone, and whether what was measured is any ground to judge seeds on."""

from __future__ import annotations

import math
import warnings
from typing import Any

from esper.control.history import PLATEAU_IMPROVEMENT
from esper.grower.figures import LOSS, Figures
from esper.grower.scores import Scores
from esper.lifecycle.actions import Op
from esper.plain_state import from_plain
from esper.training.governor.detectors import GovernorSettings
from esper.training.governor.model import Governor, Verdict

CHECKS_AT_CHANCE = 8
"""A network that has not left chance by its check of this number hardly will: its owner is told."""


class Watch:
    """Judges one model by its training loss and by what was measured of it.

    A network that does far worse than chance is in trouble whatever it did before. Chance is what guessing gives, where
    that is known, and otherwise what the network began with. One that has never been better has nothing to return to:
    its owner is warned, once. None of its seeds is kept until it is, none while it guesses or has gradients of zero,
    and none is kept or pruned as long as anything is unusual.

    Args:
        governor: Of the model.
        scores: Of what is measured.
        scaled: Whether losses are scaled: then a step with infinite gradients was skipped, which is no trouble.
    """

    def __init__(self, governor: Governor, scores: Scores, *, scaled: bool) -> None:
        self._governor, self._scores, self._scaled = governor, scores, scaled
        self._best_loss = math.nan
        """Of validation, so far."""
        self._last_loss = math.nan
        self._checks = 0
        self._learned = self._changed = False

    def finite(self, train_loss: float) -> bool:
        """Whether the model can be measured at all."""
        return math.isfinite(train_loss) and self._governor.finite(gradients=not self._scaled)

    def broken(self, train_loss: float) -> Verdict:
        """Of what is not finite."""
        return self._governor.judge(train_loss, (math.nan, math.nan), finite=False)

    def judge(self, train_loss: float, found: Figures) -> Verdict:
        """Of a model of which ``found`` was measured."""
        if not (math.isfinite(found[LOSS]) and math.isfinite(self._scores.score(found))):
            return self.broken(train_loss)
        skills = self._scores.skills(found, train_loss)
        hopeless = self._hopeless(found, *skills)
        return self._governor.judge(train_loss, skills, finite=True, hopeless=hopeless)

    def barred(self, verdict: Verdict, found: Figures, *, idle: bool) -> tuple[Op, ...]:
        """Operations for which there are no grounds now; ``idle`` if all gradients are zero. Warns as told above."""
        self._learned |= not idle and self._scores.beats_chance(found, self._settings.lead)
        self._changed |= self._checks > 0 and found[LOSS] != self._last_loss
        self._checks, self._last_loss = self._checks + 1, found[LOSS]
        if self._checks == CHECKS_AT_CHANCE and not (self._learned and self._changed):
            self._tell(idle)
        if not verdict.usual:
            return Op.FOSSILIZE, Op.PRUNE
        return (Op.FOSSILIZE,) if idle or self._guesses(found) or not self._learned else ()

    def _guesses(self, found: Figures) -> bool:
        """Whether it does now, as far as is known. Where the loss is far above guessing, hits may be by accident."""
        scores, settings = self._scores, self._settings
        far = found[LOSS] > settings.multiple * scores.chance_loss
        return scores.guessing_is_known and not scores.beats_chance(found, settings.lead if far else settings.collapsed)

    def _hopeless(self, found: Figures, by_accuracy: float, by_losses: float) -> bool:
        """Whether both losses are far above those of chance, and do not come down either."""
        loss, settings = found[LOSS], self._settings
        falls = loss < self._best_loss * (1 - PLATEAU_IMPROVEMENT)
        self._best_loss = loss if math.isnan(self._best_loss) else min(self._best_loss, loss)
        return not falls and by_losses < 1 - settings.multiple and not by_accuracy >= settings.lead

    def _tell(self, idle: bool) -> None:
        chance = "that of guessing is" if self._scores.guessing_is_known else "it began with"
        gradients = ", and its gradients are zero" if idle else ""
        warnings.warn(
            f"the network has learned nothing in {self._checks} decisions: its validation loss is "
            f"{self._last_loss:.4g}, {chance} {self._scores.chance_loss:.4g}{gradients}; check the learning rate, the "
            "loss and the data",
            stacklevel=4,
        )

    @property
    def _settings(self) -> GovernorSettings:
        return self._governor.settings

    def state_dict(self) -> dict[str, Any]:
        """What was seen so far."""
        return {
            "best_loss": self._best_loss,
            "last_loss": self._last_loss,
            "checks": self._checks,
            "learned": self._learned,
            "changed": self._changed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was called.

        Raises:
            CheckpointError: it is of another make.
        """
        known = from_plain(self.state_dict(), state, "the watch")
        self._best_loss, self._last_loss = known["best_loss"], known["last_loss"]
        self._checks, self._learned, self._changed = known["checks"], known["learned"], known["changed"]
