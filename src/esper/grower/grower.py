"""A controller, a governor and counterfactuals for one model, in a training loop of its owner's."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.control.controller import Controller
from esper.control.features import View
from esper.control.history import History
from esper.control.observation import observe
from esper.errors import ConfigError
from esper.grower.choosing import chosen
from esper.grower.decision import Change, Decision
from esper.grower.gradients import Gradients
from esper.grower.measuring import Evaluate, Score, measured
from esper.grower.subject import ModelSubject
from esper.grower.surgery import carry_out, settle, shadow_gradients
from esper.growth.model import GrowingModel
from esper.lifecycle.actions import Head, Op, wait
from esper.lifecycle.masks import legal_actions
from esper.lifecycle.rules import Isolation, Rules
from esper.lifecycle.stages import Stage
from esper.lifecycle.transitions import Cause, Transitions, joined, revoke, step
from esper.training.budget import Budget
from esper.training.evaluation import Evaluation, remembered
from esper.training.governor.model import Governor, Rollback
from esper.training.governor.settings import GovernorSettings
from esper.training.learning import TrainingReport

HORIZON = 100
NO_BUDGET = Budget()
_CPU = torch.device("cpu")


class Grower:
    """Decides, once per `step`, what grows in a model that a loop of your own trains.

    ```python
    model = esper.attach(net, {"layer2": "auto"}, example_input=images[:2])
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=1e-3))
    grower = esper.Grower(model, optimizer, controller="heuristic", evaluate=validate, classes=10)
    for epoch in range(100):
        loss = train_one_epoch(model, optimizer)
        print(grower.step(train_loss=loss))
    plain = model.finalize()
    ```

    It uses the lifecycle, the observations, the controllers and the governor of populations, with a single network. A
    policy that `esper train` made sees here what it saw there.

    Args:
        model: From `esper.attach`, without live seeds.
        optimizer: Any `torch.optim` optimizer made from `GrowingModel.parameter_groups`.
        controller: ``none``, ``random``, ``all_at_start``, ``periodic``, ``heuristic``, the directory of a run of
            `esper train`, or a `esper.control.controller.Controller`.
        evaluate: Measures a model on validation data: ``(loss, accuracy)``, the same for the same model. It is called
            once per decision and seed, and once more where `step` is not told the figures of the whole.
        classes: How many there are to choose from (the vocabulary of a language model): controllers see losses
            relative to that of guessing. None: as many as the model has outputs.
        horizon: Decisions that are planned. Controllers see what share of them is over.
        rules: What may happen to seeds; None: the rules that the controller was trained with, or the default ones.
        budget: Caps on growth.
        governor: When training that blows up is rolled back; None: never.
        rent: What growth costs, as in the score ``accuracy - rent * log1p(added / host parameters)``.
        train_size: Number of training examples; policies see it.
        seed: All that is random about seeds and controllers follows from it.

    Raises:
        ConfigError: the model has live seeds already, or an argument is out of range.
        SlotError: the optimizer was not made from `GrowingModel.parameter_groups`.
    """

    def __init__(
        self,
        model: GrowingModel,
        optimizer: torch.optim.Optimizer,
        controller: str | Path | Controller = "heuristic",
        *,
        evaluate: Evaluate,
        classes: int | None = None,
        horizon: int = HORIZON,
        rules: Rules | None = None,
        budget: Budget = NO_BUDGET,
        governor: GovernorSettings | None = GovernorSettings(),  # noqa: B008 (immutable)
        rent: float = 0.0,
        train_size: int = 1000,
        seed: int = 0,
    ) -> None:
        classes = _check(model, classes, horizon, rent, train_size)
        model.link(optimizer)
        self.model = model
        self.optimizer = optimizer
        self.subject = ModelSubject(model, optimizer, budget)
        self.controller, own_rules = chosen(controller, self.subject.roster, horizon)
        self.rules = own_rules if rules is None else rules
        self.governor = None if governor is None else Governor(model, optimizer, governor, classes)
        self.decisions = 0
        """Decisions taken."""
        self._evaluate = evaluate
        self._classes, self._horizon, self._rent, self._train_size = classes, horizon, rent, train_size
        self._seed = seed
        kinds = self.subject.roster.kinds
        self._history = History(1, len(model.slots), len(kinds), classes)
        self._gradients = Gradients(model, optimizer)
        self._state: Any = self.controller.start([seed])
        self._actions: NDArray[np.int64] = wait(1)

    def step(
        self,
        *,
        train_loss: float | Tensor,
        val_loss: float | None = None,
        accuracy: float | None = None,
        train_accuracy: float | None = None,
    ) -> Decision:
        """Measure the model, let the governor judge and the controller decide, and carry it out.

        Call it after the optimizer's step, at equal intervals: once per epoch, or every so many minibatches.

        Args:
            train_loss: Mean training loss since the last call.
            val_loss: Validation loss, as `evaluate` would measure it now; together with ``accuracy`` it spares a call.
            accuracy: Validation accuracy, in [0, 1].
            train_accuracy: Training accuracy since the last call; None: not known, taken to equal that of validation.

        Raises:
            ConfigError: of ``val_loss`` and ``accuracy`` only one is given.
            DivergedError: training blew up more often than the governor's `max_rollbacks`.
        """
        loss = float(train_loss.detach()) if isinstance(train_loss, Tensor) else float(train_loss)
        whole = _whole(val_loss, accuracy)
        rollback, undone = self._govern(loss, accuracy)
        evaluation = measured(self.model, self.subject.table, self._evaluate, None if rollback else whole)
        self._take_in(loss, train_accuracy, evaluation)
        actions, changes = self._decide()
        self.decisions += 1
        return self._told(actions, joined([undone, changes]), evaluation, rollback)

    def learn_apart(self, loss: Callable[[], Tensor]) -> None:
        """Give seeds in isolation ``shadow`` their gradients, and nobody else; without such seeds it does nothing.

        Call it between ``backward()`` and the optimizer's step. ``loss`` computes the loss of the minibatch once more,
        now with these seeds at full weight.
        """
        if self.rules.isolation is not Isolation.SHADOW:
            return
        training = self.subject.table.stage[0] == Stage.TRAINING
        seeds = [slot.seed for slot, alone in zip(self.model.slots.values(), training, strict=True) if alone]
        isolated = [seed for seed in seeds if seed is not None]
        if isolated:
            shadow_gradients(isolated, loss)

    def _govern(self, loss: float, accuracy: float | None) -> tuple[Rollback | None, Transitions]:
        """Undo the training since the last good state, if it blew up."""
        if self.governor is None or not self.governor.check(loss, accuracy):
            return None, Transitions.none()
        rollback = self.governor.rollback()
        gone = np.array([[name in rollback.pruned for name in self.model.slots]])
        self.subject.table, changes = revoke(self.subject.table, gone)
        self.subject.evidence = self.subject.evidence.without(gone)
        return rollback, changes

    def _take_in(self, loss: float, train_accuracy: float | None, evaluation: Evaluation) -> None:
        """Add what was measured to what controllers see."""
        known = evaluation.accuracy if train_accuracy is None else np.array([train_accuracy])
        host, seeds, health = self._gradients.report()
        training = TrainingReport(np.array([loss]), known, host, seeds, health)
        subject = self.subject
        subject.evidence = remembered(subject.table, subject.evidence, training, evaluation)
        self._history.record(self._actions, subject.table, training, evaluation)

    def _decide(self) -> tuple[NDArray[np.int64], Transitions]:
        """Ask the controller and carry out what it says; a failure leaves model, optimizer and table as they were."""
        subject = self.subject
        view = View(
            subject,
            self._history,
            np.array([min(self.decisions / self._horizon, 1.0)]),
            self._horizon,
            np.array([self._rent]),
            np.array([float(self._train_size)]),
            self._classes,
            self._rollbacks_used(),
        )
        masks = legal_actions(
            subject.table, subject.evidence, self.rules, subject.roster.compatible, subject.affordable
        )
        actions, state = self.controller.act(observe(view, _CPU), masks, self._state)
        result = step(
            subject.table, subject.evidence, actions, self.rules, subject.roster.compatible, subject.affordable
        )
        carry_out(self.model, subject, result.transitions, actions, self._seed)
        subject.table, self._state, self._actions = result.table, state, actions
        settle(self.model, subject.table, self.rules.isolation)
        if self.governor is not None and (result.transitions.after == Stage.PRUNED).any():
            self.governor.expect_change()
        return actions, result.transitions

    def _rollbacks_used(self) -> NDArray[np.float64]:
        if self.governor is None:
            return np.zeros(1)
        return np.array([min(self.governor.rollbacks / max(self.governor.settings.max_rollbacks, 1), 1.0)])

    def _told(
        self, actions: NDArray[np.int64], changes: Transitions, evaluation: Evaluation, rollback: Rollback | None
    ) -> Decision:
        names, kinds = list(self.model.slots), self.subject.roster.kinds
        op = Op(int(actions[0, Head.OP]))
        told = tuple(
            Change(
                names[int(changes.slot[index])],
                Stage(int(changes.before[index])),
                Stage(int(changes.after[index])),
                kinds[int(changes.blueprint[index])].name if changes.blueprint[index] >= 0 else None,
                Cause(int(changes.cause[index])),
            )
            for index in range(len(changes))
        )
        found = zip(names, evaluation.accuracy_contribution[0].tolist(), strict=True)
        return Decision(
            self.decisions,
            op,
            None if op is Op.WAIT else names[int(actions[0, Head.SLOT])],
            kinds[int(actions[0, Head.BLUEPRINT])].name if op is Op.GERMINATE else None,
            told,
            {name: value for name, value in found if math.isfinite(value)},
            rollback,
        )


def _check(model: GrowingModel, classes: int | None, horizon: int, rent: float, train_size: int) -> int:
    """The number of classes."""
    unfinished = [name for name, seed in model.seeds.items() if not seed.fossilized]
    if unfinished:
        raise ConfigError(f"slot {unfinished[0]!r} has a live seed already: a grower begins without; prune it first")
    if classes is None:
        classes = model.outputs
    if classes is None:
        raise ConfigError("the model returns no tensor that shows how many classes there are: say classes=...")
    if classes < 2 or horizon < 1 or train_size < 1 or not 0 <= rent < math.inf:
        raise ConfigError(
            f"classes {classes}, horizon {horizon}, train_size {train_size} and rent {rent}: "
            "give at least 2, 1, 1 and 0"
        )
    return classes


def _whole(val_loss: float | None, accuracy: float | None) -> Score | None:
    if (val_loss is None) != (accuracy is None):
        raise ConfigError("give both val_loss and accuracy, or neither")
    return None if val_loss is None or accuracy is None else Score(val_loss, accuracy)
