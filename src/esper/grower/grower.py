"""The growth engine for one model in a user's training loop."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from esper.config.arguments import Advice, FilePath, check_arguments, describe_value
from esper.control.controller import Actions, CandidateRater, CandidateRating, SeedRater
from esper.control.rules import ActionBuilder
from esper.engine.engine import GrowthEngine
from esper.engine.governor import Intervention
from esper.errors import CheckpointError, ConfigError, DivergedError
from esper.grower.backend import GrowingNetwork, ModelBackend, ModelSpec, ModelTraining
from esper.grower.callbacks import GrowerCallback, PrintDecisions, RunRecorder
from esper.grower.config import (
    GrowerConfig,
    check_step,
    choose_controller,
    choose_promise_settings,
    require_rules,
    require_same,
    require_time_to_plant,
)
from esper.grower.decision import (
    Decision,
    Ending,
    TriedModules,
    compute_prices,
    list_changes,
    rate_modules,
    resolve_unfinished,
)
from esper.grower.distributed import Processes
from esper.grower.evaluation import (
    EVALUATE_ADVICE,
    Evaluate,
    ModelEvaluation,
    Number,
    read_criterion,
    store_contributions,
)
from esper.grower.governor import describe_rollback
from esper.grower.refit import require_loss
from esper.grower.spending import Spending
from esper.grower.validation import Validation
from esper.growth.links import unwrap_optimizer
from esper.growth.look import Look
from esper.growth.model import MODEL_ADVICE, OPTIMIZER_ADVICE, GrowingModel, require_savable
from esper.growth.persist import describe_structure, require_structure
from esper.growth.promise import Promises
from esper.lifecycle.actions import Head, Op, make_wait_actions
from esper.lifecycle.table import Figures, SeedRating, Stage
from esper.lifecycle.transitions import concatenate_transitions
from esper.numerics.arrays import Bools, Floats
from esper.numerics.devices import Deferred
from esper.serialization import from_plain, to_plain

_EVERYONE = np.ones(1, np.bool_)


class Grower:
    """Decides once per `step` what grows in a model that your own loop trains.

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

    It uses the same engine as `esper train`, so a trained policy sees the same observations here. With several
    processes, the first decides for all (`esper.grower.distributed`).

    Args:
        model: From `esper.attach`, without live modules unless `load_state_dict` follows.
        optimizer: A `torch.optim` optimizer made from `GrowingModel.parameter_groups`, or a wrapper of one, such as
            accelerate's.
        evaluate: Measures the model on validation data. It must be deterministic, and return a loss,
            ``(loss, accuracy)``, or a mapping of names to numbers with the key ``loss``. `esper.Validation` covers the
            usual tasks; `esper.Metric`, `esper.Constrained` and `esper.Refit` wrap it. Each decision calls it for the
            model (the first one twice), for every module due (modules that are kept for good only at every fourth
            decision), and again after a rollback. The call for the model is skipped if you pass its result to `step`.
            With several processes only the first calls it.
        config: How the grower decides.
        callbacks: Called with every decision.
        run: New folder for a record of the run; adds ``RunRecorder(run)`` to the callbacks.
        verbose: Print a line per decision; adds ``PrintDecisions()`` to the callbacks.
        fields: Fields of `GrowerConfig`, such as ``controller``, ``horizon`` or ``rent``; they override ``config``.

    Raises:
        ConfigError: an argument has the wrong type or is out of range; rules or `Refit` need a ``loss``; the
            controller does not use it; or the horizon is too short.
        SlotError: the optimizer was not made from `GrowingModel.parameter_groups`, or the model has lost its slots.
        RunError: the folder for the run holds something else, is in use, or cannot be written.
    """

    @check_arguments(ConfigError, model=MODEL_ADVICE, optimizer=OPTIMIZER_ADVICE, evaluate=EVALUATE_ADVICE)
    def __init__(
        self,
        model: GrowingModel,
        optimizer: torch.optim.Optimizer,
        evaluate: Evaluate,
        config: GrowerConfig = GrowerConfig(),  # noqa: B008 (immutable)
        callbacks: Annotated[Sequence[GrowerCallback], Advice("give a list of esper.grower.GrowerCallback")] = (),
        *,
        run: Annotated[FilePath, Advice("give the path of a new folder")] | None = None,
        verbose: bool = False,
        **fields: Any,
    ) -> None:
        config = config.override(fields)
        require_savable(model)
        optimizer = unwrap_optimizer(optimizer)
        model.link(optimizer)
        self._processes = processes = Processes()

        # Who decides, by which rules and about what. The configuration then says what is in use.
        criterion, spec = read_criterion(evaluate), ModelSpec(model, optimizer)
        controller, timing = choose_controller(
            config.controller, config.horizon, config.rules, spec.costs.parameters.blueprints[0], spec.compatible[0]
        )
        promise = choose_promise_settings(controller, config.growth.promise)
        require_time_to_plant(controller, config.growth.plateau)
        require_rules(timing.rules, spec.kinds, constrained=bool(criterion.constraints))
        if criterion.refit:
            require_loss(controller, config.loss, optimizer)
        classes = config.classes
        if isinstance(criterion.evaluate, Validation):
            classes = criterion.evaluate.resolve_classes(classes, model.output_shape)
        name = str(config.controller) if isinstance(config.controller, str | Path) else controller.name
        seed = processes.run_on_first_process(lambda: config.seed)
        config = config.override({"controller": name, "rules": timing.rules, "classes": classes, "seed": seed})

        self.model, self.optimizer, self.controller, self.criterion = model, optimizer, controller, criterion
        self.config = config
        """The configuration in use, with resolved rules and classes and the controller's name."""
        self.spending = Spending(model, config.training_flops, seconds=config.seconds)
        """What training and measuring have cost."""
        self.network = GrowingNetwork(model, spec, config.growth.budget, config.rent_on, timing.rules, seed)
        self.backend = ModelBackend(
            model, optimizer, self.network, criterion, config, promise, processes, self.spending.add
        )
        """All that is known of the model, and hooks on its training."""
        self.engine = GrowthEngine(self.backend, config.growth.model_copy(update={"promise": promise}))
        self.callbacks: list[GrowerCallback] = [
            *([PrintDecisions()] if verbose else []),
            *([] if run is None else [RunRecorder(run)]),
            *callbacks,
        ]
        self.tried = TriedModules(model, self.network.blueprints)
        """The modules that were planted, with their outcomes, and the best candidate."""
        self.ratings: dict[str, SeedRating[float | None]] = {}
        """By slot: what decided at the newest decision whether its module is kept, for whoever records it."""
        self._timing = timing
        self._controller_state: Any = controller.start([seed])
        self._unreached: Bools = np.zeros((1, len(model.slots)), np.bool_)
        """Slots whose module had learned nothing at the last decision, since no gradient reached it, ``[1, S]``."""

        # What is trained before the first call of `step` follows a decision, too: to wait.
        with processes.one_message():
            self.backend.measure_constraint_references()
            self.engine.apply(make_wait_actions(1))
            self._notify(lambda callback: callback.on_start(self))
            self._share_spending()
        self._prepare_training()

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
        """Measure the model, roll back diverged training, and make and apply one decision.

        Call it after an optimizer step, at equal intervals: once per epoch or every N minibatches. If no gradient
        reaches a module although the optimizer steps, the grower warns and does not fossilize it.

        Args:
            train_loss: Mean training loss since the last call.
            val_loss: Current validation loss. If you pass everything that ``evaluate`` returns, it is not called for
                the model.
            accuracy: Validation accuracy, in [0, 1].
            metrics: Other values that ``evaluate`` returns, by name; for a constrained set, its loss under the key
                ``NAME loss``.
            train_accuracy: Training accuracy since the last call, where accuracy is the metric; None: assumed equal to
                the validation accuracy.
            look: Result of a `GrowingModel.look` just made, where promises cannot be measured in training.

        Raises:
            ConfigError: an argument has the wrong type or value, or the metric is missing; a module was added or
                removed outside the grower; another optimizer trains the model; or promises are due and no gradients
                were recorded. With several processes, the arguments of the first one count.
            SlotError: a submodule with a slot was replaced.
            DivergedError: training diverged more than `max_rollbacks` times without recovering in between.
            RunError: the run's folder belongs to another grower, or cannot be written.
        """
        backend, network, slots = self.backend, self.network, list(self.model.slots)
        with torch.inference_mode(False), self._processes.one_message():
            # Refuse what cannot be decided, before anything changes.
            self._notify(lambda callback: callback.on_step_start(self))

            def read_arguments() -> tuple[Promises | None, ModelTraining]:
                promises = self._read_look(look)
                loss, fraction, known = check_step(
                    train_loss, train_accuracy, val_loss, accuracy, metrics, backend.constraints
                )
                gradients = backend.gradients.report()
                return promises, ModelTraining(np.array([loss]), np.array([fraction]), *gradients, known)

            promises, training = self._processes.run_on_first_process(read_arguments)
            network.require_same_slots()
            require_savable(self.model)
            backend.optimizer_check.require_steps(stepped=backend.gradients.stepped)
            self.model.optimizer_link.warn_of_unchanged()
            if self.decisions == self.config.horizon:
                warnings.warn(
                    f"this decision is beyond the horizon of {self.config.horizon}: rules plant nothing any more; give "
                    "horizon the number of times that step is called",
                    stacklevel=2,
                )
            if backend.promise_recorder is not None:
                backend.promise_recorder.set_recording(False)

            # Measure the model and the modules whose turn it is, and roll back training that blew up.
            assessed = self.engine.assess(Deferred((), lambda: training), _EVERYONE)
            evaluation, intervention = assessed.evaluation, assessed.intervention
            train_loss = float(training.loss[0])
            self._require_rollbacks_left(intervention, train_loss)
            assert isinstance(evaluation, ModelEvaluation)
            current = evaluation.metrics
            rollback = describe_rollback(intervention, train_loss, slots)
            table = network.table
            learning = table.live & (table.stage != Stage.GERMINATED)
            self._unreached = self._processes.run_on_first_process(lambda: backend.gradients.find_unreached(learning))
            store_contributions(self.model, evaluation.accuracy_contribution)
            self.engine.measure_promises(_EVERYONE, supplied=promises)
            self._share_spending()

            # Leave out operations for which there are no grounds, or which a broken constraint forbids.
            is_measured = not backend.learning.checks_without_figures
            broken = backend.constraints.find_broken(current)
            breaker = backend.find_constraint_breaker(evaluation) & is_measured
            disallowed = backend.learning.find_disallowed_operations(
                current,
                train_loss,
                usual=bool(intervention.usual[0]),
                constant_output=evaluation.constant_output,
                idle=backend.gradients.idle,
            )
            if broken:
                disallowed.add(Op.FOSSILIZE)
            if breaker.any():  # however training is going: what breaks a constraint goes at once
                disallowed.discard(Op.PRUNE)
            excluded = np.tile(np.array([[[op in disallowed] for op in Op]]), (1, 1, len(slots)))
            excluded[:, Op.FOSSILIZE] |= self._unreached
            masks = self.engine.legal_actions(excluded)

            # Decide: prune what breaks a constraint, wait where growth is over, and otherwise leave it to the
            # controller.
            finished, before = self.finished, network.table
            actions, controller_state = make_wait_actions(1), self._controller_state
            seed_rating, candidate_rating = None, None
            if breaker.any():
                builder = ActionBuilder(masks)
                builder.act_on(Op.PRUNE, breaker)
                actions = builder.actions
            elif is_measured and not finished:
                conditions = self._list_conditions()

                def consult() -> tuple[Actions, Any, SeedRating[Figures] | None, CandidateRating | None]:
                    controller, observation = self.controller, self.engine.observe(*conditions)
                    acted = controller.act(observation, masks, self._controller_state)
                    if not isinstance(acted, tuple):  # pyright: ignore[reportUnnecessaryIsInstance]
                        raise ConfigError(
                            f"controller {controller.name!r} returned {describe_value(acted)} from act: return the "
                            "pair (actions, state)"
                        )
                    return (
                        *acted,
                        controller.rate_seeds(observation) if isinstance(controller, SeedRater) else None,
                        controller.rate_candidates(observation) if isinstance(controller, CandidateRater) else None,
                    )

                consulted = self._processes.run_on_first_process(consult)
                actions, controller_state, seed_rating, candidate_rating = consulted
            prices = compute_prices(network, self.config.rent)

            # Carry it out. A failure leaves model, optimizer and table as they were.
            forget_skill = bool(breaker.any() or self.model.frozen.names)
            result = self.engine.apply(actions, forget_skill=np.array([forget_skill]))
            if forget_skill and (result.transitions.after == Stage.PRUNED).any():
                backend.learning.forget_best()
            self._controller_state = controller_state
            network.measurements = backend.forks.update(network.table, network.measurements)
            backend.gradients.clear()
            if backend.promise_recorder is not None:
                backend.promise_recorder.clear()

            # Report it, with the figures by which modules are kept or pruned. What is pruned slowly was decided before.
            measured = rate_modules(evaluation, prices, seed_rating)
            notes = [evaluation.describe_error(index) for index in range(len(slots))]
            ratings = {name: measured.select(0, index, notes[index]) for index, name in enumerate(slots)}
            ratings |= self.tried.list_pending()
            changes = concatenate_transitions([intervention.transitions, result.transitions])
            blueprints, contributions = network.blueprints, evaluation.accuracy_contribution
            op, place = Op(int(actions[0, Head.OP])), int(actions[0, Head.SLOT])
            slot = None if op is Op.WAIT else slots[place]
            blueprint = int(actions[0, Head.BLUEPRINT] if op is Op.GERMINATE else before.blueprint[0, place])
            by_slot = dict(zip(slots, contributions[0].tolist(), strict=True))
            decision = Decision(
                number=self.decisions,
                op=op,
                slot=slot,
                blueprint=None if slot is None else blueprints[blueprint],
                changes=list_changes(slots, blueprints, changes, ratings),
                contributions={name: value for name, value in by_slot.items() if math.isfinite(value)},
                loss=float(evaluation.loss[0]),
                metric=backend.scores.metric,
                value=backend.scores.get_value(current),
                score=float(evaluation.accuracy[0]),
                rollback=rollback,
                finished=finished,
                broken=backend.constraints.describe_broken(broken),
                rating=ratings[slot] if slot is not None and op in (Op.FOSSILIZE, Op.PRUNE) else None,
            )
            by = "constraint" if breaker.any() else self.controller.name
            self.tried.record(decision, by, candidate_rating)
            self.ratings = ratings
            self._notify(lambda callback: callback.on_decision(self, decision))
            self._share_spending()
        self._prepare_training()
        return decision

    @property
    def decisions(self) -> int:
        """Number of decisions taken by `step`."""
        return int(self.engine.decisions[0]) - 1

    @property
    def promises_due(self) -> bool:
        """Whether the next `step` measures promises, or takes the ``look`` that it is given."""
        return bool(self.engine.promises_due()[0])

    @property
    def finished(self) -> bool:
        """Whether to stop training: the budget is spent, or the plateau of `GrowerConfig.growth` is reached.

        A plateau only counts while no module is unfinished. It is measured on the metric if you named one, otherwise
        on the validation loss. The controller makes no more decisions unless validation improves again. With several
        processes, a budget is that of the first one when it last decided.
        """
        spent = self.spending.limited and self.spending.share >= 1
        return spent or bool(self.engine.find_stalled()[0])

    @property
    def needs_isolated_backward(self) -> bool:
        """Whether you must call `isolated_backward` for every minibatch."""
        return self.criterion.refit

    @check_arguments(ConfigError, loss="give the loss of the minibatch, a tensor")
    def isolated_backward(self, loss: Tensor, *minibatch: Any, **named: Any) -> None:
        """Also train the forks of `esper.Refit` on this minibatch; does nothing if there are none.

        Call it after computing ``loss``, before ``backward()`` and before dividing or scaling the loss. For each module
        on probation it computes the loss again on a fork of the model without it, by calling the configured ``loss``
        with ``minibatch`` and ``named``. The forks' gradients are added in the backward pass of ``loss``, so dividing,
        scaling or accumulating the loss affects them equally. The model, its buffers and the random state do not
        change.

        A fork has its own parameters, buffers and optimizer. Its optimizer steps when yours does, with the same
        hyperparameters; other changes to gradients or parameters, such as clipping, do not apply to it.

        After each decision, the first minibatch is checked against ``loss`` with two extra passes. The grower warns if
        the configured loss differs, for instance because of other inputs or labels (not checked with dropout).

        Raises:
            ConfigError: the configured loss does not depend on a fork.
        """
        self.backend.forks.add_gradients(loss, minibatch, named)

    def finish(self) -> Ending:
        """End growth: measure all unfinished modules, keep those worth keeping, and prune the others.

        Call it after training, and before `GrowingModel.finalize` or `esper.save`; training may go on after it. The
        result lists every module that was ever tried.

        A module is kept, at its current alpha, if it affects the output and reaches the controller's thresholds, or
        covers its rent where there are none. The least valuable module goes first; the others are then measured again.
        No module is kept while a constraint is broken. If the model gives the same output for all examples, a module
        must lower the loss by the controller's threshold.

        Modules are measured by what the model loses when they are switched off, even with `esper.Refit`, since nothing
        trains any more. If parameters are not finite, the last good state is restored first.

        Raises:
            ConfigError: a module was added or removed outside the grower.
            SlotError: a submodule with a slot was replaced, or the model was released.
            DivergedError, RunError: as in `step`.
        """
        backend, governor, network = self.backend, self.engine.governor, self.network
        unfinished = bool(network.table.live.any())
        with self._processes.one_message():
            if unfinished:
                self._notify(lambda callback: callback.on_step_start(self))
            network.require_same_slots()
            require_savable(self.model)
            if unfinished and governor.settings is not None and not backend.is_finite():
                unknown = np.full(1, math.nan)
                skill, finite = np.full((1, backend.skills), math.nan), np.zeros(1, np.bool_)
                self._require_rollbacks_left(governor.check(unknown, skill, finite, None, _EVERYONE), math.nan)
            # The controller's thresholds for the modules as they were last measured.
            controller, rating = self.controller, None
            if unfinished and isinstance(controller, SeedRater):
                self._share_spending()
                conditions = self._list_conditions()
                rating = self._processes.run_on_first_process(
                    lambda: controller.rate_seeds(self.engine.observe(*conditions))
                )
            ending = resolve_unfinished(backend, governor, self.config.rent, rating, self._unreached)
            # What was kept before may not have been measured at the last decision.
            stale = (network.table.stage == Stage.FOSSILIZED) & (network.measurements.contribution_age > 0)
            if stale.any():
                evaluation = backend.measure_dependence(stale)
                store_contributions(self.model, evaluation.accuracy_contribution)
            self.tried.note_outcomes(ending.changes, self.decisions, "finish")
            ending = replace(ending, tried=self.model.tried, advice=self.tried.advise(self.controller.name))
            backend.forks.update(network.table, network.measurements)  # drops all forks
            if backend.promise_recorder is not None:
                backend.promise_recorder.set_recording(False)
            self._notify(lambda callback: callback.on_finish(self, ending))
        return ending

    def close(self) -> None:
        """Close the run and release its folder, by calling `on_close` of all callbacks.

        A run also ends with its last planned decision.
        """
        self._notify(lambda callback: callback.on_close(self))

    def _read_look(self, look: Look | None) -> Promises | None:
        """The promises of ``look`` in free slots."""
        if not isinstance(look, Look | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"look is {describe_value(look)}: give what model.look(loss, batches) returned")
        recorder = self.backend.promise_recorder
        if recorder is None:
            if look is not None:
                raise ConfigError("this controller does not use promises: remove the argument look")
            return None
        if look is not None:
            return recorder.read_look(look, self.network.table.stage == Stage.DORMANT)
        if self.promises_due and self.backend.gradients.stepped and recorder.empty:
            raise ConfigError(
                "the controller uses promises, which are measured in the backward passes of training, but none was "
                "recorded: call step(look=model.look(loss, batches)) "
                "whenever grower.promises_due is true, or use another controller"
            )
        return None

    def _list_conditions(self) -> tuple[Floats, int, Floats, Floats]:
        """Progress, horizon, rent and amount of data, for `GrowthEngine.observe`."""
        progress = self._timing.compute_progress(1 + self.decisions)
        # The share of decisions or of the budget, whichever is more.
        if self.spending.limited:
            share = self.spending.share
            progress = min(share if self._timing.planned is None else max(progress, share), 1.0)
        rent, train_size = self.config.rent, float(self.config.train_size)
        return np.array([progress]), self._timing.horizon, np.array([rent]), np.array([train_size])

    def _prepare_training(self) -> None:
        """Before training goes on: hook the gradients of all modules there are, and record what promises need."""
        seeds = self.model.seeds.values()
        self.model.optimizer_link.check_again()
        self.backend.gradients.watch(seeds)  # before the hooks that average gradients over processes
        self._processes.synchronize(seeds)
        if self.backend.promise_recorder is not None:
            self.backend.promise_recorder.set_recording(self.promises_due)

    def _require_rollbacks_left(self, intervention: Intervention, train_loss: float) -> None:
        try:
            self.backend.learning.require_rollbacks_left(self.engine.governor, intervention, train_loss)
        except DivergedError as error:
            failure = error
            self._notify(lambda callback: callback.on_failure(self, failure))
            raise

    def _notify(self, call: Callable[[GrowerCallback], None]) -> None:
        """Call every callback in the first process; the others wait for it."""

        def call_all() -> None:
            for callback in self.callbacks:
                call(callback)

        self._processes.run_on_first_process(call_all)

    def _share_spending(self) -> None:
        """Give all processes the first one's share of the budget, since each has its own clock."""
        if self._processes.is_distributed:
            self.spending.shared_share = self._processes.run_on_first_process(self.spending.compute_share)

    def __reduce__(self) -> NoReturn:
        raise ConfigError("a grower cannot be pickled or copied: save its state_dict(), and load it into a new Grower")

    def state_dict(self) -> dict[str, Any]:
        """The grower's state as plain values, to be saved with those of model and optimizer.

        It is about as large as both, since it includes their last good state. Of several processes, save the first's.

        Raises:
            CheckpointError: the controller's state cannot be saved.
        """
        return {
            **self._signature(),
            "seeds": describe_structure(self.model),
            **self._copy_memory(),
            "callbacks": {key: callback.state_dict() for key, callback in self._name_callbacks().items()},
        }

    @check_arguments(CheckpointError, state="give what Grower.state_dict() returned")
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state that `state_dict` returned.

        First plant the same modules in the model, load its values, make the optimizer from
        `GrowingModel.parameter_groups`, and construct the grower with the same arguments. Slots, blueprints,
        ``controller``, ``classes``, ``seed``, the metric with its constraints, and the governor's window must be the
        same. Other settings may change, such as a longer ``horizon``.

        Raises:
            CheckpointError: the state is damaged; it is of another version, model, controller or setting; or the model
                holds other modules.
            RunError: the state was saved with another ``run``.
        """
        require_same(state, self._signature(), ("seeds", "memory", "forks", "callbacks"))
        require_structure(self.model, state["seeds"])
        # After an error the grower remembers what it did before; it may be of modules that have just been replaced.
        owned, present = self.network.table.owning[0], [slot.seed is not None for slot in self.model.slots.values()]
        before = self._copy_memory() if np.array_equal(owned, present) else None
        try:
            self._load_memory(state)
        except Exception:
            if before is not None:
                self._load_memory(before)
            raise
        self.backend.optimizer_check.accept_changes()
        store_contributions(self.model, self.engine.history.accuracy_contribution)
        self._prepare_training()
        saved = {id(callback): state["callbacks"].get(key) for key, callback in self._name_callbacks().items()}
        with self._processes.one_message():
            self._notify(lambda callback: callback.on_resume(self, saved[id(callback)]))
            self._share_spending()

    def _copy_memory(self) -> dict[str, Any]:
        return {"memory": to_plain(self._state()), "forks": self.backend.forks.state_dict()}

    def _load_memory(self, state: Mapping[str, Any]) -> None:
        """Continue where `_copy_memory` was called."""
        memory = from_plain(self._state(), state["memory"], "the grower's state")
        self._controller_state, self.backend.constraints.references = memory["controller"], memory["references"]
        self.network.update_seeds()
        self.backend.forks.update(self.network.table, self.network.measurements)
        self.backend.forks.load_state_dict(state["forks"])

    def _name_callbacks(self) -> dict[str, GrowerCallback]:
        """Callbacks by the names of their classes, those of one class numbered in their order."""
        named: dict[str, GrowerCallback] = {}
        for callback in self.callbacks:
            kind = type(callback).__name__
            number = sum(type(earlier).__name__ == kind for earlier in named.values())
            named[f"{kind} {number}" if number else kind] = callback
        return named

    def _signature(self) -> dict[str, Any]:
        return {
            "slots": list(self.model.slots),
            "blueprints": self.network.blueprints,
            **self.config.signature(),
            "controller": self.controller.name,
            **self.criterion.to_dict(),
        }

    def _state(self) -> dict[str, Any]:
        backend = self.backend
        return {
            "engine": self.engine,
            "network": self.network,
            "snapshot": None if self.config.growth.governor is None else backend.last_good,
            "learning": backend.learning,
            "scores": backend.scores,
            "references": backend.constraints.references,
            "gradients": backend.gradients,
            "promises": backend.promise_recorder,
            "controller": self._controller_state,
            "spending": self.spending,
            "tried": self.tried,
        }
