"""Every kind of model in other people's trainers: each step and decision is that of a plain loop."""

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from conformance.growth import DECISIONS, HORIZON, RATE, grown_model
from conformance.kind import Kind, Minibatch
from conformance.kinds import KINDS, right_or_a_sentence
from esper.growth.model import GrowingModel

lightning = pytest.importorskip("lightning.pytorch")
pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
from esper.integrations import lightning as in_lightning  # noqa: E402
from esper.integrations import transformers as in_transformers  # noqa: E402

pytestmark = pytest.mark.landing

MINIBATCHES = 2
"""Per epoch, as in a kind's own loop."""
FAST = {"mlp", "resnet", "encoder_with_padding", "vae", "accumulation", "tuple", "hf_bert", "hf_t5"}
"""Of the kinds, those that show what trainers might do to them: buffers, masks, random numbers, parts of a step."""


def in_turn(kinds: tuple[Kind, ...]) -> list[Any]:
    return [pytest.param(one, id=one.name, marks=() if one.name in FAST else pytest.mark.slow) for one in kinds]


def options() -> dict[str, Any]:
    return {"controller": "all_at_start", "horizon": HORIZON}


def compare(kind: Kind, model: GrowingModel) -> None:
    """With what the kind's own loop makes of it."""
    alone = grown_model(kind)
    assert set(model.seeds) == set(model.slots)
    for (name, mine), (other, theirs) in zip(model.named_parameters(), alone.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(mine, theirs), name


class Epochs(IterableDataset[Minibatch]):
    """A kind's minibatches, other ones in each epoch."""

    def __init__(self, kind: Kind) -> None:
        self._kind, self._epoch = kind, 0

    def __len__(self) -> int:
        return MINIBATCHES

    def __iter__(self) -> Iterator[Minibatch]:
        torch.manual_seed(self._epoch)
        minibatches = self._kind.minibatches(MINIBATCHES, seed=self._epoch)
        self._epoch += 1
        return iter(minibatches)


class Module(lightning.LightningModule):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind, self.model = kind, kind.attached()

    def training_step(self, minibatch: Minibatch, index: int) -> Tensor:
        return self.kind.loss_of(self.model, Minibatch(*minibatch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameter_groups(lr=RATE))


class LightningCallback(in_lightning.LightningGrower):
    """Leaves what is unfinished as it is, as the plain loop does."""

    def on_fit_end(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("kind", in_turn(KINDS))
@pytest.mark.filterwarnings("ignore")
def test_lightning_does_what_a_plain_loop_does(kind: Kind, tmp_path: Path) -> None:
    module = Module(kind)
    growth = LightningCallback(kind.validation(), **options())
    trainer = lightning.Trainer(
        max_epochs=DECISIONS,
        accelerator="cpu",
        accumulate_grad_batches=kind.accumulate,
        default_root_dir=tmp_path,
        logger=False,
        callbacks=[growth],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with right_or_a_sentence("lightning", kind):
        trainer.fit(module, DataLoader(Epochs(kind), batch_size=None))
    assert growth.grower.decisions == DECISIONS
    compare(kind, module.model)


class HuggingFaceTrainer(transformers.Trainer):
    """Of a kind's minibatches, as they are."""

    def __init__(self, kind: Kind, model: GrowingModel, folder: Path) -> None:
        optimizer = torch.optim.AdamW(model.parameter_groups(lr=RATE))
        arguments = transformers.TrainingArguments(
            str(folder),
            num_train_epochs=DECISIONS,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        super().__init__(
            model,
            arguments,
            compute_loss_func=lambda outputs, labels, **_: kind.loss(outputs, labels),
            optimizers=(optimizer, None),
        )
        self._kind = kind

    def get_train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Epochs(self._kind), batch_size=None, collate_fn=self._named)

    @staticmethod
    def _named(minibatch: Minibatch) -> dict[str, Any]:
        return {**minibatch.inputs, "labels": minibatch.target}


class HuggingFaceCallback(in_transformers.TransformersGrower):
    """Leaves what is unfinished as it is, as the plain loop does."""

    def on_train_end(self, *_: Any, **__: Any) -> None:
        pass


def by_keywords(kind: Kind) -> bool:
    """Whether a model is called as Hugging Face's Trainer calls it."""
    minibatch = kind.minibatches(1)[0]
    return isinstance(minibatch.inputs, Mapping) and minibatch.target is not None


@pytest.mark.parametrize("kind", in_turn(tuple(kind for kind in KINDS if by_keywords(kind))))
def test_hugging_faces_trainer_does_what_a_plain_loop_does(kind: Kind, tmp_path: Path) -> None:
    model = kind.attached()
    trainer = HuggingFaceTrainer(kind, model, tmp_path)
    growth = HuggingFaceCallback(trainer, kind.validation(), **options())
    trainer.add_callback(growth)
    with right_or_a_sentence("hf_trainer", kind), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    assert growth.grower.decisions == DECISIONS
    compare(kind, model)
