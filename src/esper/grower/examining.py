"""Measure one model, and make what is found what controllers see and gates know."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from esper.control.history import History
from esper.grower.arguments import Heard
from esper.grower.figures import Figures
from esper.grower.gradients import Gradients
from esper.grower.measuring import Evaluate, Measurement, compared, measured, note
from esper.grower.passes import Passes
from esper.grower.refit import Refit
from esper.grower.scores import Scores
from esper.grower.subject import ModelSubject
from esper.growth.model import GrowingModel
from esper.training.evaluation import Evaluation, update_evidence
from esper.training.learning import TrainingReport


class Examiner:
    """Examines ``model`` at every decision.

    Args:
        model: The one that grows.
        subject: Its lifecycle table, and the evidence that gates know.
        scores: What growth is about.
        evaluate: As for `esper.Grower`.
        passes: How it is measured.
        refit: The forks that seeds on trial are compared with.
        gradients: Of the training since the last decision.
    """

    def __init__(
        self,
        model: GrowingModel,
        subject: ModelSubject,
        scores: Scores,
        evaluate: Evaluate,
        passes: Passes,
        refit: Refit,
        gradients: Gradients,
    ) -> None:
        self._model, self._subject, self._scores, self._evaluate = model, subject, scores, evaluate
        self._passes, self._refit, self._gradients = passes, refit, gradients
        shape = 1, len(model.slots), len(subject.specs.kinds)
        self.history = History(*shape, scores.chance_loss, scores.chance_score)
        """What controllers see of the past."""

    def measure(self, train_loss: float, whole: Figures | None, due: NDArray[np.bool_]) -> Measurement:
        """The model, ``whole`` if that is known, and the seeds in slots that are ``due`` ``[1, S]``."""
        found = measured(self._refit, self._subject.table, self._evaluate, whole, due)
        self._scores.begin(found.usual, train_loss)
        return found

    def take_in(self, now: Heard, found: Measurement, actions: NDArray[np.int64]) -> tuple[TrainingReport, Evaluation]:
        """Let history and evidence have what was measured after the last ``actions`` ``[1, 8]``."""
        subject, scores = self._subject, self._scores
        scores.begin(found.usual, now.train_loss)
        self.history.expect(scores.chance_loss, scores.chance_score)
        newest = compared(found, self._model, subject.table, scores.score)
        known = scores.train_score(now.train_accuracy)
        host, seeds, health = self._gradients.report()
        training = TrainingReport(
            np.array([now.train_loss]), newest.accuracy if known is None else np.array([known]), host, seeds, health
        )
        evaluation = self.history.complete(newest, subject.evidence)
        note(self._model, evaluation.accuracy_contribution)
        subject.evidence = update_evidence(subject.table, subject.evidence, training, evaluation)
        progress = scores.progress(found.usual)
        improved = None if progress is None else np.array([progress])
        self.history.record(actions, subject.table, training, evaluation, improved)
        return training, evaluation

    def dependence(self, slots: NDArray[np.bool_]) -> tuple[NDArray[np.float64], bool]:
        """What the model loses without each seed in ``slots`` ``[1, S]``, as it is now, ``[1, S]``; for its end.

        And whether that is blind: its answer is the same to everything.
        """
        subject = self._subject
        found = measured(self._passes, subject.table, self._evaluate, None, slots)
        return compared(found, self._model, subject.table, self._scores.score).accuracy_contribution, found.blind
