"""A controller, a governor and counterfactuals for one model, in a training loop of its owner's."""

from __future__ import annotations

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
from esper.errors import CheckpointError
from esper.grower.arguments import checked, require_conduct, whole_score
from esper.grower.choosing import chosen
from esper.grower.counterfactual import Counterfactual, counterfactual
from esper.grower.decision import Decision, told
from esper.grower.distributed import Processes
from esper.grower.gradients import Gradients
from esper.grower.measuring import Evaluate, Score, measured, note
from esper.grower.passes import Passes
from esper.grower.refit import Refit
from esper.grower.shadow import Loss, Shadow, require_loss
from esper.grower.structure import require, require_planted, structure
from esper.grower.subject import ModelSubject
from esper.grower.surgery import carry_out, settle
from esper.growth.model import GrowingModel
from esper.lifecycle.actions import wait
from esper.lifecycle.masks import legal_actions
from esper.lifecycle.rules import Isolation, Rules
from esper.lifecycle.stages import Stage
from esper.lifecycle.transitions import Step, Transitions, joined, revoke, step
from esper.plain_state import from_plain, to_plain
from esper.rl.conduct import Conduct
from esper.training.evaluation import Evaluation, remembered
from esper.training.governor.model import Governor, Rollback
from esper.training.learning import TrainingReport

HORIZON = 100
STATE_VERSION = 2
"""Of what `Grower.state_dict` returns."""


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
    policy that `esper train` made sees here what it saw there. In several processes the first decides for all, as
    `esper.grower.distributed` tells.

    Args:
        model: From `esper.attach`, without live seeds unless `load_state_dict` follows.
        optimizer: Any `torch.optim` optimizer made from `GrowingModel.parameter_groups`.
        controller: ``none``, ``random``, ``all_at_start``, ``periodic``, ``heuristic``, the directory of a run of
            `esper train`, or a `esper.control.controller.Controller`.
        evaluate: Measures a model on validation data: ``(loss, accuracy)``, the same for the same model. It is called
            once per decision and for each seed whose turn it is (without the former call, where `step` is told the
            figures of the whole, unless that call lets the others share passes, as `esper.grower.passes` tells); of
            several processes, only in the first.
        classes: How many there are to choose from (the vocabulary of a language model): controllers see losses
            relative to that of guessing. None: as many as the model has outputs.
        horizon: Decisions that are planned. Controllers see what share of them is over.
        rules: What may happen to seeds; None: the rules that the controller was trained with, or the default ones.
        conduct: When training that blows up is rolled back, what growth may cost, how often seeds are measured, and
            when there is nothing more to decide. The governor's penalty stays as it is: nobody is paid a reward here.
        rent: What growth costs, as in the score ``accuracy - rent * log1p(added / host parameters)``.
        train_size: Number of training examples; policies see it.
        seed: All that is random about seeds and controllers follows from it.
        loss: The training loss of a minibatch, computed anew by way of ``model`` from whatever `learn_apart` is given;
            isolation ``shadow`` and evidence ``refit`` need it.
        scaler: The one of the loop, if it scales losses: gradients are then seen as they are without it.
        evidence: What seeds on trial are judged by. ``dependence``: what the model loses when the seed is switched off,
            which costs no training, and is more than the model has gained by it. ``refit``: what it has over a fork of
            itself that trains on without the seed from when the trial begins; known from the fork's second decision on,
            and until then no gate and no rule judges the seed. `learn_apart` tells what that takes.

    Raises:
        ConfigError: an argument is out of range, or rules or evidence need a ``loss``.
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
        conduct: Conduct = Conduct(),  # noqa: B008 (immutable)
        rent: float = 0.0,
        train_size: int = 1000,
        seed: int = 0,
        loss: Loss | None = None,
        scaler: torch.amp.GradScaler | None = None,
        evidence: str = Counterfactual.DEPENDENCE,
    ) -> None:
        classes = checked(model, classes, horizon, rent, train_size)
        require_conduct(conduct, horizon)
        self.subject = ModelSubject(model, optimizer, conduct.budget)
        self.controller, own_rules = chosen(controller, self.subject.roster, horizon)
        self.rules = own_rules if rules is None else rules
        require_loss(self.rules, loss)
        self.evidence = counterfactual(evidence, loss, optimizer)
        self._processes = Processes()
        seed = self._processes.agreed(lambda: seed)
        model.link(optimizer)
        self.model = model
        self.optimizer = optimizer
        self.conduct = conduct
        watch = conduct.governor
        self.governor = None if watch is None else Governor(model, optimizer, watch, classes)
        self.decisions = 0
        """Decisions taken."""
        self.passes = Passes(model)
        """How seeds are measured: in shared passes, or why not."""
        self._evaluate = evaluate
        self._classes, self._horizon, self._rent, self._train_size = classes, horizon, rent, train_size
        self._seed = seed
        kinds = self.subject.roster.kinds
        self._history = History(1, len(model.slots), len(kinds), classes)
        self._gradients = Gradients(model, optimizer, scaler)
        received = (self._gradients.take_in, self._processes.average)
        scale = _unscaled if scaler is None else scaler.scale
        self._shadow = Shadow(model, optimizer, loss, scale, received)
        self.refit = Refit(self.passes, optimizer, self.evidence, loss, scaler, self._processes.average)
        """The forks that seeds on trial are compared with, if any."""
        self._attend()
        self._state: Any = self.controller.start([seed])
        # What is trained before the first call of `step` follows a decision, too: to wait.
        self._actions: NDArray[np.int64] = wait(1)
        self.subject.table = self._after(self._actions).table

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
            ConfigError: of ``val_loss`` and ``accuracy`` only one is given, or a seed came or went by another hand.
            DivergedError: training blew up more often than the governor's `max_rollbacks`.
        """
        loss = float(train_loss.detach()) if isinstance(train_loss, Tensor) else float(train_loss)
        whole = whole_score(val_loss, accuracy)
        require_planted(self.model, self.subject.table)
        rollback, undone = self._govern(loss, accuracy)
        due = self.conduct.counterfactuals_due(np.array([self.decisions]), len(self.model.slots))
        if rollback is None:
            evaluation = self._measure(loss, train_accuracy, whole, due)
        else:  # what was known of its fossils is of a model that is no more
            evaluation = self._measure(loss, train_accuracy, None, np.ones_like(due))
        finished = self.finished
        actions, changes = self._decide()
        self.decisions += 1
        names = list(self.model.slots)
        kinds = [kind.name for kind in self.subject.roster.kinds]
        return told(self.decisions, names, kinds, actions, joined([undone, changes]), evaluation, rollback, finished)

    @property
    def finished(self) -> bool:
        """Whether the conduct's plateau is reached: validation has stopped to improve, and no seed is unfinished.

        Stop training then. The controller is not asked again, unless you train on and validation improves after all.
        """
        return bool(self.conduct.stalled(self._history.plateau_age, self.subject.table)[0])

    def learn_apart(self, loss: Tensor, *minibatch: Any, **named: Any) -> None:
        """Let seeds in isolation ``shadow`` and forks learn from a minibatch too; without any it does nothing.

        Call it once ``loss``, the minibatch's loss, is there, before its ``backward()`` and before it is divided or
        scaled. It is computed once more, by the function that the grower was constructed with, of ``minibatch`` and
        ``named``, with these seeds at full weight. What they learn from that comes with the backward pass of ``loss``,
        before any clipping and in proportion: where a loss is divided, scaled or accumulated afterwards, that goes for
        them as well. Nothing else about the model, its buffers or random numbers is any different.

        Under evidence ``refit`` the loss is also computed once more for every seed on trial, for a fork of the model
        without it. A fork has parameters, buffers and an optimizer of its own, which steps when yours does, with the
        hyperparameters that yours has then; it has nothing of what else is done to gradients or parameters, such as
        clipping.

        Raises:
            ConfigError: what the function returned does not depend on such a seed or fork.
        """
        self.refit.follow(loss, minibatch, named)  # first, while gradients are as the loop left them
        self._shadow.follow(loss, minibatch, named)

    @property
    def learns_apart(self) -> bool:
        """Whether `learn_apart` is to be called for every minibatch."""
        return self.rules.isolation is Isolation.SHADOW or self.evidence is Counterfactual.REFIT

    def _govern(self, loss: float, accuracy: float | None) -> tuple[Rollback | None, Transitions]:
        """Undo the training since the last good state, if it blew up."""
        governor = self.governor
        if governor is None or not governor.accept(self._processes.agreed(lambda: governor.judge(loss, accuracy))):
            return None, Transitions.none()
        try:
            rollback = governor.rollback()
        finally:  # the one too many prunes as well before it raises
            gone = np.array([[slot.seed is None for slot in self.model.slots.values()]])
            self.subject.table, changes = revoke(self.subject.table, gone)
            self.subject.evidence = self.subject.evidence.without(gone)
        return rollback, changes

    def _measure(
        self, loss: float, train_accuracy: float | None, whole: Score | None, due: NDArray[np.bool_]
    ) -> Evaluation:
        """Measure the model and the seeds in slots that are ``due`` ``[1, S]``, for controllers to see."""
        subject = self.subject
        host, seeds, health = self._gradients.report()

        def measurements() -> tuple[TrainingReport, Evaluation]:
            evaluation = measured(self.refit, subject.table, self._evaluate, whole, due)
            known = evaluation.accuracy if train_accuracy is None else np.array([train_accuracy])
            return TrainingReport(np.array([loss]), known, host, seeds, health), evaluation

        training, found = self._processes.agreed(measurements)
        evaluation = self._history.completed(found, subject.evidence)
        note(self.model, evaluation)
        subject.evidence = remembered(subject.table, subject.evidence, training, evaluation)
        self._history.record(self._actions, subject.table, training, evaluation)
        return evaluation

    def _decide(self) -> tuple[NDArray[np.int64], Transitions]:
        """Ask the controller, or wait if there is nothing more to decide, and carry that out.

        A failure leaves model, optimizer and table as they were.
        """
        subject = self.subject
        view = View(
            subject,
            self._history,
            np.array([min((1 + self.decisions) / self._horizon, 1.0)]),
            self._horizon,
            np.array([self._rent]),
            np.array([float(self._train_size)]),
            self._classes,
            self._rollbacks_used(),
        )
        affordable = subject.affordable(self.rules.blends)
        masks = legal_actions(subject.table, subject.evidence, self.rules, subject.roster.compatible, affordable)
        actions, state = wait(1), self._state
        if not self.finished:
            actions, state = self._processes.agreed(lambda: self.controller.act(observe(view), masks, self._state))
        result = self._after(actions)
        carry_out(self.model, subject, result.transitions, actions, self._seed)
        self._attend()
        subject.table, self._state, self._actions = result.table, state, actions
        settle(self.model, subject.table, self.rules.isolation)
        subject.evidence = self.refit.attend(subject.table, subject.evidence)
        if self.governor is not None and (result.transitions.after == Stage.PRUNED).any():
            self.governor.expect_change()
        return actions, result.transitions

    def _after(self, actions: NDArray[np.int64]) -> Step:
        """What the lifecycle makes of these actions ``[1, 8]``."""
        subject = self.subject
        affordable = subject.affordable(self.rules.blends)
        return step(subject.table, subject.evidence, actions, self.rules, subject.roster.compatible, affordable)

    def state_dict(self) -> dict[str, Any]:
        """All that the grower remembers, as plain values; as large as the model, of which the governor has a copy.

        Save it beside the state dicts of model and optimizer; of several processes, the first one's.

        Raises:
            CheckpointError: the controller's state cannot be saved.
        """
        return {
            **self._signature(),
            "seeds": structure(self.model),
            "memory": to_plain(self._memory()),
            "refit": self.refit.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was called.

        Everything else comes first: plant the same seeds in the model, load its values, make the optimizer of
        `GrowingModel.parameter_groups`, and construct the grower with the same arguments.

        Raises:
            CheckpointError: the state is of another model, controller or version, or the model holds other seeds.
        """
        for key, here in self._signature().items():
            if state.get(key) != here:
                raise CheckpointError(
                    f"the grower's state was saved with {key} {state.get(key)!r}, but here it is {here!r}"
                )
        require(self.model, state["seeds"])
        self._attend()
        memory = from_plain(self._memory(), state["memory"], "the grower's state")
        self.decisions, self._seed = memory["decisions"], memory["seed"]
        self._state, self._actions = memory["controller"], memory["actions"]
        subject = self.subject
        subject.table, subject.evidence = memory["table"], memory["evidence"]
        subject.germinations = memory["germinations"]
        settle(self.model, subject.table, self.rules.isolation)
        self.refit.attend(subject.table, subject.evidence)
        self.refit.load_state_dict(state["refit"])

    def _attend(self) -> None:
        """Look after the gradients of all seeds there are: first see them, then average them."""
        self._gradients.watch(self.model.seeds.values())
        self._processes.average_gradients(self.model.seeds.values())

    def _signature(self) -> dict[str, Any]:
        """What must be the same where a state is saved and where it is loaded."""
        return {
            "version": STATE_VERSION,
            "slots": list(self.model.slots),
            "blueprints": [kind.name for kind in self.subject.roster.kinds],
            "controller": self.controller.name,
            "evidence": self.evidence.value,
        }

    def _memory(self) -> dict[str, Any]:
        subject = self.subject
        return {
            "decisions": self.decisions,
            "seed": self._seed,
            "table": subject.table,
            "evidence": subject.evidence,
            "germinations": subject.germinations,
            "history": self._history,
            "gradients": self._gradients,
            "controller": self._state,
            "actions": self._actions,
            "governor": self.governor,
        }

    def _rollbacks_used(self) -> NDArray[np.float64]:
        if self.governor is None:
            return np.zeros(1)
        return np.array([min(self.governor.rollbacks / max(self.governor.settings.max_rollbacks, 1), 1.0)])


def _unscaled(loss: Tensor) -> Tensor:
    return loss
