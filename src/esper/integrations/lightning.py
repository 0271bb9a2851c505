"""Growth, and models of several sizes, under Lightning's Trainer (extra ``lightning``)."""

import logging
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from esper.config.arguments import FilePath, Name, PositiveInt, check_arguments
from esper.errors import CheckpointError, ConfigError
from esper.extras import describe_missing
from esper.grower import Grower
from esper.grower.evaluation import Evaluate
from esper.growth.inputs import Arguments
from esper.growth.links import SLOT_KEY, unwrap_optimizer
from esper.growth.model import GrowingModel
from esper.growth.persist import KEY, GrowthInStateDict
from esper.integrations import MeanLoss, step_grower
from esper.ladders.plan import make_plan
from esper.ladders.training import Evaluate as EvaluateRung
from esper.ladders.training import LadderTraining

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import BaseFinetuning
    from lightning.pytorch.plugins import MixedPrecision
    from torchmetrics import Metric, MetricCollection
except ModuleNotFoundError as error:
    raise ConfigError(describe_missing("lightning", "esper.integrations.lightning", error.name)) from error

_log = logging.getLogger(__name__)
_LOGGING = ("log", "log_dict")
_ORDER = "esper.ladder.parameters"
"""Key of a checkpoint: names of the optimizer's parameters, by group."""


class LightningGrower(Callback):
    """Grows a `GrowingModel` inside a LightningModule.

    ```python
    class Classifier(LightningModule):
        def __init__(self):
            super().__init__()
            self.model = esper.attach(net, {"layer2": "auto"}, example_input=images[:2])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.model.parameter_groups(lr=1e-3))


    trainer = Trainer(callbacks=[LightningGrower(evaluate=validate, controller="heuristic", horizon=30)], max_epochs=30)
    ```

    It decides after the last minibatch of each epoch, before validation and checkpoints, or every ``every_n_steps``
    optimizer steps, and logs the decision through the module. Checkpoints include the grown model and the grower's
    state; to resume, call ``trainer.fit(module, ckpt_path=...)`` with a new module and callback made in the same way.
    When ``fit`` ends, after the last checkpoint, `Grower.finish` decides on unfinished seeds.

    With `esper.Refit`, ``training_step`` is called once more per minibatch for each seed on probation, without logging.
    Weight averages of callbacks such as ``EMAWeightAveraging`` grow with the model; they must come after this one.

    Args:
        evaluate: As in `Grower`.
        every_n_steps: Optimizer steps from one decision to the next; None: one decision per epoch.
        options: Arguments of `Grower`, except ``loss`` and ``scaler``. Training stops at a plateau of ``growth``.
    """

    @check_arguments(ConfigError)
    def __init__(self, evaluate: Evaluate, *, every_n_steps: PositiveInt | None = None, **options: Any) -> None:
        super().__init__()
        self.grower: Grower | None = None
        """None before training begins."""
        self._evaluate, self._every, self._options = evaluate, every_n_steps, options
        self._losses = MeanLoss()
        self._carriers: dict[GrowingModel, GrowthInStateDict] = {}
        self._step = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Add growth to the model's state dict, before a checkpoint is loaded."""
        model = _find_model(pl_module)
        if model not in self._carriers:
            self._carriers[model] = GrowthInStateDict(model)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Update the groups in the states of finetuning callbacks, which have the parameters of their first epoch."""
        model = _find_model(pl_module)
        names = {parameter: name for name, parameter in pl_module.named_parameters()}
        for callback in cast("list[Callback]", cast(Any, trainer).callbacks):
            if not isinstance(callback, BaseFinetuning):
                continue
            state = checkpoint["callbacks"].get(callback.state_key, {})
            for group in chain.from_iterable(state.get("internal_optimizer_metadata", {}).values()):
                if SLOT_KEY in group:
                    seed = model.seeds.get(group[SLOT_KEY])
                    group["params"] = [] if seed is None else [names[parameter] for parameter in seed.parameters()]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the grower: optimizers exist by now, and a checkpoint has been loaded."""
        model = _find_model(pl_module)
        # The optimizer that has groups for slots; the grower refuses another.
        optimizers = trainer.optimizers
        owners = (one for one in optimizers if any(SLOT_KEY in group for group in one.param_groups))
        optimizer = unwrap_optimizer(next(owners, optimizers[0]))
        self._step = trainer.global_step
        _mirror_averages(trainer, model)
        # A further `fit` goes on with the grower if model and optimizer are still the same.
        if self.grower is not None and self.grower.model is model and self.grower.optimizer is optimizer:
            return
        training_step = pl_module.training_step

        def loss(*minibatch: Any) -> Tensor:
            with mute(pl_module):
                return _get_loss(training_step(*minibatch))

        plugin = trainer.precision_plugin
        scaler = plugin.scaler if isinstance(plugin, MixedPrecision) else None
        scaler = scaler if isinstance(scaler, torch.amp.GradScaler) else None
        self.grower = Grower(model, optimizer, evaluate=self._evaluate, loss=loss, scaler=scaler, **self._options)
        # A checkpoint that was loaded before is applied to them now.
        self._carriers[model].add_part("grower", self.grower)
        self._carriers[model].add_part("losses", self._losses)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wrap ``training_step`` for the epoch, so that forks learn from every minibatch."""
        grower, original = self.grower, pl_module.training_step
        if grower is None or not grower.needs_isolated_backward:
            return

        @wraps(original)
        def training_step(*minibatch: Any) -> Any:
            outputs = original(*minibatch)
            grower.isolated_backward(_get_loss(outputs), *minibatch)
            return outputs

        pl_module.training_step = training_step

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore ``training_step``."""
        vars(pl_module).pop("training_step", None)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Decide on unfinished seeds, also if ``fit`` resumed from its end and had nothing left to train."""
        if self.grower is None:
            self.on_train_start(trainer, pl_module)
        assert self.grower is not None
        _log.info("%s", self.grower.finish())

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore ``training_step``."""
        self.on_train_epoch_end(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add the loss to the mean, and take a decision if one is due."""
        # Lightning divides losses by the number of minibatches whose gradients it accumulates.
        self._losses.add(_get_loss(outputs).detach().float() * trainer.accumulate_grad_batches)
        stepped, self._step = trainer.global_step != self._step, trainer.global_step
        due = trainer.is_last_batch if self._every is None else stepped and trainer.global_step % self._every == 0
        if not due or self.grower is None:
            return
        log_metrics = partial(pl_module.log_dict, rank_zero_only=True)
        trainer.should_stop |= step_grower(self.grower, self._losses, log_metrics, _log)


class LightningLadder(Callback):
    """Trains models of several sizes in one training of a LightningModule, like `esper.ladder`.

    ```python
    class Language(LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Decoder(blocks=1)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)


    ladder = LightningLadder(tokens[:8], depths=[1, 2, 4], steps=1000, folder="sizes")
    Trainer(callbacks=[ladder], max_epochs=-1).fit(Language(), loader)
    ```

    Network and optimizer grow in place. The callback sets the learning rates, at most those of the optimizer, and ends
    ``fit`` when the last rung is saved. To resume from any checkpoint of Lightning's, make all objects in the same way,
    keep ``folder``, and call ``trainer.fit(module, loader, ckpt_path=...)``.

    Args:
        example_input: Arguments of the network, of the size of a minibatch.
        folder: As in `esper.ladder`.
        network: Name of the module's attribute with the network of the first size.
        evaluate: As in `esper.ladder`; called with the network.
        options: Further arguments of `esper.ladder`, such as ``steps`` and ``depths``.
    """

    @check_arguments(ConfigError, folder="give the path of a folder")
    def __init__(
        self,
        example_input: Arguments,
        *,
        folder: FilePath,
        network: Name = "model",
        evaluate: EvaluateRung | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.training: LadderTraining | None = None
        """The ladder after `setup`; its ``result`` has the rungs."""
        self._example, self._folder, self._network = example_input, Path(folder), network
        self._evaluate, self._options = evaluate, options
        self._counting = ExitStack()
        self._step = 0
        self._saved_order: list[list[str]] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Plan the ladder, before a checkpoint is loaded."""
        if stage != "fit" or self.training is not None:
            return
        try:
            network = pl_module.get_submodule(self._network)
        except AttributeError as error:
            raise ConfigError(
                f"{type(pl_module).__name__} has no module {self._network!r}: name the attribute with the network, as "
                "in LightningLadder(..., network='net')"
            ) from error
        plan = make_plan(network, self._example, float(trainer.accumulate_grad_batches), **self._options)
        rungs = len(plan.rungs)
        self.training = LadderTraining(network, plan, self._example, self._folder, self._evaluate, keep=rungs)
        # A checkpoint of another size is loaded into a network of that size.
        self.training.follow_loading()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the plan; the optimizer exists by now, and a checkpoint has been loaded."""
        training = self._get_training()
        if len(trainer.optimizers) != 1:
            raise ConfigError(f"the module has {len(trainer.optimizers)} optimizers: a ladder needs exactly one")
        training.link(trainer.optimizers[0])
        # Lightning restores an optimizer's state by the order of its parameters.
        if self._saved_order not in (None, _list_parameters(trainer, pl_module)):
            raise CheckpointError(
                "the optimizer has the model's parameters in another order than in the checkpoint, so it would resume "
                "with wrong state: make it in configure_optimizers from self.parameters(), or from groups in that order"
            )
        training.start()
        training.resume_at(trainer.global_step)
        self._step = trainer.global_step
        self._counting.enter_context(training.spent.counting())

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Set the learning rates of the step."""
        self._get_training().begin_step()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the step, if the optimizer made one: a rung may branch off, or be finished."""
        training = self._get_training()
        if trainer.global_step != self._step and not training.finished:
            self._step = trainer.global_step
            training.end_step()
            trainer.should_stop |= training.finished

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Record what was spent up to a checkpoint, and the order of the optimizer's parameters."""
        training = self._get_training()
        training.folder.record_spent(trainer.global_step, training.spent.flops)
        checkpoint[_ORDER] = _list_parameters(trainer, pl_module)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the order of the optimizer's parameters."""
        self._saved_order = checkpoint.get(_ORDER)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop counting."""
        self._counting.close()
        training = self._get_training()
        if not training.finished:
            _log.warning("training ended before the ladder did: %s", training.describe_phase())

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop counting."""
        self._counting.close()

    def _get_training(self) -> LadderTraining:
        assert self.training is not None, "setup has made it"
        return self.training


def _list_parameters(trainer: Trainer, module: LightningModule) -> list[list[str]]:
    names = {parameter: name for name, parameter in module.named_parameters()}
    return [[names.get(each, "") for each in group["params"]] for group in trainer.optimizers[0].param_groups]


def _find_model(module: LightningModule) -> GrowingModel:
    growing = [part for part in module.modules() if isinstance(part, GrowingModel)]
    if len(growing) != 1:
        raise ConfigError(
            f"{type(module).__name__} holds {len(growing)} growing models, but LightningGrower needs exactly one: "
            "make it in __init__ with esper.attach"
        )
    return growing[0]


def _mirror_averages(trainer: Trainer, model: GrowingModel) -> None:
    """Grow the averages that other callbacks keep with ``model``, and refuse other copies."""
    callbacks: list[Callback] = cast(Any, trainer).callbacks
    attributes = [(callback, value) for callback in callbacks for value in vars(callback).values()]
    for callback, average in attributes:
        # Only modules that hold another growing model than this one are copies.
        if not isinstance(average, nn.Module) or all(
            part is model for part in average.modules() if isinstance(part, GrowingModel)
        ):
            continue
        if not isinstance(average, AveragedModel):
            raise ConfigError(
                f"{type(callback).__name__} keeps a copy of the model that does not grow with it: use "
                "EMAWeightAveraging or WeightAveraging, or remove the callback and average the finished model"
            )
        if not any(name.endswith(KEY) for name in average.state_dict()):
            raise ConfigError(
                f"{type(callback).__name__} comes before LightningGrower in the trainer's callbacks, so its "
                "checkpoints would lack the seeds: put LightningGrower first"
            )
        model.mirror(average)


def _get_loss(outputs: Tensor | Mapping[str, Any] | None) -> Tensor:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if not isinstance(loss, Tensor):
        raise ConfigError("training_step returned no loss: LightningGrower needs Lightning's automatic optimization")
    return loss


@contextmanager
def mute(module: LightningModule) -> Generator[None]:
    """Keep ``module`` from logging, and its metrics from changing."""

    def log_nothing(*_: Any, **__: Any) -> None:
        pass

    metrics = [
        (owner, name, child)
        for owner in module.modules()
        if not isinstance(owner, Metric | MetricCollection)
        for name, child in owner.named_children()
        if isinstance(child, Metric | MetricCollection)
    ]
    own = {name: vars(module)[name] for name in _LOGGING if name in vars(module)}
    for owner, name, metric in metrics:
        setattr(owner, name, metric.clone())
    vars(module).update(dict.fromkeys(_LOGGING, log_nothing))
    try:
        yield
    finally:
        for name in _LOGGING:
            del vars(module)[name]
        vars(module).update(own)
        for owner, name, metric in metrics:
            setattr(owner, name, metric)
