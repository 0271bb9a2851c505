"""Growth under Lightning's Trainer: a callback."""

import logging

import torch
from digits import digits, score, small_network
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import esper
from esper.integrations.lightning import LightningGrower

EPOCHS = 20
train, validation, test = digits()
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Classifier(LightningModule):
    """An ordinary module, around any model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Of a growing model the optimizer is made from its parameter groups.
        growing = isinstance(self.model, esper.GrowingModel)
        return torch.optim.AdamW(self.model.parameter_groups() if growing else self.model.parameters(), lr=3e-3)


def fit(model: nn.Module, *callbacks: LightningGrower) -> None:
    """Train for `EPOCHS`."""
    trainer = Trainer(
        max_epochs=EPOCHS,
        callbacks=list(callbacks),
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    shuffling = torch.Generator().manual_seed(0)
    trainer.fit(Classifier(model), DataLoader(train, batch_size=50, shuffle=True, generator=shuffling))


bare = small_network()
fit(bare)
model = esper.attach(small_network(), {"1": ["mlp"], "3": ["mlp"]}, example_input=train[:2][0])
fit(model, LightningGrower(lambda model: score(model, validation), controller="heuristic", horizon=EPOCHS))

print(model.summary())
plain = model.finalize()
print(f"accuracy without growth {score(bare, test)[1]:.3f}, with growth {score(plain, test)[1]:.3f}")
