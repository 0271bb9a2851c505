"""Loops in bfloat16, and loops that accumulate gradients: growth decides, measures and plants as in a plain one."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.control.rules import LookRule, LookSettings
from esper.engine.observation import Observation
from esper.growth.promise import PromiseSettings
from esper.lifecycle.rules import ActionMasks
from esper.lifecycle.table import BLENDED, make_stage_lookup
from factories import SLOTS_WITH_LOSS, WithLoss, make_data

lightning = pytest.importorskip("lightning.pytorch")
pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
from esper.integrations import lightning as in_lightning  # noqa: E402
from esper.integrations import transformers as in_transformers  # noqa: E402

pytestmark = pytest.mark.landing

EPOCHS, MINIBATCH, RATE = 8, 48, 1e-2
PROMISE = PromiseSettings(every=1, first=1, examples=MINIBATCH)
"""By the examples of one step, in however many parts it was computed."""


class Watching(LookRule):
    """The rule that looks, eager to plant and to keep, and all that it sees."""

    def __init__(self) -> None:
        super().__init__(LookSettings(promise=PROMISE, threshold=-1.0, probation=4, standard_errors=-10.0), EPOCHS)
        self.seen: list[Observation] = []

    def act(self, observation: Observation, masks: ActionMasks, state: None) -> Any:
        self.seen.append(observation)
        return super().act(observation, masks, state)


class Recording(esper.grower.callbacks.GrowerCallback):
    """What was decided, and what it was based on."""

    def __init__(self) -> None:
        self.records: list[tuple[esper.Decision, Any, Any]] = []

    def on_decision(self, grower: esper.Grower, decision: esper.Decision) -> None:
        self.records.append((decision, grower.engine.assessed, grower.engine.applied.stages))


@dataclass
class Training:
    """A model that grows under some trainer, and what was seen and decided."""

    dtype: torch.dtype
    bf16: bool = False
    parts: int = 1
    """In which gradients of a minibatch are accumulated."""
    controller: Watching = field(default_factory=Watching)
    recording: Recording = field(default_factory=Recording)

    def __post_init__(self) -> None:
        inputs, labels = self.data(2)
        self.model = esper.attach(WithLoss().to(self.dtype), SLOTS_WITH_LOSS, {"inputs": inputs, "labels": labels})
        self.optimizer = torch.optim.AdamW(self.model.parameter_groups(lr=RATE))

    def data(self, *arguments: int) -> tuple[Tensor, Tensor]:
        inputs, labels = make_data(*arguments)
        return inputs.to(self.dtype), labels

    @property
    def options(self) -> dict[str, Any]:
        return {"controller": self.controller, "horizon": EPOCHS, "callbacks": [self.recording], "classes": 3}

    @torch.no_grad()
    def validate(self, model: nn.Module) -> tuple[float, float]:
        model.eval()
        inputs, labels = self.data(64, 1)
        with torch.autocast("cpu", torch.bfloat16) if self.bf16 else nullcontext():
            found = model(inputs=inputs, labels=labels)
        return float(found["loss"]), float((found["logits"].argmax(1) == labels).float().mean())


def train_plainly(training: Training, _: Path) -> None:
    model, optimizer = training.model, training.optimizer
    grower = esper.Grower(model, optimizer, evaluate=training.validate, **training.options)
    inputs, labels = training.data()
    for _ in range(EPOCHS):
        model.train()
        total, size = 0.0, MINIBATCH // training.parts
        for number, (part, wanted) in enumerate(zip(inputs.split(size), labels.split(size), strict=True), start=1):
            with torch.autocast("cpu", torch.bfloat16) if training.bf16 else nullcontext():
                loss = model(inputs=part, labels=wanted)["loss"]
            (loss / training.parts).backward()
            total += loss.item() * len(part) / len(inputs)
            if number % training.parts == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        grower.step(train_loss=total)


class Module(lightning.LightningModule):
    def __init__(self, training: Training) -> None:
        super().__init__()
        self.model, self._optimizer = training.model, training.optimizer

    def training_step(self, minibatch: Sequence[Tensor], index: int) -> Tensor:
        return self.model(inputs=minibatch[0], labels=minibatch[1])["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._optimizer


class LightningCallback(in_lightning.LightningGrower):
    """Leaves what is unfinished as it is."""

    def on_fit_end(self, *_: Any) -> None:
        pass


def train_in_lightning(training: Training, folder: Path) -> None:
    growth = LightningCallback(training.validate, **training.options)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        precision="bf16-mixed" if training.bf16 else "64-true" if training.dtype is torch.float64 else "32-true",
        accumulate_grad_batches=training.parts,
        gradient_clip_val=1.0,
        default_root_dir=folder,
        logger=False,
        callbacks=[growth],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(TensorDataset(*training.data()), batch_size=MINIBATCH // training.parts)
    trainer.fit(Module(training), loader)


class HuggingFaceCallback(in_transformers.TransformersGrower):
    """Leaves what is unfinished as it is."""

    def on_train_end(self, *_: Any, **__: Any) -> None:
        pass


def train_in_hugging_faces_trainer(training: Training, folder: Path) -> None:
    arguments = transformers.TrainingArguments(
        str(folder),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=MINIBATCH // training.parts,
        gradient_accumulation_steps=training.parts,
        bf16=training.bf16,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    examples = [{"inputs": point, "labels": label} for point, label in zip(*training.data(), strict=True)]
    trainer = transformers.Trainer(
        training.model, arguments, train_dataset=examples, optimizers=(training.optimizer, None)
    )
    trainer.add_callback(HuggingFaceCallback(trainer, training.validate, **training.options))
    trainer.train()


Train = Callable[[Training, Path], None]
every_trainer = pytest.mark.parametrize(
    "train", [train_plainly, train_in_lightning, train_in_hugging_faces_trainer], ids=lambda train: train.__name__
)


def trained(train: Train, folder: Path, **options: Any) -> Training:
    training = Training(**options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(training, folder)
    assert len(training.recording.records) == EPOCHS
    assert training.model.seeds, "the test means to plant"
    return training


@every_trainer
def test_accumulated_gradients_decide_as_whole_minibatches(train: Train, tmp_path: Path) -> None:
    # In float64, so that what sums are rounded to decides nothing; norms of gradients are kept in float32.
    whole, parts = (trained(train, tmp_path, dtype=torch.float64, parts=parts) for parts in (1, 4))
    for (mine, my_figures, _), (theirs, figures, _) in zip(
        parts.recording.records, whole.recording.records, strict=True
    ):
        assert mine.what == theirs.what
        np.testing.assert_allclose(my_figures.training.loss, figures.training.loss, rtol=0, atol=1e-5)
        contributions = my_figures.evaluation.accuracy_contribution, figures.evaluation.accuracy_contribution
        np.testing.assert_allclose(*contributions, atol=1e-9)
    # That is training, gradient health, promises and all else that a controller may see.
    for mine, theirs in zip(parts.controller.seen, whole.controller.seen, strict=True):
        torch.testing.assert_close(tuple(mine), tuple(theirs), rtol=0, atol=1e-4)
    assert len({decision.what for decision, *_ in whole.recording.records}) > 1


@every_trainer
@pytest.mark.parametrize("parts", [1, 4])
def test_bfloat16_grows_as_float32_but_for_rounding(train: Train, parts: int, tmp_path: Path) -> None:
    exact, rounded = (trained(train, tmp_path, dtype=torch.float32, parts=parts, bf16=bf16) for bf16 in (False, True))
    first = rounded.model
    assert {parameter.dtype for parameter in first.parameters()} == {torch.float32}
    assert {value.dtype for seed in first.seeds.values() for value in seed.state_dict().values()} == {torch.float32}
    assert not any(torch.equal(p, p.bfloat16().float()) for p in first.parameters() if p.numel() > 8)
    # As long as both have decided the same, what controllers see differs by rounding.
    for number, (mine, theirs) in enumerate(zip(rounded.controller.seen, exact.controller.seen, strict=True)):
        for tensor in mine:
            assert bool(torch.isfinite(tensor.float()).all())
        if number == 0 or _decided(rounded, number) == _decided(exact, number):
            torch.testing.assert_close(tuple(mine), tuple(theirs), rtol=0, atol=0.2)
    for decision, figures, stages in rounded.recording.records:
        assert np.isfinite(figures.evaluation.accuracy_contribution[make_stage_lookup(BLENDED)[stages]]).all()
        assert decision.rollback is None


def _decided(training: Training, number: int) -> list[str]:
    return [decision.what for decision, *_ in training.recording.records[:number]]
