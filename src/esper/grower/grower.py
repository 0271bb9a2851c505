"""A controller, a governor and counterfactuals for one model, in a training loop of its owner's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.config.arguments import check_arguments
from esper.control.controller import Controller
from esper.control.rules import ActionBuilder
from esper.engine.budget import RentBasis
from esper.engine.config import EpisodeConfig
from esper.errors import CheckpointError, ConfigError, DivergedError
from esper.grower.choosing import choose_controller, require_promise, require_time_to_plant, warn_of_unknown
from esper.grower.config import GrowerConfig, check_step, require_rules, require_same
from esper.grower.constraints import ConstraintSet
from esper.grower.decision import Decision, Ending, describe_decision, resolve_unfinished
from esper.grower.distributed import Processes
from esper.grower.evaluation import Evaluate, Examiner, Number, store_contributions
from esper.grower.gradients import GradientRecorder
from esper.grower.isolated import Counterfactual, IsolatedTrainer, Loss, require_loss
from esper.grower.network import GrowingNetwork
from esper.grower.oversight import Oversight
from esper.grower.promise_recorder import Listener
from esper.grower.recording import Account
from esper.grower.rehearsal import list_structures, rehearse
from esper.grower.reporter import OwnRun, Reporter
from esper.grower.scores import EXPECTED, Scores
from esper.grower.shared_forward import SharedForwardEvaluator
from esper.grower.spending import Spending, limit_progress
from esper.grower.state_dict import require_planted, require_structure, structure
from esper.grower.validation import Validation
from esper.growth.hooks import require_growable
from esper.growth.look import Look
from esper.growth.model import MODEL_ADVICE, OPTIMIZER_ADVICE, GrowingModel
from esper.lifecycle.actions import Op, make_wait_actions
from esper.lifecycle.legality import legal_actions
from esper.lifecycle.rules import Isolation, Rules
from esper.lifecycle.stages import Stage
from esper.lifecycle.transitions import Step, Transitions, concatenate_transitions, finish_growth
from esper.numerics.arrays import Bools, Floats, Ints
from esper.population.governor.model import GovernorVerdict, Rollback
from esper.serialization.state_files import from_plain, to_plain


class Grower:
    """Decides, once per `step`, what grows in a model that a loop of your own trains.

    ```python
    model = esper.attach(net, {"layer2": "auto"}, example_input=images[:2])
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=1e-3))
    grower = esper.Grower(model, optimizer, evaluate=validate, classes=10)
    for epoch in range(100):
        loss = train_one_epoch(model, optimizer)
        print(grower.step(train_loss=loss))
    print(grower.finish())
    plain = model.finalize()
    ```

    All is as in populations, with a single network: a policy that `esper train` made sees here what it saw there. In
    several processes the first decides for all, as `esper.grower.distributed` tells; where they share parameters
    (`GrowingModel.shard_growth`), all of them measure together.

    Args:
        model: From `esper.attach`, without live seeds unless `load_state_dict` follows.
        optimizer: Any `torch.optim` optimizer made from `GrowingModel.parameter_groups`.
        controller: ``look``, ``heuristic``, ``periodic``, ``all_at_start``, ``all_at_plateau``, ``random``, ``none``,
            ``esper``, the policy that comes with Esper, the directory of a run of `esper train`, or a
            `esper.control.controller.Controller`.
        evaluate: Measures a model on validation data, the same for the same model: a loss, ``(loss, accuracy)``, or a
            mapping of names to numbers that has ``loss``; `esper.Validation` is one for the usual tasks. It is called
            once per decision and for each seed whose turn it is (without the former call, where `step` is told the
            figures of the whole, unless that call lets the others share passes, see `esper.grower.shared_forward`), and
            anew after a rollback; of several processes, only in the first, but in all where they share parameters.
        metric: Name of the figure that growth is about, as `esper.grower.scores` tells, plateaus included; None:
            accuracy where `evaluate` gives one, otherwise the loss, and plateaus are those of the loss.
        higher_is_better: Whether that figure is; to be said of all but loss and accuracy.
        classes: How many there are to choose from (the vocabulary of a language model): losses are cross-entropies in
            nats, and controllers see them relative to that of guessing. None: as many as the model has outputs, if
            `evaluate` gives an accuracy; otherwise losses are relative to the first that is measured.
        horizon: Decisions that are planned. Controllers see what share of them is over, and plant nothing towards the
            end. None: until you stop; controllers then see times as if 100 were planned, and never hear that more than
            half of them is over, so that they go on planting. However long it was, `finish` judges what is unfinished.
        rules: What may happen to seeds; None: the rules that the controller was trained with, or the default ones.
        conduct: When training that blows up is rolled back, what growth may cost, how often seeds are measured, and
            when there is nothing more to decide. The governor's penalty stays as it is: nobody is paid a reward here.
        rent: What growth costs, in units of the score, of which ``rent * log1p(added / host)`` is taken off.
        rent_on: ``parameters`` or ``flops``, of a forward pass for one example: what is added, and what the host has.
            Controllers see all costs in it; policies learned in parameters.
        train_size: Number of training examples; policies see it.
        seed: All that is random about seeds and controllers follows from it.
        loss: The training loss of a minibatch, computed anew by way of ``model`` from whatever `learn_apart` is given;
            isolation ``shadow`` and evidence ``refit`` need it.
        scaler: The one of the loop, if it scales losses: gradients are then seen as they are without it.
        run: A new folder for the run's store, which `esper dash`, `report` and `runs` read: all that a decision
            was about is safe there when `step` returns. A grower that was saved goes on in the folder it had. Of
            several processes the first one writes.
        verbose: Print a line per decision and per seed that `finish` judges.
        evidence: What seeds on trial are judged by. ``dependence``: what the model loses when the seed is switched off,
            which costs no training, and is more than the model has gained by it. ``refit``: what it has over a fork of
            itself that trains on without the seed from when the trial begins; known from the fork's second decision on,
            and until then no gate and no rule judges the seed. `learn_apart` tells what that takes.
        objective: Of several sets of validation data the one that growth is about: `evaluate` then returns an
            `esper.Score` for each set, by name.
        constraints: By which share the loss of other sets may rise over what it is when the grower is made, by name.
            While one is broken, the seed without which it is broken by least is pruned, and none is kept, as
            `esper.grower.constraints` tells. `step` takes the loss of a set among its ``metrics`` as ``NAME loss``.
        training_flops: What growth and training may take, instead of a number of decisions or besides, as
            `esper.grower.spending` counts: controllers see what share is spent, and when all is, growth is `finished`.
        seconds: Likewise, since the grower was made.

    Raises:
        ConfigError: an argument is of another kind or out of range, rules or evidence need a ``loss``, the controller
            judges nothing by the evidence, or the horizon is too short.
        SlotError: the optimizer was not made from `GrowingModel.parameter_groups`, or the model has lost its slots.
        RunError: the folder for the run holds something else, is in use, or cannot be written.
    """

    @check_arguments(
        ConfigError,
        GrowerConfig,
        model=MODEL_ADVICE,
        optimizer=OPTIMIZER_ADVICE,
        evaluate=f"give a function that takes the model and returns {EXPECTED}",
    )
    def __init__(
        self,
        model: GrowingModel,
        optimizer: torch.optim.Optimizer,
        controller: str | Path | Controller = "look",
        *,
        evaluate: Evaluate,
        metric: str | None = None,
        higher_is_better: bool | None = None,
        classes: int | None = None,
        horizon: int | None = None,
        rules: Rules | None = None,
        conduct: EpisodeConfig = EpisodeConfig(),  # noqa: B008 (immutable)
        rent: float = 0.0,
        rent_on: RentBasis = "parameters",
        train_size: int = 1000,
        seed: int = 0,
        loss: Loss | None = None,
        scaler: torch.amp.GradScaler | None = None,
        run: str | Path | None = None,
        verbose: bool = False,
        evidence: str = Counterfactual.DEPENDENCE,
        objective: str | None = None,
        constraints: Mapping[str, float] | None = None,
        training_flops: float | None = None,
        seconds: float | None = None,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        classes = evaluate.require_classes(classes) if isinstance(evaluate, Validation) else classes
        self.constraints = ConstraintSet(objective, constraints or {})
        """What else must hold."""
        trained, penalty = bool(model.frozen.names), self.constraints.penalty
        self.scores = Scores(metric, higher_is_better, classes, model.outputs, trained=trained, penalty=penalty)
        """What growth is about."""
        self.network = GrowingNetwork(model, optimizer, conduct.budget, rent_on)
        self.controller, self._timing, origin = choose_controller(controller, self.network.specs, horizon, rules)
        require_time_to_plant(self.controller, conduct.plateau)
        warn_of_unknown(origin, model, self._timing, rent, self.scores.likely_classes)
        self.rules, self.conduct = self._timing.rules, conduct
        self._processes = Processes(sharing=model.sharded)
        self.config = GrowerConfig(
            controller=str(controller) if isinstance(controller, str | Path) else self.controller.name,
            horizon=horizon,
            rules=self.rules,
            conduct=conduct,
            rent=rent,
            rent_on=rent_on,
            train_size=train_size,
            classes=classes,
            metric=metric,
            higher_is_better=higher_is_better,
            objective=objective,
            constraints=self.constraints.limits,
            training_flops=training_flops,
            seconds=seconds,
            evidence=Counterfactual(evidence),
            seed=self._processes.agree(lambda: seed),
        )
        """What it was constructed with: the rules and classes in use, and the controller by name."""
        self.spending = Spending(model, training_flops, seconds=seconds)
        """What was spent, on training and on all that is measured."""
        self.passes = SharedForwardEvaluator(model)
        """How seeds are measured: in shared passes, or why not."""
        self._accompany(loss, scaler)
        wanted, kinds = require_promise(self.controller, conduct.promise), self.network.specs.kinds
        hears = model.sharded or self._processes.first
        self._listener = (
            None if wanted is None else Listener(model, kinds, wanted, scaler, self.spending.add, active=hears)
        )
        parts = self.passes, self.apart, self._gradients, self._listener, self._processes
        self._examiner = Examiner(self.network, self.scores, self.constraints, evaluate, *parts)
        require_rules(self.rules, self.network.specs.kinds, constrained=bool(self.constraints.limits))
        self._examiner.refer()
        self._begin()
        own = None if run is None else OwnRun(Path(run), model, self.network.blueprints, self.config.to_dict())
        self.reporter = Reporter(self._processes, own, verbose=verbose)
        """Tells of all that is decided."""
        self._agree_on_spending()

    def _accompany(self, loss: Loss | None, scaler: torch.amp.GradScaler | None) -> None:
        """Look after whatever learns from now on."""
        model, optimizer, evidence = self.model, self.optimizer, self.config.evidence
        require_loss(self.rules, evidence, self.controller, loss, optimizer)
        if model.sharded and self.learns_apart:
            raise ConfigError(
                "where processes share parameters (FSDP2) nothing learns apart, which takes copies and passes through "
                "parts of the model: take isolation none and evidence dependence"
            )
        require_growable(model)
        model.link(optimizer)
        about = self.conduct.governor, self.scores, self._processes
        self._oversight = Oversight(self.network, optimizer, *about, scaled=scaler is not None)
        self.governor = self._oversight.governor
        """That returns the model to its last good state; None without one."""
        self._gradients = Gradients(model, optimizer, scaler)
        told = (self._gradients.take_in, self._processes.average)
        self.apart = IsolatedTrainer(model, optimizer, evidence, loss, scaler, *told)
        """Lets isolated seeds learn, and the forks that seeds on trial are compared with."""
        self._attend()

    def _begin(self) -> None:
        """Nothing is decided yet."""
        self.decisions = 0
        """Decisions taken."""
        self._state: Any = self.controller.start([self.config.seed])
        # What is trained before the first call of `step` follows a decision, too: to wait.
        self._actions: Ints = make_wait_actions(1)
        self.network.table = self.network.advance(self._actions, self.rules).table
        self._examiner.listen_before(1)

    def rehearse(self, *passes: Callable[[], object]) -> int:
        """Compile the model for every structure that growth may give it, before training; returns how many there are.

        ```python
        compiled = torch.compile(model, recompile_limit=64)
        grower.rehearse(lambda: loss_of(compiled, batch).backward(), lambda: validate(compiled))
        ```

        All graphs that torch has made before, of whatever, are dropped. Nothing is compiled anew afterwards, as long as
        the model is called with the same arguments, of the same shapes. Nothing remains of the passes but graphs.
        `esper.grower.rehearsal` tells how many structures there are: three with one blueprint in one slot, and each may
        need a graph to learn and one to evaluate.

        Args:
            passes: Calls of what is compiled, as training and evaluation make them, backward passes included, but
                without a step of the optimizer. None: the model itself, compiled in place by ``model.compile()``, on
                its example input, in training with a backward pass, and in evaluation.

        Raises:
            ConfigError: nothing is compiled; torch keeps fewer graphs than that takes; seeds learn apart, in passes of
                their own; or a pass makes a step of the optimizer.
        """
        if self.model.sharded:
            raise ConfigError("where processes share parameters (FSDP2) there is no rehearsal: leave it out")
        if self.learns_apart:
            raise ConfigError(
                "what learns apart makes passes of its own, which a rehearsal does not know: take isolation none and "
                "evidence dependence where the model is compiled"
            )
        found = rehearse(self.model, self.optimizer, list_structures(self.network, self.rules), passes)
        self.passes.separate = "the network is compiled"
        return found

    def step(
        self,
        *,
        train_loss: Number,
        val_loss: Number | None = None,
        accuracy: Number | None = None,
        metrics: Mapping[str, Number] | None = None,
        train_accuracy: Number | None = None,
        look: Look | None = None,
    ) -> Decision:
        """Measure the model, let the governor judge and the controller decide, and carry it out.

        Call it after the optimizer's step, at equal intervals: once per epoch, or every so many minibatches.

        Args:
            train_loss: Mean training loss since the last call.
            val_loss: Validation loss, as `evaluate` would measure it now; with all it gives, a call is spared.
            accuracy: Validation accuracy, in [0, 1].
            metrics: Whatever else `evaluate` gives, by name.
            train_accuracy: Training accuracy since the last call, if growth is about accuracy; None: not known, taken
                to equal that of validation.
            look: What `GrowingModel.look` has just found, where training shows nothing: a compiled model's, for one.

        Raises:
            ConfigError: one of the figures is none, or the metric is not among them, a seed came or went by another
                hand, another optimizer trains the model, or promises matter and nothing was heard of training.
            SlotError: a submodule with a slot was replaced.
            DivergedError: training blew up more often than the governor's `max_rollbacks`.
            RunError: the run's folder is another grower's, or cannot be written.
        """
        self.reporter.require_open()
        self._examiner.prepare(1 + self.decisions, look)
        given = check_step(train_loss, train_accuracy, val_loss, accuracy, metrics, self.constraints)
        require_planted(self.model, self.network.table)
        require_growable(self.model)
        self._oversight.trained.require()
        # Measure the model and the seeds whose turn it is, and undo the training since the last good state if it blew
        # up. What was measured before that is of a model that is no more.
        due = self.conduct.find_due_counterfactuals(np.array([self.decisions]), len(self.model.slots))
        now = self._processes.agree(lambda: given)
        measurable = self._oversight.is_measurable(now.train_loss)
        found = self._examiner.measure(now.train_loss, now.whole, due) if measurable else None
        verdict = self._oversight.judge(now.train_loss, found)
        value_before = math.nan if found is None else self.scores.value(found.usual)
        rollback, undone = self._undo(verdict)
        if found is None or rollback is not None:
            found = self._examiner.measure(now.train_loss, None, np.ones_like(due))
        # Let gates and the controller know, and bar what there are no grounds for.
        idle = self._gradients.idle
        self._examiner.look_ahead(1 + self.decisions, look, rollback is not None)
        evaluation = self._examiner.record(now, found, self._actions)
        barred = self._oversight.find_barred(verdict, now.train_loss, found, idle=idle)
        # Decide, carry it out, and tell whoever wants to know.
        finished, before = self.finished, self.network.table
        broken = self.constraints.find_broken(found.usual)
        culprit = self._examiner.find_culprit(found)
        actions, result = self._decide((*barred, Op.FOSSILIZE) if broken else barred, culprit)
        self.decisions += 1
        self._examiner.listen_before(1 + self.decisions)
        changes, slots, metric = (
            concatenate_transitions([undone, result.transitions]),
            list(self.model.slots),
            self.scores.metric,
        )
        measured = (evaluation, metric, self.scores.value(found.usual))
        decision = describe_decision(
            self.decisions,
            slots,
            self.network.blueprints,
            actions,
            changes,
            *measured,
            rollback,
            finished,
            self.constraints.describe(broken),
        )
        said, about = (now.train_loss, now.train_accuracy), self.scores.about()
        paid = self.config.rent * math.log1p(float(self.network.charge.added(result.table, result.table.owning)[0]))
        account = Account(decision, *said, value_before, result.verdicts, before, result.table, about, paid)
        self.reporter.tell(account)
        self._agree_on_spending()
        return decision

    def close(self) -> None:
        """Say in the run's folder that training has ended, and let go of it; without a ``run`` it does nothing.

        A run whose last planned decision was taken has ended anyway.
        """
        self.reporter.close(self.decisions)

    def finish(self) -> Ending:
        """End growth: measure all unfinished seeds now, keep those that are worth their rent, and prune the others.

        Call it after training, however early that ended, and before `GrowingModel.finalize` or `esper.save`. A seed is
        kept, at the weight that it has, if it counts and contributes at least what it adds to the rent: the rule by
        which controllers judge seeds that they have held for long enough. The least valuable is judged first, and the
        others are measured again without it. None is kept while a constraint is broken, or the model's answer is the
        same to everything, as that of a dead network. Where nothing is unfinished, nothing changes. You may train on
        all the same: the next `step` decides as ever about slots that are free.

        Nothing trains after it, so that losing a seed costs what the model depends on it: that is what it is judged by,
        whatever the ``evidence`` was. If parameters are not finite by now, the last good state comes back first.

        Raises:
            ConfigError: a seed came or went by another hand.
            SlotError: a submodule with a slot was replaced, or the model was released.
            DivergedError: training blew up more often than the governor's `max_rollbacks`.
            RunError: the run's folder was closed, or is another grower's.
        """
        if self.network.table.live.any():
            self.reporter.require_open()
        require_planted(self.model, self.network.table)
        require_growable(self.model)
        if self.network.table.live.any() and not self._oversight.is_measurable(0.0):
            self._undo(self._oversight.judge(math.nan, None))
        ending = resolve_unfinished(
            self.network, self.config.rent, self._contributions, self._resolve, list(self.model.slots)
        )
        self.apart.update_forks(self.network.table, self.network.evidence)  # lets go of all forks
        self._examiner.listen_before(None)
        self.reporter.tell_ending(self.decisions, ending)
        return ending

    @property
    def looks_next(self) -> bool:
        """Whether the controller goes by what is promised at the next `step`: a compiled model needs ``look`` there."""
        return self._examiner.looks_before(1 + self.decisions)

    @property
    def finished(self) -> bool:
        """Whether the budget of training is spent, or the conduct's plateau is reached: what growth is about stopped to
        improve, and no seed is unfinished.

        That is the ``metric`` where one is named, and the validation loss otherwise: so did policies see it where they
        were trained. Stop then. The controller is not asked again, unless validation improves after all.
        """
        over = self.spending.limited and self._processes.agree(lambda: self.spending.compute_share() >= 1)
        return over or bool(self.conduct.find_stalled(self._examiner.history.plateau_age, self.network.table)[0])

    @check_arguments(ConfigError, loss="give the loss of the minibatch, a tensor")
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
        self.apart.follow(loss, minibatch, named)

    @property
    def learns_apart(self) -> bool:
        """Whether `learn_apart` is to be called for every minibatch."""
        return self.rules.isolation is Isolation.SHADOW or self.config.evidence is Counterfactual.REFIT

    def _undo(self, verdict: GovernorVerdict | None) -> tuple[Rollback | None, Transitions]:
        """Undo the training since the last good state, if it blew up, and tell if that was once too often."""
        try:
            return self._oversight.undo(verdict)
        except DivergedError as error:
            self.reporter.tell_failure(self.decisions, error)
            raise

    def _decide(self, barred: tuple[Op, ...], culprit: Bools) -> tuple[Ints, Step]:
        """Prune the seed in the slot ``culprit`` ``[1, S]``, if there is one; else ask the controller, or wait if there
        is nothing more to decide. Carry that out.

        A failure leaves model, optimizer and table as they were.
        """
        network = self.network
        progress = self._timing.progress(1 + self.decisions)
        progress = self._processes.agree(lambda: limit_progress(progress, self.spending, self._timing.planned))
        seen = progress, self._timing.horizon, self.config, self._oversight.rollbacks_used
        affordable = network.affordable(self.rules.blends)
        if culprit.any():  # whatever training is like: what breaks a constraint goes at once
            barred = tuple(op for op in barred if op is not Op.PRUNE)
        allowed = tuple(op for op in self.rules.operations if op not in barred)
        rules = self.rules.model_copy(update={"operations": allowed})
        masks = legal_actions(network.table, network.evidence, rules, network.specs.compatible, affordable)
        actions, state = make_wait_actions(1), self._state
        if culprit.any():
            builder = ActionBuilder(masks)
            builder.act_on(Op.PRUNE, culprit)
            actions = builder.actions
        elif not self.finished:
            actions, state = self._processes.agree(
                lambda: self.controller.act(self._examiner.observe(*seen), masks, self._state)
            )
        result = network.advance(actions, self.rules)
        network.apply(result.transitions, actions, self.config.seed)
        self._attend()
        network.table, self._state, self._actions = result.table, state, actions
        network.weigh_seeds(self.rules.isolation)
        network.evidence = self.apart.update_forks(network.table, network.evidence)
        if (result.transitions.after == Stage.PRUNED).any():
            self._oversight.expect_loss(forget=bool(culprit.any() or self.model.frozen.names))
        return actions, result

    def _contributions(self, slots: Bools) -> tuple[Floats, bool]:
        """What the seeds in ``slots`` ``[1, S]`` contribute, and whether none may be kept; for `finish`."""
        contributions, unfit = self._examiner.measure_dependence(slots)
        store_contributions(self.model, contributions)
        return contributions, unfit

    def _resolve(self, kept: Bools, pruned: Bools) -> Transitions:
        """Fossilize the seeds in slots ``kept`` and prune those in ``pruned``, ``[1, S]``; returns what changed."""
        table, changes = finish_growth(self.network.table, kept, pruned)
        self.network.apply(changes, make_wait_actions(1), self.config.seed)
        self.network.table = table
        if pruned.any():
            self._oversight.expect_loss(forget=False)
        return changes

    def state_dict(self) -> dict[str, Any]:
        """All that the grower remembers, as plain values; as large as the model, of which the governor has a copy.

        Between decisions the features of slots are in it as well, of the examples that are listened to.

        Save it beside the state dicts of model and optimizer; of several processes, the first one's; where they share
        parameters, each one's, for as many processes.

        Raises:
            CheckpointError: the controller's state cannot be saved.
        """
        state = {
            **self._signature(),
            "seeds": structure(self.model),
            "memory": to_plain(self._memory()),
            "refit": self.apart.state_dict(),
        }
        return state if self.reporter.identity is None else {**state, "run": self.reporter.identity}

    @check_arguments(CheckpointError, state="give what Grower.state_dict() returned")
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was called.

        Everything else comes first: plant the same seeds in the model, load its values, make the optimizer of
        `GrowingModel.parameter_groups`, and construct the grower with the same arguments. Slots, blueprints,
        ``controller``, ``metric``, ``higher_is_better``, ``objective``, ``constraints``, ``classes``, ``seed``,
        ``evidence`` and the governor's window must be those of then; whatever else is told differently holds from here
        on, such as a longer ``horizon``.

        Raises:
            CheckpointError: the state is damaged or of another version, model, controller or setting, or the model
                holds other seeds.
            RunError: the ``run`` is not the one that the state was saved in.
        """
        require_same(state, self._signature(), ("seeds", "memory", "refit"))
        require_structure(self.model, state["seeds"])
        self._oversight.trained.rebase()
        self._attend()
        memory = from_plain(self._memory(), state["memory"], "the grower's state")
        self.decisions, self._state, self._actions = memory["decisions"], memory["controller"], memory["actions"]
        self.constraints.references = memory["references"]
        self.network.weigh_seeds(self.rules.isolation)
        self.apart.update_forks(self.network.table, self.network.evidence)
        self.apart.load_state_dict(state["refit"])
        store_contributions(self.model, self._examiner.history.accuracy_contribution)
        self._examiner.listen_before(1 + self.decisions)
        self.reporter.resume(self.decisions, state.get("run"))

    def _agree_on_spending(self) -> None:
        """Processes measure apart and have clocks of their own: what goes by the budget must be alike in all."""
        if self._processes.several:
            self.spending.agree_on(self._processes.agree(self.spending.compute_share))

    def _attend(self) -> None:
        """Look after the gradients of all seeds there are: first see them, then average them."""
        self._gradients.watch(self.model.seeds.values())
        self._processes.average_gradients(self.model.seeds.values())

    def _signature(self) -> dict[str, Any]:
        """What must be the same where a state is saved and where it is loaded."""
        return {
            "slots": list(self.model.slots),
            "blueprints": self.network.blueprints,
            "controller": self.controller.name,
            **self.config.signature(),
        }

    def _memory(self) -> dict[str, Any]:
        return {
            "decisions": self.decisions,
            "subject": self.network,
            "scores": self.scores,
            "history": self._examiner.history,
            "gradients": self._gradients,
            "controller": self._state,
            "actions": self._actions,
            "governor": self.governor,
            "references": self.constraints.references,
            "spending": self.spending,
            "watch": None if self.governor is None else self._oversight,
            "promises": self._listener,
        }
