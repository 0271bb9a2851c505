"""GPT-2s of three sizes from one training: ladder_gpt.py [FOLDER]; with a folder it goes on where it was killed."""

import sys
import tempfile

import torch
from counting import network, score, sequences
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import esper

DEPTHS, STEPS, BATCH, RATE = [1, 2, 4], 400, 32, 1e-2
train, validation, test = (sequences(number, seed) for seed, number in enumerate((512, 128, 256)))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    """One step; the ladder sets the learning rates."""
    loss = model(input_ids=batch, labels=batch).loss
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def main(folder: str) -> None:
    """Train all sizes, and use each as any other model."""
    model = network()
    made = esper.ladder(
        model,
        train_step,
        depths=DEPTHS,
        steps=STEPS,
        data=DataLoader(train, batch_size=BATCH, shuffle=True),
        optimizer=torch.optim.AdamW(model.parameters(), lr=RATE),
        evaluate=lambda model: score(model, validation)[0],
        folder=folder,
    )
    for rung in made.rungs:
        plain = AutoModelForCausalLM.from_pretrained(rung.path)
        loss, accuracy = score(plain, test)
        print(f"blocks {plain.config.n_layer}: test loss {loss:.3f}, accuracy {accuracy:.3f}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(temporary)
