"""Growth under Hugging Face's Trainer."""

import contextlib
import logging
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import esper
import tiny_transformers
from esper.engine.engine import GrowthConfig
from esper.errors import CheckpointError, ConfigError, DivergedError, SlotError
from esper.growth.persist import describe_structure
from esper.lifecycle.table import Stage
from factories import HELD, SLOTS_WITH_LOSS, WithLoss, make_data, remembered

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
from esper.integrations.transformers import TransformersGrower, TransformersLadder  # noqa: E402

pytestmark = pytest.mark.landing

EPOCHS = 4


def classifier(seed: int = 0, *, frozen: bool = False) -> esper.GrowingModel:
    inputs, labels = make_data(2)
    return esper.attach(WithLoss(seed), SLOTS_WITH_LOSS, {"inputs": inputs, "labels": labels}, freeze_host=frozen)


@torch.no_grad()
def validate(model: nn.Module) -> tuple[float, float]:
    model.eval()
    inputs, labels = make_data(64, seed=1)
    found = model(inputs=inputs, labels=labels)
    return float(found["loss"]), float((found["logits"].argmax(1) == labels).float().mean())


def examples() -> list[dict[str, Tensor]]:
    return [{"inputs": point, "labels": label} for point, label in zip(*make_data(), strict=True)]


def trainer_for(model: nn.Module, folder: Path, optimizer: Any = None, **arguments: Any) -> Any:
    """Two minibatches per epoch."""
    settings = transformers.TrainingArguments(
        str(folder),
        **{
            "num_train_epochs": 2 * EPOCHS,
            "per_device_train_batch_size": 48,
            "logging_steps": 1,
            "save_strategy": "epoch",
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            "lr_scheduler_type": "cosine",
            **arguments,
        },
    )
    return transformers.Trainer(
        model, settings, train_dataset=examples(), eval_dataset=examples()[:16], optimizers=(optimizer, None)
    )


def prepared(
    folder: Path, *, seed: int = 0, frozen: bool = False, every: int | None = None, **arguments: Any
) -> tuple[Any, TransformersGrower]:
    model = classifier(seed, frozen=frozen)
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=1e-2))
    trainer = trainer_for(model, folder, optimizer, **arguments)
    growth = TransformersGrower(
        trainer, validate, every_n_steps=every, controller="all_at_start", horizon=2 * EPOCHS, classes=3
    )
    trainer.add_callback(growth)
    return trainer, growth


def assert_equal(model: nn.Module, other: nn.Module) -> None:
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("logging_steps", "frozen"), [(1, False), (3, False), (1, True)])
def test_a_resumed_training_equals_one_that_was_never_cut(tmp_path: Path, logging_steps: int, frozen: bool):
    trainer, growth = prepared(tmp_path, frozen=frozen, logging_steps=logging_steps)
    trainer.train()
    resumed, late = prepared(tmp_path / "again", seed=0 if frozen else 5, frozen=frozen, logging_steps=logging_steps)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{2 * EPOCHS}"))

    assert describe_structure(late.grower.model) == describe_structure(growth.grower.model) != {}
    assert late.grower.decisions == growth.grower.decisions == 2 * EPOCHS
    assert torch.equal(remembered(late.grower), remembered(growth.grower))
    assert_equal(resumed.model, trainer.model)
    assert resumed.optimizer.param_groups[-1]["lr"] == trainer.optimizer.param_groups[0]["lr"]
    if frozen:
        model, untouched = growth.grower.model, WithLoss(0).eval()
        inputs, labels = make_data(16, seed=1)
        expected = untouched(inputs, labels)["logits"]
        with model.without_growth():
            assert torch.equal(model.eval()(inputs=inputs, labels=labels)["logits"], expected)
        logits = model(inputs=inputs, labels=labels)["logits"]
        assert not torch.equal(logits, expected)
        assert torch.equal(model.finalize()(inputs=inputs, labels=labels)["logits"], logits)


def test_a_trainer_without_the_callback_refuses_a_grown_checkpoint(tmp_path: Path):
    prepared(tmp_path)[0].train()
    model = classifier(5)
    before = [parameter.clone() for parameter in model.parameters()]
    trainer = trainer_for(model, tmp_path / "again", torch.optim.AdamW(model.parameter_groups(lr=1e-2)))
    with pytest.raises(CheckpointError, match="first make LightningGrower, TransformersGrower"):
        trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{2 * EPOCHS}"))
    assert all(map(torch.equal, model.parameters(), before))


class Spoil(transformers.TrainerCallback):
    """A weight is not a number from the fourth epoch on."""

    def __init__(self, model: esper.GrowingModel) -> None:
        self._weight = model.host.net[2].weight

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.epoch >= 3:
            self._weight.data.mul_(math.nan)


def test_training_that_blows_up_is_undone(tmp_path: Path):
    trainer, growth = prepared(tmp_path, num_train_epochs=20, lr_scheduler_type="constant", save_strategy="no")
    model = growth.grower.model
    trainer.callback_handler.callbacks.insert(0, Spoil(model))
    with contextlib.suppress(DivergedError):
        trainer.train()
    assert growth.grower.engine.governor.rollbacks
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    assert not any(seed.fossilized for seed in model.seeds.values())


class Endless(TransformersGrower):
    """Leaves what is unfinished as it is."""

    def on_train_end(self, *_: Any, **__: Any) -> None:
        pass


def test_what_is_unfinished_is_decided_on_at_the_end_and_a_resumed_training_goes_on_from_before(tmp_path: Path):
    trainer, growth = prepared(tmp_path / "stopped", num_train_epochs=EPOCHS, lr_scheduler_type="constant")
    trainer.train()
    assert set(growth.grower.network.table.stage[0].tolist()) <= {Stage.FOSSILIZED, Stage.PRUNED}
    assert growth.grower.model.seeds
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = trainer.model.finalize()
    assert validate(plain) == pytest.approx(validate(trainer.model))

    whole, _ = prepared(tmp_path / "whole", lr_scheduler_type="constant")
    whole.train()
    resumed, _ = prepared(tmp_path / "again", seed=5, lr_scheduler_type="constant")
    resumed.train(resume_from_checkpoint=str(tmp_path / "stopped" / f"checkpoint-{2 * EPOCHS}"))
    assert_equal(resumed.model, whole.model)


@pytest.mark.parametrize("logging_steps", [1, 3])
def test_a_plateau_stops_the_trainer(tmp_path: Path, logging_steps: int):
    model = classifier()
    trainer = trainer_for(
        model, tmp_path, torch.optim.AdamW(model.parameter_groups(lr=1e-2)), logging_steps=logging_steps
    )
    growth = TransformersGrower(
        trainer, lambda _: (0.5, 0.5), controller="none", classes=3, growth=GrowthConfig(plateau=2)
    )
    trainer.add_callback(growth)
    trainer.train()
    assert growth.grower.finished
    assert growth.grower.decisions == 3
    assert trainer.state.global_step == 6


def test_decisions_are_logged_and_see_the_mean_loss(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    trainer, growth = prepared(tmp_path, every=3, num_train_epochs=3)
    told: list[float] = []
    usual = growth.grower.step
    growth.grower.step = lambda *, train_loss: (told.append(train_loss), usual(train_loss=train_loss))[1]
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert told == pytest.approx([sum(losses[:3]) / 3, sum(losses[3:6]) / 3])
    logged = [entry for entry in trainer.state.log_history if "growth/op" in entry]
    assert [entry["step"] for entry in logged] == [3, 6]
    assert logged[-1]["growth/added_parameters"] > 0
    lines = {record.name for record in caplog.records if record.name.startswith("esper.integrations")}
    assert lines == {"esper.integrations.transformers"}


def gpt2_trainer(folder: Path, controller: str | None, seed: int = 0, **arguments: Any) -> Any:
    """Of a language model with tied weights, which has slots where a controller is given."""
    torch.manual_seed(seed)
    config = transformers.GPT2Config(vocab_size=17, n_positions=8, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.0)
    tokens = torch.randint(17, (16, 8), generator=torch.Generator().manual_seed(0))
    # Labels of unequal number per example: a mean over minibatches is then not the mean over tokens.
    labels = tokens.masked_fill(torch.arange(8) >= torch.arange(2, 10).repeat(2)[:, None], -100)
    network = transformers.GPT2LMHeadModel(config)
    model = esper.attach(network, {"transformer.h.0": ["mlp"]}, tokens[:2]) if controller else network
    groups = model.parameter_groups(lr=0.1) if controller else model.parameters()
    trainer = trainer_for(
        model,
        folder,
        torch.optim.SGD(groups, lr=0.1),
        **{"num_train_epochs": 1, "per_device_train_batch_size": 4, "save_strategy": "no", **arguments},
    )
    rows = [{"input_ids": row, "labels": wanted, "name": "dropped"} for row, wanted in zip(tokens, labels, strict=True)]
    trainer.train_dataset = trainer.eval_dataset = rows
    if controller:
        trainer.add_callback(
            TransformersGrower(trainer, lambda _: (1.0, 0.0), controller=controller, horizon=20, classes=17)
        )
    return trainer


def test_a_language_model_with_tied_weights_resumes(tmp_path: Path):
    settings = {"num_train_epochs": 4, "save_strategy": "epoch"}
    whole = gpt2_trainer(tmp_path / "whole", "all_at_start", **settings)
    whole.train()
    resumed = gpt2_trainer(tmp_path / "resumed", "all_at_start", seed=1, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-8"))
    assert describe_structure(resumed.model) == describe_structure(whole.model) != {}
    assert_equal(resumed.model, whole.model)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"activation_checkpointing": True},
        {"include_num_input_tokens_seen": True},
    ],
    ids=lambda arguments: next(iter(arguments), "default"),
)
def test_a_trainer_does_with_dormant_slots_what_it_does_with_the_host(tmp_path: Path, arguments: dict[str, Any]):
    trainers = [gpt2_trainer(tmp_path / str(grows), grows, **arguments) for grows in ("none", None)]
    growing, bare = trainers
    found: list[dict[str, float]] = []
    for trainer in trainers:
        transformers.set_seed(0)
        trainer.train()
        found.append(trainer.evaluate())
    assert found[0]["eval_loss"] == found[1]["eval_loss"]
    assert_equal(growing.model.host, bare.model)
    told = [trainer.predict(trainer.eval_dataset) for trainer in trainers]
    assert (told[0].predictions == told[1].predictions).all()
    assert (told[0].label_ids == told[1].label_ids).all()


@pytest.mark.parametrize("accumulated", [1, 2])
def test_forks_learn_without_a_line_of_the_users_and_nobody_else_notices(tmp_path: Path, accumulated: int):
    def begun(evaluate: Any, folder: Path, seed: int = 0) -> tuple[Any, TransformersGrower]:
        model = classifier(seed)
        trainer = trainer_for(
            model,
            folder,
            torch.optim.AdamW(model.parameter_groups(lr=1e-2)),
            gradient_accumulation_steps=accumulated,
            per_device_train_batch_size=24,
        )
        options: dict[str, Any] = {"controller": "all_at_start", "rules": HELD, "horizon": 2 * EPOCHS, "classes": 3}
        trainer.add_callback(growth := Endless(trainer, evaluate, **options))
        return trainer, growth

    bare, _ = begun(validate, tmp_path / "bare")
    bare.train()
    weighed, growth = begun(esper.Refit(validate), tmp_path / "weighed")
    weighed.train()
    assert growth.grower.backend.forks.forks.keys() == set(weighed.model.slots)
    assert_equal(weighed.model, bare.model)

    late, resumed = begun(esper.Refit(validate), tmp_path / "late", seed=5)
    steps = weighed.state.global_step // (2 * EPOCHS)
    late.train(resume_from_checkpoint=str(tmp_path / "weighed" / f"checkpoint-{steps * (2 * EPOCHS - 2)}"))
    assert torch.equal(remembered(resumed.grower), remembered(growth.grower))


def test_the_grower_sees_gradients_before_they_are_clipped_and_may_be_made_of_a_used_trainer(tmp_path: Path):
    clipped_to = 1e-3
    trainer, growth = prepared(tmp_path, num_train_epochs=1, max_grad_norm=clipped_to)
    trainer.train()
    logged = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    seen = growth.grower.engine.history.training.host_gradient
    assert seen == pytest.approx(logged[-1:])
    assert seen > clipped_to
    assert trainer.optimizer is not growth.grower.optimizer, "the trainer has wrapped it"
    again = TransformersGrower(trainer, validate, controller="none", horizon=2)
    assert again.grower.optimizer is growth.grower.optimizer


BEST = 3


class Then(transformers.TrainerCallback):
    """Remembers what had grown, and what the model returned, when each epoch was evaluated."""

    def __init__(self) -> None:
        self.epochs: dict[int, tuple[Any, Tensor]] = {}

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        inputs, labels = make_data(16, seed=2)
        logits = model.eval()(inputs=inputs, labels=labels)["logits"]
        self.epochs[round(state.epoch)] = (describe_structure(model), logits.detach().clone())


@pytest.mark.parametrize("stops_early", [False, True])
def test_the_best_model_is_loaded_with_what_had_grown_by_then(tmp_path: Path, stops_early: bool):
    trainer, growth = prepared(
        tmp_path,
        eval_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="distance",
        greater_is_better=False,
    )
    trainer.compute_metrics = lambda _: {"distance": abs(round(trainer.state.epoch) - BEST)}
    trainer.add_callback(then := Then())
    if stops_early:
        trainer.add_callback(transformers.EarlyStoppingCallback(early_stopping_patience=2))
    trainer.train()
    assert max(then.epochs) == (BEST + 2 if stops_early else 2 * EPOCHS)
    planted, logits = then.epochs[BEST]
    assert stops_early or then.epochs[2 * EPOCHS][0] != planted, "growth went on"
    inputs, labels = make_data(16, seed=2)
    assert torch.equal(trainer.model.eval()(inputs=inputs, labels=labels)["logits"], logits)
    assert set(describe_structure(trainer.model)) == set(planted)
    growth.grower.step(train_loss=1.0)


def test_what_cannot_grow_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="model is a WithLoss"):
        TransformersGrower(trainer_for(WithLoss(0), tmp_path), validate)
    model = classifier()
    with pytest.raises(ConfigError, match="optimizers="):
        TransformersGrower(trainer_for(model, tmp_path), validate)
    with pytest.raises(SlotError, match="no parameter group for slot"):
        TransformersGrower(trainer_for(model, tmp_path, torch.optim.AdamW(model.parameters())), validate, classes=3)


WORDS = torch.randint(11, (40, 6), generator=torch.Generator().manual_seed(1))


def climb(folder: Path, last: int | None = None, **settings: Any) -> Any:
    """The ladder of a GPT-2 with dropout; the process ends after the checkpoint of step ``last``, and begins again."""
    net = tiny_transformers.gpt2(n_layer=1, vocab_size=11)
    torch.manual_seed(0)
    net.apply(lambda module: module.reset_parameters() if isinstance(module, nn.Linear | nn.LayerNorm) else None)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.1)
    settings = {"lr_scheduler_type": "linear", "save_strategy": "steps", "save_steps": 7, **settings}
    trainer = trainer_for(net, folder / "out", **settings)
    trainer.train_dataset = [{"input_ids": word, "labels": word} for word in WORDS]

    @torch.no_grad()
    def validate_words(model: nn.Module) -> Tensor:
        return model(input_ids=WORDS, labels=WORDS).loss

    callback = TransformersLadder(trainer, depths=[1, 2, 4], steps=20, folder=folder / "sizes", evaluate=validate_words)
    trainer.add_callback(callback)

    class End(transformers.TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == last:
                raise KeyboardInterrupt

    trainer.add_callback(End())
    return trainer, callback


@pytest.fixture(scope="module")
def rungs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    trainer, callback = climb(tmp_path_factory.mktemp("whole"))
    trainer.train()
    return callback.training.result.rungs


def test_a_ladder_of_sizes_comes_from_one_trainer(rungs: Any) -> None:
    for rung, depth in zip(rungs, (1, 2, 4), strict=True):
        net = transformers.AutoModelForCausalLM.from_pretrained(rung.path).eval()
        assert net.config.n_layer == depth == rung.depth
        assert net(input_ids=WORDS, labels=WORDS).loss.item() == pytest.approx(rung.loss)


@pytest.mark.parametrize("last", [14, 35])
def test_a_ladder_goes_on_from_any_checkpoint_of_its_trainer(last: int, rungs: Any, tmp_path: Path) -> None:
    trainer, _ = climb(tmp_path, last)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer, callback = climb(tmp_path)
    trainer.train(resume_from_checkpoint=True)
    found = callback.training.result.rungs
    assert [(rung.depth, rung.loss) for rung in found] == [(rung.depth, rung.loss) for rung in rungs]
    assert [rung.flops for rung in found] == pytest.approx([rung.flops for rung in rungs])


def test_a_ladder_resumed_in_the_same_process_counts_each_step_once_and_loads_nothing_smaller(tmp_path: Path) -> None:
    """As in a notebook, after an interrupt."""
    trainer, callback = climb(tmp_path, 7)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.pop_callback(trainer.callback_handler.callbacks[-1])
    trainer.train(resume_from_checkpoint=True)
    result = callback.training.result
    assert [rung.flops for rung in result.rungs] == pytest.approx([rung.flops for rung in result.plan.rungs])
    with pytest.raises(
        CheckpointError, match="has 1 block, but the model has grown to 4: make model and callback anew"
    ):
        trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-7"))


def test_accumulated_gradients_are_in_the_plan_of_a_ladder(tmp_path: Path) -> None:
    trainer, callback = climb(tmp_path, gradient_accumulation_steps=2, per_device_train_batch_size=20)
    trainer.train()
    result = callback.training.result
    assert trainer.state.global_step == result.plan.total_steps == trainer.args.max_steps
    assert [rung.flops for rung in result.rungs] == pytest.approx([rung.flops for rung in result.plan.rungs])


def test_a_trainer_that_a_ladder_cannot_steer_is_refused(tmp_path: Path) -> None:
    def refuse(trainer: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            TransformersLadder(trainer, depths=[1, 2], steps=20, folder=tmp_path)

    trainer, _ = climb(tmp_path)
    refuse(trainer, "a schedule")
    trainer.lr_scheduler = None
    for name, value in {"lr_scheduler_type": "cosine", "warmup_steps": 5}.items():
        before = getattr(trainer.args, name)
        setattr(trainer.args, name, value)
        refuse(trainer, f"{name} is set, but a ladder sets the rates")
        setattr(trainer.args, name, before)
    refuse(trainer, "max_steps is 36, but the ladder takes 28")
    trainer.args.load_best_model_at_end = True
    refuse(trainer, "load_best_model_at_end")
    refuse(trainer_for(classifier(), tmp_path, lr_scheduler_type="linear"), "slots")
