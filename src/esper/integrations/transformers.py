"""Growth, and models of several sizes, under Hugging Face's Trainer (extra ``hf``)."""

import logging
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from esper.config.arguments import FilePath, PositiveInt, check_arguments
from esper.errors import ConfigError
from esper.extras import describe_missing
from esper.grower import Grower
from esper.grower.evaluation import Evaluate
from esper.growth.inputs import Arguments
from esper.growth.links import unwrap_optimizer
from esper.growth.model import GrowingModel
from esper.growth.persist import GrowthInStateDict
from esper.integrations import MeanLoss, step_grower
from esper.ladders.plan import make_plan
from esper.ladders.training import Evaluate as EvaluateRung
from esper.ladders.training import LadderTraining
from esper.numerics.modules import keep_generators

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ModuleNotFoundError as error:
    raise ConfigError(describe_missing("hf", "esper.integrations.transformers", error.name)) from error

_log = logging.getLogger(__name__)

_LOSS = "loss"
"""The Trainer's key for the mean training loss since it last logged."""
_SCHEDULE = ("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio")


class TransformersGrower(TrainerCallback):
    """Grows the `GrowingModel` of a Trainer.

    ```python
    model = esper.attach(net, {"layer2": "auto"}, example_input={"inputs": images[:2]})
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=1e-3))
    trainer = Trainer(model, TrainingArguments("out"), train_dataset=train, optimizers=(optimizer, None))
    trainer.add_callback(TransformersGrower(trainer, evaluate=validate, controller="heuristic", horizon=30))
    trainer.train()
    ```

    It decides at the end of every epoch, or every ``every_n_steps`` steps, and logs the decision; the Trainer logs the
    loss before. Checkpoints include the grown model and the grower's state; to resume, make all objects in the same way
    and call ``trainer.train(resume_from_checkpoint=...)``. When training ends, after the last checkpoint,
    `Grower.finish` decides on unfinished seeds.

    Args:
        trainer: The Trainer whose model grows, with its optimizer.
        evaluate: As in `Grower`.
        every_n_steps: Optimizer steps from one decision to the next; None: one decision per epoch.
        options: Arguments of `Grower`, except ``loss`` and ``scaler``. Training stops at a plateau of ``growth``.
    """

    @check_arguments(ConfigError)
    def __init__(
        self, trainer: Trainer, evaluate: Evaluate, *, every_n_steps: PositiveInt | None = None, **options: Any
    ) -> None:
        self._trainer, self._every = trainer, every_n_steps
        model = cast("nn.Module", trainer.model)
        optimizer = cast("Optimizer | None", trainer.optimizer)
        if not isinstance(model, GrowingModel):
            raise ConfigError(f"the Trainer's model is a {type(model).__name__}: give it the model from esper.attach")
        if optimizer is None:
            raise ConfigError(
                "give the Trainer optimizers=(an optimizer made from model.parameter_groups(lr=...), None)"
            )
        original = trainer.compute_loss

        def loss(inputs: Mapping[str, Any], items: Tensor | int | None) -> Tensor:
            # The model without a wrapper for several processes, which must see every minibatch once.
            value = original(model, dict(inputs), num_items_in_batch=items)
            assert isinstance(value, Tensor)
            return value

        scaler = cast("torch.amp.GradScaler | None", trainer.accelerator.scaler)
        self.grower = grower = Grower(model, optimizer, evaluate=evaluate, loss=loss, scaler=scaler, **options)

        # Forks learn from the same minibatch, right after its loss is computed.
        @wraps(original)
        def compute_loss(
            model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            model_inputs = dict(inputs)  # a Trainer may remove the labels
            result = original(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
            value = result[0] if isinstance(result, tuple) else result
            grower.isolated_backward(value, model_inputs, num_items_in_batch)
            return result

        if grower.needs_isolated_backward:
            trainer.compute_loss = compute_loss
        self._losses = MeanLoss()
        self._logged_step = 0
        self._due = False
        carrier = GrowthInStateDict(model)
        carrier.add_part("grower", self.grower)
        carrier.add_part("losses", self._losses)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Set the step from which the loss counts."""
        self._logged_step = state.global_step

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Take a decision if one is due."""
        if self._every is not None and state.global_step % self._every == 0:
            self._decide_once_logged(state, control)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Take a decision if one is due."""
        if self._every is None:
            self._decide_once_logged(state, control)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Add the loss to the mean, and take a decision if one is due."""
        if logs is None or _LOSS not in logs:
            return
        self._losses.add(float(logs[_LOSS]), state.global_step - self._logged_step)
        self._logged_step = state.global_step
        if self._due:
            self._decide(control)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Decide on unfinished seeds."""
        _log.info("%s", self.grower.finish())

    def _decide_once_logged(self, state: TrainerState, control: TrainerControl) -> None:
        """Take a decision, after the Trainer has logged the loss up to this step."""
        if self._logged_step == state.global_step:
            self._decide(control)
        else:
            self._due = control.should_log = True

    def _decide(self, control: TrainerControl) -> None:
        self._due = False
        control.should_training_stop |= step_grower(self.grower, self._losses, self._trainer.log, _log)


class TransformersLadder(TrainerCallback):
    """Trains models of several sizes in one training of a Trainer, like `esper.ladder`.

    ```python
    model = GPT2LMHeadModel(GPT2Config(n_layer=1))
    trainer = Trainer(model, TrainingArguments("out", learning_rate=1e-3), train_dataset=train)
    trainer.add_callback(TransformersLadder(trainer, depths=[1, 2, 4], steps=1000, folder="sizes"))
    trainer.train()
    ```

    Model and optimizer grow in place. The callback sets the learning rates, at most those of the optimizer, and ends
    training when the last rung is saved. To resume from any checkpoint of the Trainer's, make all objects in the same
    way, keep ``folder``, and call ``trainer.train(resume_from_checkpoint=...)``.

    Args:
        trainer: The Trainer, with a plain model of the first size. Without an optimizer it creates its default one.
        folder: As in `esper.ladder`.
        evaluate: As in `esper.ladder`, such as ``lambda model: trainer.evaluate()["eval_loss"]``.
        example_input: Arguments of the model; None: the first minibatch of the Trainer.
        options: Further arguments of `esper.ladder`, such as ``steps`` and ``depths``.
    """

    @check_arguments(ConfigError, folder="give the path of a folder")
    def __init__(
        self,
        trainer: Trainer,
        *,
        folder: FilePath,
        evaluate: EvaluateRung | None = None,
        example_input: Arguments | None = None,
        **options: Any,
    ) -> None:
        model, args = cast("nn.Module", trainer.model), trainer.args
        if trainer.lr_scheduler is not None:
            raise ConfigError(
                "the Trainer has a schedule, but a ladder sets the rates: give optimizers=(optimizer, None)"
            )
        for field in fields(args):
            value = getattr(args, field.name)
            if field.name in _SCHEDULE and value and value != field.default:
                raise ConfigError(f"{field.name} is set, but a ladder sets the rates: omit it, or give rates by size")
        if args.load_best_model_at_end:
            raise ConfigError("load_best_model_at_end would load a model of another size: remove it")
        if example_input is None:
            with keep_generators(model):
                example_input = dict(next(iter(cast("Iterable[Mapping[str, Any]]", trainer.get_train_dataloader()))))
        plan = make_plan(model, example_input, float(args.gradient_accumulation_steps), **options)
        if args.max_steps not in (-1, plan.total_steps):
            raise ConfigError(f"max_steps is {args.max_steps}, but the ladder takes {plan.total_steps}: omit max_steps")
        args.max_steps = plan.total_steps
        # The optimizer, and a schedule that shows in the Trainer's logs what the ladder sets.
        if trainer.optimizer is None:
            trainer.create_optimizer()
        optimizer = unwrap_optimizer(cast("Optimizer", trainer.optimizer))
        self.training = LadderTraining(model, plan, example_input, Path(folder), evaluate, keep=len(plan.rungs))
        """The ladder; its ``result`` has the rungs."""
        self.training.link(optimizer)
        trainer.lr_scheduler = LambdaLR(optimizer, lambda _: plan.compute_rate(self.training.step))
        # A checkpoint of another size is loaded into a model of that size.
        self.training.follow_loading()
        self._counting = ExitStack()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Print the plan; the Trainer has loaded its checkpoint by now."""
        self.training.start()
        self.training.resume_at(state.global_step)
        self._counting.close()  # still open if a training in this process was interrupted
        self._counting.enter_context(self.training.spent.counting())

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Set the learning rates of the step."""
        self.training.begin_step()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Count the step: a rung may branch off, or be finished."""
        self.training.end_step()
        control.should_training_stop |= self.training.finished

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Note what was spent up to a checkpoint."""
        self.training.folder.record_spent(state.global_step, self.training.spent.flops)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Stop counting."""
        self._counting.close()
        if not self.training.finished:
            _log.warning("training ended before the ladder did: %s", self.training.describe_phase())
