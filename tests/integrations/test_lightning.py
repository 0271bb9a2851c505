"""Growth under Lightning's Trainer."""

import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.engine.engine import GrowthConfig
from esper.errors import CheckpointError, ConfigError, SlotError
from esper.growth.persist import GrowthInStateDict, describe_structure
from esper.lifecycle.table import Stage
from factories import HELD, make_data, make_growing, make_host, remembered, validate
from ladders.small import WIDTH, Decoder, compute_loss, evaluate, tokens

lightning = pytest.importorskip("lightning.pytorch")
torchmetrics = pytest.importorskip("torchmetrics")
from esper.integrations.lightning import LightningGrower, LightningLadder  # noqa: E402

pytestmark = [pytest.mark.landing, pytest.mark.filterwarnings("ignore")]

EPOCHS = 4


class Classifier(lightning.LightningModule):
    """A growing model with an optimizer and a scheduler."""

    def __init__(self, *, slots: bool = True, groups: bool = True, frozen: bool = False, seed: int = 0) -> None:
        super().__init__()
        self.model = make_growing(seed, frozen=frozen) if slots else make_host(seed)
        self._groups = groups

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        groups = self.model.parameter_groups(lr=1e-2) if self._groups else self.model.parameters()
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=1000)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def callback(
    kind: type[LightningGrower] = LightningGrower, evaluate: Any = validate, **options: Any
) -> LightningGrower:
    return kind(evaluate, **{"controller": "all_at_start", "horizon": 2 * EPOCHS, **options})


def make_trainer(epochs: int, *callbacks: Any, **options: Any) -> Any:
    settings = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(max_epochs=epochs, callbacks=list(callbacks), **{**settings, **options})


def fit(
    folder: Path,
    module: Any,
    growth: LightningGrower,
    epochs: int = 2 * EPOCHS,
    resume: Path | None = None,
    others: Sequence[Any] = (),
    **options: Any,
) -> Any:
    """Two minibatches per epoch."""
    checkpoint = lightning.callbacks.ModelCheckpoint(dirpath=folder, filename="last", enable_version_counter=False)
    logger = lightning.loggers.CSVLogger(folder)
    settings = {"gradient_clip_val": 1.0, "logger": logger, "log_every_n_steps": 1, **options}
    trainer = make_trainer(epochs, growth, *others, checkpoint, **settings)
    trainer.fit(module, minibatches(), ckpt_path=resume)
    return trainer


def minibatches() -> DataLoader[Any]:
    return DataLoader(TensorDataset(*make_data()), batch_size=48)


def assert_equal(module: nn.Module, other: nn.Module) -> None:
    for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_resumed_fit_equals_one_that_was_never_cut(tmp_path: Path, frozen: bool):
    whole, growth = Classifier(frozen=frozen), callback()
    trainer = fit(tmp_path / "whole", whole, growth)
    fit(tmp_path / "half", Classifier(frozen=frozen), callback(), EPOCHS)
    resumed, late = Classifier(frozen=frozen, seed=0 if frozen else 5), callback()
    again = fit(tmp_path / "half", resumed, late, resume=tmp_path / "half" / "last.ckpt")

    assert describe_structure(resumed.model) == describe_structure(whole.model) != {}
    assert late.grower.decisions == growth.grower.decisions == 2 * EPOCHS
    assert torch.equal(remembered(late.grower), remembered(growth.grower))
    assert_equal(resumed, whole)
    assert again.optimizers[0].param_groups[-1]["lr"] == trainer.optimizers[0].param_groups[0]["lr"]
    if frozen:
        points, untouched = make_data(16, seed=1)[0], make_host(0)
        with whole.model.without_growth():
            assert torch.equal(whole.model.eval()(points), untouched(points))
        assert not torch.equal(whole.model(points), untouched(points))
        assert torch.equal(whole.model.finalize()(points), whole.model(points))


class Endless(LightningGrower):
    """Leaves what is unfinished as it is."""

    def on_fit_end(self, *_: Any) -> None:
        pass


def test_what_is_unfinished_is_decided_on_at_the_end_and_a_resumed_fit_goes_on_from_before(tmp_path: Path):
    module, growth = Classifier(), callback(horizon=20)
    fit(tmp_path / "stopped", module, growth, EPOCHS)
    assert set(growth.grower.network.table.stage[0].tolist()) <= {Stage.FOSSILIZED, Stage.PRUNED}
    assert growth.grower.model.seeds
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = module.model.finalize()
    assert validate(plain) == pytest.approx(validate(module.model))

    whole, resumed = Classifier(), Classifier(seed=5)
    fit(tmp_path / "whole", whole, callback(horizon=20))
    fit(tmp_path / "stopped", resumed, callback(horizon=20), resume=tmp_path / "stopped" / "last.ckpt")
    assert_equal(resumed, whole)


def test_what_is_unfinished_is_decided_on_if_fit_resumes_from_the_end(tmp_path: Path):
    """As after a kill between the last checkpoint and the end of `fit`: Lightning trains nothing more."""
    whole, resumed, late = Classifier(), Classifier(seed=5), callback(horizon=20)
    fit(tmp_path, whole, callback(horizon=20), EPOCHS)
    trainer = fit(tmp_path / "again", resumed, late, EPOCHS, resume=tmp_path / "last.ckpt")
    assert trainer.global_step == 2 * EPOCHS
    assert set(late.grower.network.table.stage[0].tolist()) <= {Stage.FOSSILIZED, Stage.PRUNED}
    assert describe_structure(resumed.model) == describe_structure(whole.model) != {}
    assert_equal(resumed, whole)
    assert late.grower.decisions == EPOCHS


def test_a_grown_checkpoint_is_loaded_after_growth_is_in_the_state_dict_and_refused_before(tmp_path: Path):
    module = Classifier()
    fit(tmp_path, module, callback(), EPOCHS).save_checkpoint(tmp_path / "end.ckpt")
    assert module.model.seeds
    with pytest.raises(CheckpointError, match=r"first make LightningGrower, .*, or .*GrowthInStateDict\(model\)"):
        Classifier.load_from_checkpoint(tmp_path / "end.ckpt")
    again = Classifier(seed=5)
    GrowthInStateDict(again.model)
    again.load_state_dict(torch.load(tmp_path / "end.ckpt", weights_only=True)["state_dict"])
    assert_equal(again, module)
    points = make_data(16, seed=1)[0]
    assert torch.equal(again.model.finalize()(points), module.model.finalize()(points))


def test_decisions_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    module = Classifier()
    trainer = fit(tmp_path, module, callback(Endless), EPOCHS)
    assert trainer.logged_metrics["growth/live"] + trainer.logged_metrics["growth/fossils"] == len(module.model.seeds)
    assert trainer.logged_metrics["growth/added_parameters"] > 0
    assert "growth/contribution/0" in trainer.logged_metrics
    assert trainer.logged_metrics["growth/loss"] > 0
    assert 0 <= trainer.logged_metrics["growth/score"] <= 1
    assert "growth/op" in (next(tmp_path.rglob("metrics.csv"))).read_text()
    lines = [record for record in caplog.records if record.name.startswith("esper.integrations")]
    assert [record.name for record in lines] == ["esper.integrations.lightning"] * EPOCHS


class Clipping(Classifier):
    """Remembers the norm of the host's gradient in the last minibatch, before it is clipped hard."""

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, **options: Any) -> None:
        gradients = [parameter.grad for parameter in self.model.host.parameters()]
        self.norm = float(torch.nn.utils.get_total_norm(gradients))
        self.clip_gradients(optimizer, gradient_clip_val, options["gradient_clip_algorithm"] or "norm")
        assert float(torch.nn.utils.get_total_norm(gradients)) < self.norm / 2


def test_the_grower_sees_gradients_before_they_are_clipped(tmp_path: Path):
    module, growth = Clipping(), callback()
    fit(tmp_path, module, growth, EPOCHS, gradient_clip_val=1e-3)
    assert growth.grower.engine.history.training.host_gradient == pytest.approx([module.norm])


class Measured(Classifier):
    """Logs its loss and counts what its metric took in."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = torchmetrics.MeanMetric()
        self.logged: list[float] = []
        self.seen: list[int] = []

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = super().training_step(batch, index)
        self.metric.update(loss)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.logged.append(float(self.trainer.callback_metrics["loss"]))
        self.seen.append(self.metric.update_count)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_forks_learn_without_a_line_of_the_users_and_nobody_else_notices(tmp_path: Path, accumulated: int):
    options: dict[str, Any] = {"accumulate_grad_batches": accumulated, "gradient_clip_val": None}
    modules: list[Measured] = []
    growths: list[LightningGrower] = []
    for name, measure in (("switched off", validate), ("refit", esper.Refit(validate))):
        modules.append(Measured())
        growths.append(callback(Endless, measure, rules=HELD))
        fit(tmp_path / name, modules[-1], growths[-1], 2 * EPOCHS, **options)
    bare, weighed = modules
    assert growths[1].grower.backend.forks.forks.keys() == set(weighed.model.slots)
    assert_equal(weighed, bare)
    assert weighed.logged == bare.logged
    assert weighed.seen == bare.seen

    fit(tmp_path / "half", Measured(), callback(Endless, esper.Refit(validate), rules=HELD), 2 * EPOCHS - 2, **options)
    resumed, late = Measured(), callback(Endless, esper.Refit(validate), rules=HELD)
    fit(tmp_path / "half", resumed, late, 2 * EPOCHS, tmp_path / "half" / "last.ckpt", **options)
    assert late.grower is not None
    assert torch.equal(remembered(late.grower), remembered(growths[1].grower))


def test_a_plateau_stops_the_trainer_and_decisions_come_every_so_many_steps(tmp_path: Path):
    growth = LightningGrower(lambda _: (0.5, 0.5), controller="none", growth=GrowthConfig(plateau=2))
    trainer = fit(tmp_path, Classifier(), growth, 2 * EPOCHS)
    assert growth.grower.finished
    assert trainer.current_epoch == growth.grower.decisions == 3
    growth = callback(every_n_steps=3)
    fit(tmp_path, Classifier(), growth, EPOCHS)
    assert growth.grower.decisions == EPOCHS * 2 // 3


class Validated(Classifier):
    """Monitors a loss that is best in the middle of training, and knows what had grown then."""

    def __init__(self, *, seed: int = 0, best: int = 3) -> None:
        super().__init__(seed=seed)
        self.best = best
        self.then: dict[int, tuple[Any, Tensor]] = {}

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.log("val_loss", float(abs(self.current_epoch - self.best)))
        self.then[self.current_epoch] = (describe_structure(self.model), self.model(batch[0]).clone())


def validated(*callbacks: Any, **options: Any) -> Validated:
    module, points = Validated(), DataLoader(TensorDataset(*make_data(16, seed=2)), batch_size=16)
    make_trainer(2 * EPOCHS, *callbacks, **options).fit(module, minibatches(), points)
    return module


def test_the_best_checkpoint_holds_what_had_grown_by_then(tmp_path: Path):
    kept = lightning.callbacks.ModelCheckpoint(dirpath=tmp_path, monitor="val_loss")
    module = validated(callback(), kept)
    planted, outputs = module.then[module.best]
    assert planted != describe_structure(module.model), "growth went on"
    again = Validated(seed=5)
    growth = callback()
    growth.setup(None, again, "fit")  # as a Trainer does before it loads
    again.load_state_dict(torch.load(kept.best_model_path, weights_only=True)["state_dict"])
    assert describe_structure(again.model) == planted
    assert torch.equal(again.eval().model(make_data(16, seed=2)[0]), outputs)


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_a_copy_that_cannot_grow_is_refused(tmp_path: Path, first: bool):
    both = [lightning.callbacks.StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=2), callback()]
    with pytest.raises(ConfigError, match="keeps a copy"):
        validated(*(both if first else both[::-1]), default_root_dir=tmp_path)


def test_what_cannot_grow_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="holds 0 growing models"):
        fit(tmp_path, Classifier(slots=False), callback(), 1)
    with pytest.raises(SlotError, match="no parameter group for slot"):
        fit(tmp_path, Classifier(groups=False), callback(), 1)
    with pytest.raises(ConfigError, match="every_n_steps is 0"):
        callback(every_n_steps=0)
    with pytest.raises(ConfigError, match=r"^EMAWeightAveraging comes before LightningGrower .*: put Lightning"):
        make_trainer(1, average(), callback()).fit(Classifier(), minibatches())


def average() -> Any:
    return lightning.callbacks.EMAWeightAveraging(decay=0.5)


def test_an_average_of_the_weights_grows_and_resumes_with_the_model(tmp_path: Path):
    whole, bare = Classifier(), Classifier()
    fit(tmp_path / "whole", whole, callback(), 2 * EPOCHS, others=[average()])
    fit(tmp_path / "bare", bare, callback(), 2 * EPOCHS)
    # Training is the same, what is left is the average.
    assert describe_structure(whole.model) == describe_structure(bare.model) != {}
    assert not all(torch.equal(*pair) for pair in zip(whole.parameters(), bare.parameters(), strict=True))

    fit(tmp_path / "half", Classifier(), callback(), EPOCHS, others=[average()])
    resumed = Classifier(seed=5)
    fit(tmp_path / "half", resumed, callback(), resume=tmp_path / "half" / "last.ckpt", others=[average()])
    assert_equal(resumed, whole)


class Finetuned(Classifier):
    """Its first layer is the backbone of a finetuning callback."""

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.backbone = self.model.host[0]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.model.parameter_groups(lr=1e-2), lr=1e-2)


class Unfreezing(lightning.callbacks.BaseFinetuning):
    """Freezes the backbone, and unfreezes it at an epoch, if any."""

    def __init__(self, epoch: int | None) -> None:
        super().__init__()
        self.epoch = epoch

    def freeze_before_training(self, pl_module: Finetuned) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Finetuned, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == self.epoch:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer)


FINETUNING = {
    "freezing": lambda: Unfreezing(None),
    "unfreezing_before": lambda: Unfreezing(2),
    "unfreezing_after": lambda: Unfreezing(EPOCHS + 1),
    "backbone": lambda: lightning.callbacks.BackboneFinetuning(EPOCHS + 1, verbose=False),
}


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("finetuning", FINETUNING.values(), ids=FINETUNING.keys())
def test_a_fit_with_a_finetuning_callback_resumes_with_live_seeds(finetuning: Any, first: bool, tmp_path: Path):
    def run(folder: str, module: Finetuned, epochs: int, resume: Path | None = None) -> tuple[LightningGrower, Any]:
        growth, other = callback(Endless), finetuning()
        checkpoint = lightning.callbacks.ModelCheckpoint(
            dirpath=tmp_path / folder, filename="last", enable_version_counter=False
        )
        both = [other, growth] if first else [growth, other]
        trainer = make_trainer(epochs, *both, checkpoint)
        trainer.fit(module, minibatches(), ckpt_path=resume)
        return growth, trainer

    whole = Finetuned()
    growth, trainer = run("whole", whole, 2 * EPOCHS)
    run("half", Finetuned(), EPOCHS)
    resumed = Finetuned(seed=5)
    run("half", resumed, EPOCHS + 1, tmp_path / "half" / "last.ckpt")
    again = Finetuned(seed=6)
    late, other = run("half", again, 2 * EPOCHS, tmp_path / "half" / "last.ckpt")

    assert growth.grower is not None
    assert late.grower.decisions == 2 * EPOCHS
    assert describe_structure(again.model) == describe_structure(whole.model) != {}
    groups, expected = other.optimizers[0].param_groups, trainer.optimizers[0].param_groups
    assert [len(group["params"]) for group in groups] == [len(group["params"]) for group in expected]
    if finetuning is not FINETUNING["unfreezing_before"]:  # Lightning unfreezes nothing again when it resumes
        assert_equal(again, whole)


class Language(lightning.LightningModule):
    """A decoder that becomes several."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Decoder(dropout=0)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return compute_loss(self.net, batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class End(lightning.Callback):
    """Ends the process after so many steps, if that is a number."""

    def __init__(self, last: int | None) -> None:
        self.last = last

    def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
        if trainer.global_step == self.last:
            raise RuntimeError("the end")


def climb(
    folder: Path,
    last: int | None = None,
    resume: Path | None = None,
    make_module: Callable[[], Any] = Language,
    **options: Any,
) -> tuple[Any, Any]:
    """A ladder, five minibatches an epoch, with a checkpoint after each epoch; Lightning resumes data at an epoch."""
    torch.manual_seed(0)
    ladder = LightningLadder(
        tokens(8), network="net", depths=[1, 2, 4], steps=20, folder=folder / "sizes", evaluate=evaluate
    )
    checkpoints = lightning.callbacks.ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=5, save_top_k=-1, enable_version_counter=False
    )
    trainer = make_trainer(-1, ladder, End(last), checkpoints, **options)
    trainer.fit(make_module(), DataLoader(TensorDataset(tokens(40)), batch_size=8), ckpt_path=resume)
    return ladder.training.result, trainer


def test_a_ladder_of_sizes_comes_from_one_fit_and_goes_on_from_any_checkpoint(tmp_path: Path) -> None:
    whole, trainer = climb(tmp_path / "whole", deterministic=True)
    assert [rung.depth for rung in whole.rungs] == [1, 2, 4]
    assert trainer.global_step == whole.plan.total_steps == 36
    assert [rung.flops for rung in whole.rungs] == pytest.approx([rung.flops for rung in whole.plan.rungs])
    accumulated, trainer = climb(tmp_path / "accumulated", accumulate_grad_batches=5)
    assert trainer.global_step == 36
    assert [rung.flops for rung in accumulated.rungs] == pytest.approx([rung.flops for rung in accumulated.plan.rungs])
    # After checkpoints in the first size and in the third.
    for last in (16, 33):
        folder = tmp_path / str(last)
        with pytest.raises(RuntimeError, match="the end"):
            climb(folder, last)
        found, trainer = climb(folder, None, folder / f"step={last // 5 * 5}.ckpt")
        assert trainer.global_step == 36
        assert [rung.depth for rung in found.rungs] == [1, 2, 4]
        assert [rung.flops for rung in found.rungs] == [rung.flops for rung in whole.rungs]
        assert [rung.loss for rung in found.rungs] == [rung.loss for rung in whole.rungs]


class BesideTheNetwork(Language):
    """Has parameters of the shape of those of the blocks, before and behind the network."""

    def __init__(self) -> None:
        super().__init__()
        network = self.net
        del self.net
        self.before, self.net, self.behind = nn.LayerNorm(WIDTH), network, nn.LayerNorm(WIDTH)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        own = [*self.before.parameters(), *self.behind.parameters()]
        return super().training_step(batch, index) + sum(((each - 0.3) ** 2).sum() for each in own)


class OwnOrder(BesideTheNetwork):
    """The head first, then the blocks."""

    def configure_optimizers(self) -> Any:
        parts = (self.behind, self.net.head, self.net.blocks, self.net.embed, self.before)
        return torch.optim.AdamW([each for part in parts for each in part.parameters()], lr=1e-2)


class Vectors(OwnOrder):
    """Two groups, of which one has vectors of one shape."""

    def configure_optimizers(self) -> Any:
        vectors = [each for each in self.parameters() if each.dim() == 1]
        matrices = [each for each in self.parameters() if each.dim() > 1]
        return torch.optim.AdamW([{"params": vectors}, {"params": matrices, "lr": 2e-2}], lr=1e-2)


@pytest.mark.parametrize("make_module", [BesideTheNetwork, OwnOrder, Vectors])
def test_a_resumed_ladder_gives_each_parameter_its_own_state(make_module: Callable[[], Any], tmp_path: Path) -> None:
    """For any order of parameters in the optimizer, which is made anew from the deeper network."""
    whole, _ = climb(tmp_path / "whole", make_module=make_module, deterministic=True)
    with pytest.raises(RuntimeError, match="the end"):
        climb(tmp_path / "cut", 33, make_module=make_module)
    found, _ = climb(tmp_path / "cut", None, tmp_path / "cut" / "step=30.ckpt", make_module)
    assert [rung.loss for rung in found.rungs] == [rung.loss for rung in whole.rungs]


def test_an_optimizer_in_another_order_than_its_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the end"):
        climb(tmp_path, 33)

    class Reversed(Language):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([*self.parameters()][::-1], lr=1e-2)

    with pytest.raises(CheckpointError, match="in another order than in the checkpoint"):
        climb(tmp_path, None, tmp_path / "step=30.ckpt", Reversed)


def test_a_module_without_the_network_or_with_several_optimizers_has_no_ladder(tmp_path: Path) -> None:
    class Several(Language):
        def configure_optimizers(self) -> Any:
            self.automatic_optimization = False
            return [torch.optim.SGD(self.parameters(), lr=1e-2) for _ in range(2)]

    def refuse(module: Any, message: str, **options: Any) -> None:
        ladder = LightningLadder(tokens(8), depths=[1, 2], steps=10, folder=tmp_path, **options)
        trainer = make_trainer(1, ladder)
        with pytest.raises(ConfigError, match=message):
            trainer.fit(module, DataLoader(TensorDataset(tokens(40)), batch_size=8))

    refuse(Language(), "has no module 'model'")
    refuse(Several(), "has 2 optimizers", network="net")
