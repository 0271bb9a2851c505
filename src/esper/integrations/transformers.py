"""Growth under Hugging Face's Trainer (extra ``hf``)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import wraps
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.config.arguments import PositiveInt, check_arguments
from esper.errors import ConfigError
from esper.extras import describe_missing
from esper.grower import Grower
from esper.grower.evaluation import Evaluate
from esper.grower.state_dict import GrowthInStateDict
from esper.growth.model import GrowingModel
from esper.integrations.trainer_callback import MeanLoss, decide, finish

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ModuleNotFoundError as error:
    raise ConfigError(describe_missing("hf", "esper.integrations.transformers", error.name)) from error

_log = logging.getLogger(__name__)

_LOSS = "loss"
"""What the Trainer calls the mean training loss since it last logged."""


class GrowerCallback(TrainerCallback):
    """Lets a `GrowingModel` grow that is a Trainer's model.

    ```python
    model = esper.attach(net, {"layer2": "auto"}, example_input={"inputs": images[:2]})
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=1e-3))
    trainer = Trainer(model, TrainingArguments("out"), train_dataset=train, optimizers=(optimizer, None))
    trainer.add_callback(GrowerCallback(trainer, evaluate=validate, controller="heuristic", horizon=30))
    trainer.train()
    ```

    It decides at the end of every epoch, or every so many steps, once the Trainer has logged the loss, which it makes
    it do then, and logs what it decided. Checkpoints hold what has grown and all that the grower remembers:
    ``trainer.train(resume_from_checkpoint=...)`` with all objects made in the same way goes on from there.

    When training ends, early or not, `Grower.finish` judges what is unfinished, and the model is ready for
    `GrowingModel.finalize`. Checkpoints were written before that, so training that goes on from one, with more epochs
    perhaps, is not cut short by it.

    Args:
        trainer: Whose model and optimizer it takes.
        evaluate: As in `Grower`.
        every_n_steps: Optimizer steps from one decision to the next; None: one decision per epoch.
        options: Arguments of `Grower`: ``controller``, ``horizon``, ``classes``, ``conduct``, ... but for ``loss`` and
            ``scaler``. Where the conduct has a plateau, training stops there.

    Raises:
        ConfigError: the trainer's model does not grow, or it has no optimizer yet.
        SlotError: its optimizer was not made from `GrowingModel.parameter_groups`.
    """

    @check_arguments(ConfigError)
    def __init__(
        self, trainer: Trainer, evaluate: Evaluate, *, every_n_steps: PositiveInt | None = None, **options: Any
    ) -> None:
        self._trainer, self._every = trainer, every_n_steps
        model = cast("nn.Module", trainer.model)
        optimizer = cast("Optimizer | None", trainer.optimizer)
        if not isinstance(model, GrowingModel):
            raise ConfigError(f"the Trainer's model is a {type(model).__name__}: give it what esper.attach returns")
        if optimizer is None:
            raise ConfigError(
                "give the Trainer optimizers=(an optimizer made from model.parameter_groups(lr=...), None)"
            )
        self.grower = _grower(trainer, model, optimizer, evaluate=evaluate, **options)
        self._losses = MeanLoss()
        self._logged = 0
        """Step until which the loss has been logged."""
        self._due = False
        carrier = GrowthInStateDict(model)
        carrier.add_part("grower", self.grower)
        carrier.add_part("losses", self._losses)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Perhaps a resumed training."""
        self._logged = state.global_step

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Decide every so many steps."""
        if self._every is not None and state.global_step % self._every == 0:
            self._decide_soon(state, control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Decide every epoch."""
        if self._every is None:
            self._decide_soon(state, control)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Take in the loss, and decide if it is time to."""
        if logs is None or _LOSS not in logs:
            return
        self._losses.add(float(logs[_LOSS]), state.global_step - self._logged)
        self._logged = state.global_step
        if self._due:
            self._decide(control)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Judge what is unfinished; all checkpoints are written by now, and hold it as it was."""
        finish(self.grower, _log)

    def _decide_soon(self, state: TrainerState, control: TrainerControl) -> None:
        if self._logged == state.global_step:
            self._decide(control)
        else:
            self._due = control.should_log = True

    def _decide(self, control: TrainerControl) -> None:
        self._due = False
        control.should_training_stop |= decide(self.grower, self._losses, self._trainer.log, _log)


def _grower(trainer: Trainer, growing: GrowingModel, optimizer: Optimizer, **options: Any) -> Grower:
    """A grower whose isolated seeds and forks learn whenever the Trainer computes a loss to learn from."""
    compute_plain = trainer.compute_loss

    def loss(inputs: Mapping[str, Any], items: Tensor | int | None) -> Tensor:
        # Of the model itself: what may be around it, for several processes, is to see every minibatch once.
        found = compute_plain(growing, dict(inputs), num_items_in_batch=items)
        assert isinstance(found, Tensor)
        return found

    scaler = cast("torch.amp.GradScaler | None", trainer.accelerator.scaler)
    grower = Grower(growing, optimizer, loss=loss, scaler=scaler, **options)
    if not grower.needs_isolated_backward:
        return grower

    @wraps(compute_plain)
    def compute_loss(
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, Any]:
        model_inputs = dict(inputs)  # a Trainer may take out the labels
        found = compute_plain(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        grower.isolated_backward(found[0] if isinstance(found, tuple) else found, model_inputs, num_items_in_batch)
        return found

    trainer.compute_loss = compute_loss
    return grower
