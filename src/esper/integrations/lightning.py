"""Growth under Lightning's Trainer (extra ``lightning``)."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from esper.config.arguments import PositiveInt, check_arguments
from esper.errors import ConfigError
from esper.extras import describe_missing
from esper.grower import Grower
from esper.grower.evaluation import Evaluate
from esper.grower.state_dict import KEY, GrowthInStateDict
from esper.growth.followers import SLOT_KEY
from esper.growth.model import GrowingModel
from esper.integrations.trainer_callback import MeanLoss, decide, finish

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.plugins import MixedPrecision
    from torchmetrics import Metric, MetricCollection
except ModuleNotFoundError as error:
    raise ConfigError(describe_missing("lightning", "esper.integrations.lightning", error.name)) from error

_log = logging.getLogger(__name__)


class GrowerCallback(Callback):
    """Lets a `GrowingModel` inside a LightningModule grow.

    ```python
    class Classifier(LightningModule):
        def __init__(self):
            super().__init__()
            self.model = esper.attach(net, {"layer2": "auto"}, example_input=images[:2])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.model.parameter_groups(lr=1e-3))


    trainer = Trainer(callbacks=[GrowerCallback(evaluate=validate, controller="heuristic", horizon=30)], max_epochs=30)
    ```

    It decides after the last minibatch of an epoch, before validation and checkpoints, or every so many optimizer
    steps, and logs what it decided through the module. Checkpoints hold what has grown and all that the grower
    remembers: ``trainer.fit(module, ckpt_path=...)`` with a module and a callback made in the same way goes on there.

    When ``fit`` ends, early or not, `Grower.finish` judges what is unfinished, and the model is ready for
    `GrowingModel.finalize`. Checkpoints were written before that, so training that goes on from one, with more epochs
    perhaps, is not cut short by it.

    While seeds learn in isolation ``shadow``, ``training_step`` is called twice per minibatch, and once more for each
    seed on trial under evidence ``refit``; only what it logs the first time is kept, and metrics of the module forget
    what they saw later.

    Args:
        evaluate: As in `Grower`.
        every_n_steps: Optimizer steps from one decision to the next; None: one decision per epoch.
        options: Arguments of `Grower`: ``controller``, ``horizon``, ``classes``, ``conduct``, ... but for ``loss`` and
            ``scaler``. Where the conduct has a plateau, training stops there.

    Averages of weights that Lightning's callbacks keep (``EMAWeightAveraging``, ...) grow as the model does; name such
    a callback after this one.

    Raises:
        ConfigError: in `setup`, if the module does not hold exactly one `GrowingModel`; when training begins, if an
            average comes before it, or another callback keeps a copy of the module that cannot grow.
        SlotError: when training begins, if no optimizer was made from its `parameter_groups`.
    """

    @check_arguments(ConfigError)
    def __init__(self, evaluate: Evaluate, *, every_n_steps: PositiveInt | None = None, **options: Any) -> None:
        super().__init__()
        self.grower: Grower | None = None
        """From the beginning of training on."""
        self._evaluate, self._every, self._options = evaluate, every_n_steps, options
        self._losses = MeanLoss()
        self._carriers: dict[GrowingModel, GrowthInStateDict] = {}
        self._step = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Before a checkpoint is loaded: have the model's state dict carry growth."""
        model = _find_model(pl_module)
        if model not in self._carriers:
            self._carriers[model] = GrowthInStateDict(model)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Optimizers are there, and whatever a checkpoint held has been loaded."""
        model = _find_model(pl_module)
        optimizer = _optimizer(trainer)
        self._step = trainer.global_step
        _mirror_averages(trainer, model)
        if self.grower is not None and self.grower.model is model and self.grower.optimizer is optimizer:
            return
        training_step = pl_module.training_step

        def loss(*minibatch: Any) -> Tensor:
            with mute(pl_module):
                return _loss(training_step(*minibatch))

        self.grower = Grower(
            model, optimizer, evaluate=self._evaluate, loss=loss, scaler=_scaler(trainer), **self._options
        )
        self._carriers[model].add_part("grower", self.grower)
        self._carriers[model].add_part("losses", self._losses)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let isolated seeds and forks learn from every minibatch of the epoch."""
        grower, usual = self.grower, pl_module.training_step
        if grower is None or not grower.needs_isolated_backward:
            return

        @wraps(usual)
        def training_step(*minibatch: Any) -> Any:
            outputs = usual(*minibatch)
            grower.isolated_backward(_loss(outputs), *minibatch)
            return outputs

        pl_module.training_step = training_step

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the module as it was."""
        vars(pl_module).pop("training_step", None)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Judge what is unfinished; all checkpoints are written by now, and hold it as it was."""
        if self.grower is not None:
            finish(self.grower, _log)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the module as it was."""
        vars(pl_module).pop("training_step", None)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take in the loss, and decide if it is time to."""
        # Lightning divides losses by the number of minibatches whose gradients it accumulates.
        self._losses.add(_loss(outputs).detach().float() * trainer.accumulate_grad_batches)
        stepped, self._step = trainer.global_step != self._step, trainer.global_step
        due = trainer.is_last_batch if self._every is None else stepped and trainer.global_step % self._every == 0
        if not due or self.grower is None:
            return
        log_figures = partial(pl_module.log_dict, rank_zero_only=True)
        trainer.should_stop |= decide(self.grower, self._losses, log_figures, _log)


def _find_model(module: LightningModule) -> GrowingModel:
    growing = [part for part in module.modules() if isinstance(part, GrowingModel)]
    if len(growing) != 1:
        raise ConfigError(
            f"{type(module).__name__} holds {len(growing)} growing models, but GrowerCallback needs exactly one: "
            "make it in __init__ with esper.attach"
        )
    return growing[0]


def _mirror_averages(trainer: Trainer, model: GrowingModel) -> None:
    """Let the averages that other callbacks keep grow as ``model`` does, and refuse other copies of it."""
    callbacks: list[Callback] = cast(Any, trainer).callbacks
    kept = [(callback, held) for callback in callbacks for held in vars(callback).values()]
    for callback, average in kept:
        if not isinstance(average, nn.Module) or all(
            part is model for part in average.modules() if isinstance(part, GrowingModel)
        ):
            continue
        if not isinstance(average, AveragedModel):
            raise ConfigError(
                f"{type(callback).__name__} keeps a copy of the model, which would not grow with it: leave that "
                "callback out, and average a model that has grown, or take EMAWeightAveraging or WeightAveraging"
            )
        if not any(name.endswith(KEY) for name in average.state_dict()):
            raise ConfigError(
                f"{type(callback).__name__} comes before GrowerCallback among the trainer's callbacks, so its "
                "checkpoints would not say what grew: name GrowerCallback first"
            )
        model.mirror(average)


def _optimizer(trainer: Trainer) -> Optimizer:
    """The one that has groups for slots; `Grower` refuses another."""
    able = [one for one in trainer.optimizers if any(SLOT_KEY in group for group in one.param_groups)]
    return (able or trainer.optimizers)[0]


def _loss(outputs: Tensor | Mapping[str, Any] | None) -> Tensor:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if not isinstance(loss, Tensor):
        raise ConfigError("training_step returned no loss: GrowerCallback needs Lightning's automatic optimization")
    return loss


def _scaler(trainer: Trainer) -> torch.amp.GradScaler | None:
    plugin = trainer.precision_plugin
    scaler = plugin.scaler if isinstance(plugin, MixedPrecision) else None
    return scaler if isinstance(scaler, torch.amp.GradScaler) else None


@contextmanager
def mute(module: LightningModule) -> Generator[None]:
    """Within the block what ``module`` logs is dropped, and what its metrics take in is forgotten."""
    metrics = list(_metrics(module))
    for owner, name, metric in metrics:
        setattr(owner, name, metric.clone())
    methods = {name: method for name, method in vars(module).items() if name in _LOGGING}
    for name in _LOGGING:
        setattr(module, name, _drop)
    try:
        yield
    finally:
        for name in _LOGGING:
            delattr(module, name)
        vars(module).update(methods)
        for owner, name, metric in metrics:
            setattr(owner, name, metric)


_LOGGING = ("log", "log_dict")


def _drop(*_: Any, **__: Any) -> None:
    pass


def _metrics(module: nn.Module) -> Iterator[tuple[nn.Module, str, Metric | MetricCollection]]:
    """Every metric within ``module``, with its owner and its name there."""
    for name, child in module.named_children():
        if isinstance(child, Metric | MetricCollection):
            yield module, name, child
        else:
            yield from _metrics(child)
