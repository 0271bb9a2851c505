"""Growth under Hugging Face's Trainer: a tiny GPT-2 learns to count in steps of one, two or three."""

import tempfile

import torch
from counting import network, score, sequences
from torch import nn
from transformers import Trainer, TrainingArguments

import esper
from esper.integrations.transformers import TransformersGrower

EPOCHS = 20


def fitted(model: nn.Module, parameters: object, *, grow: bool) -> nn.Module:
    """The model, trained for `EPOCHS`."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=32,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_steps=10_000,
            use_cpu=True,
        )
        optimizer = torch.optim.AdamW(parameters, lr=3e-3)
        data = [{"input_ids": row, "labels": row} for row in sequences(512, seed=0)]
        trainer = Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None))
        if grow:
            held_out = sequences(128, seed=1)
            trainer.add_callback(TransformersGrower(trainer, lambda model: score(model, held_out), horizon=EPOCHS))
        trainer.train()
    return model


test = sequences(256, seed=2)
bare = network()
fitted(bare, bare.parameters(), grow=False)
# Attention must be named. It needs a model that neither masks padding nor caches the past.
host = network()
host.config.use_cache = False
model = esper.attach(host, {"transformer.h.0": ["mlp", "attention"]}, example_input=test[:2])
fitted(model, model.parameter_groups(), grow=True)
print(model.summary())
print(f"accuracy without growth {score(bare, test)[1]:.3f}, with growth {score(model, test)[1]:.3f}")
