"""Whether training is to be undone, and whether what was measured is any ground to judge seeds on."""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

from esper.control.history import PLATEAU_IMPROVEMENT
from esper.grower.figures import ACCURACY, LOSS, Figures
from esper.grower.scores import Scores
from esper.lifecycle.actions import Op
from esper.plain_state import from_plain
from esper.training.governor.model import Governor, Verdict

CHECKS_AT_CHANCE = 8
"""A network that has not left chance by its check of this number is no accident: its owner is told."""


class Look(NamedTuple):
    """What one check says."""

    verdict: Verdict
    barred: tuple[Op, ...]
    """Operations for which there are no grounds now."""


class Watch:
    """Judges one model by its training loss and by what was measured of it.

    Where it is known what guessing gives, a network that does far worse is in trouble whatever it did before. One that
    only ever guessed has nothing better to return to: its owner is warned, once. None of its seeds is kept as long as
    it guesses; none is kept or pruned as long as anything is unusual.

    Args:
        governor: Of the model.
        scores: Of what is measured.
        scaled: Whether losses are scaled: then a step with infinite gradients was skipped, which is no trouble.
    """

    def __init__(self, governor: Governor, scores: Scores, *, scaled: bool) -> None:
        self._governor, self._scores, self._scaled = governor, scores, scaled
        self._best_loss = math.nan
        """Of validation, so far."""
        self._checks = 0
        """Since the beginning."""
        self._left_chance = False

    def finite(self, train_loss: float) -> bool:
        """Whether the model can be measured at all."""
        return math.isfinite(train_loss) and self._governor.finite(gradients=not self._scaled)

    def broken(self, train_loss: float) -> Look:
        """A check of what is not finite."""
        return Look(self._governor.judge(train_loss, math.nan, finite=False), ())

    def check(self, train_loss: float, found: Figures) -> Look:
        """A check of a model of which ``found`` was measured."""
        scores, settings = self._scores, self._governor.settings
        finite = math.isfinite(found[LOSS]) and math.isfinite(scores.score(found))
        if not finite:
            return self.broken(train_loss)
        skill, hopeless = scores.skill(found, train_loss), self._hopeless(train_loss, found)
        verdict = self._governor.judge(train_loss, skill, finite=True, hopeless=hopeless)
        better = scores.beats_chance(found, settings.collapsed)
        self._tell(found, better)
        if not verdict.usual:
            return Look(verdict, (Op.FOSSILIZE, Op.PRUNE))
        if scores.guessing_is_known and not better:
            return Look(verdict, (Op.FOSSILIZE,))
        return Look(verdict, ())

    def _hopeless(self, train_loss: float, found: Figures) -> bool:
        """Whether both losses are far above that of guessing, and do not come down either."""
        loss, settings = found[LOSS], self._governor.settings
        falls = loss < self._best_loss * (1 - PLATEAU_IMPROVEMENT)
        self._best_loss = loss if math.isnan(self._best_loss) else min(self._best_loss, loss)
        if not self._scores.guessing_is_known or falls or self._scores.skill(found, train_loss) >= settings.lead:
            return False
        return min(loss, train_loss) > settings.multiple * self._scores.chance_loss

    def _tell(self, found: Figures, better: bool) -> None:
        """Warn the owner of a network that has never left chance."""
        self._checks += 1
        self._left_chance |= better
        if self._left_chance or self._checks != CHECKS_AT_CHANCE:
            return
        known = self._scores.guessing_is_known
        usual = "that of guessing" if known else "the first one"
        accuracy = f" with accuracy {found[ACCURACY]:.3g}" if ACCURACY in found else ""
        warnings.warn(
            f"after {CHECKS_AT_CHANCE} decisions the network has never been better than "
            f"{'guessing' if known else 'when it was first measured'}: its validation loss is {found[LOSS]:.4g}"
            f"{accuracy}, and {usual} {self._scores.chance_loss:.4g}; see whether its gradients are zero, and check "
            "the learning rate and the data",
            stacklevel=2,
        )

    def state_dict(self) -> dict[str, Any]:
        """What was seen so far."""
        return {"best_loss": self._best_loss, "checks": self._checks, "left_chance": self._left_chance}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was called.

        Raises:
            CheckpointError: it is of another make.
        """
        known = from_plain(self.state_dict(), state, "the watch")
        self._best_loss, self._checks, self._left_chance = known["best_loss"], known["checks"], known["left_chance"]
