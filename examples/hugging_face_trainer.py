"""Growth under Hugging Face's Trainer: a tiny GPT-2 learns to count in steps of one, two or three."""

import tempfile

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import esper
from esper.integrations.transformers import GrowerCallback

EPOCHS, VOCABULARY, LENGTH, LARGEST_STEP = 20, 13, 12, 3


def sequences(number: int, seed: int) -> Tensor:
    """Arithmetic progressions modulo the vocabulary, ``[number, LENGTH]``: start and step are to be found out."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(VOCABULARY, (number, 1), generator=generator)
    step = torch.randint(1, 1 + LARGEST_STEP, (number, 1), generator=generator)
    return (start + step * torch.arange(LENGTH)) % VOCABULARY


def network() -> nn.Module:
    """One thin block."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2))


@torch.no_grad()
def score(model: nn.Module, data: Tensor) -> tuple[float, float]:
    """Loss, and how often the next token is the likeliest."""
    model.eval()
    logits, following = model(input_ids=data).logits[:, :-1], data[:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 1), following.flatten())
    return float(loss), float((logits.argmax(-1) == following).float().mean())


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
            trainer.add_callback(GrowerCallback(trainer, lambda model: score(model, held_out), horizon=EPOCHS))
        trainer.train()
    return model


test = sequences(256, seed=2)
bare = network()
fitted(bare, bare.parameters(), grow=False)
# Attention, too, since no sequence here is padded, and none is generated with a cache.
model = esper.attach(network(), {"transformer.h.0": ["mlp", "attention"]}, example_input=test[:2], apart=False)
fitted(model, model.parameter_groups(), grow=True)
print(model.summary())
print(f"accuracy without growth {score(bare, test)[1]:.3f}, with growth {score(model, test)[1]:.3f}")
