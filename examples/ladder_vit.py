"""Vision transformers of three sizes, given in parameters, from one training on handwritten digits."""

import tempfile

import torch
from digits import CLASSES, digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import ViTConfig, ViTForImageClassification

import esper

PARAMETERS, STEPS, BATCH, RATE = [4_000, 7_400, 14_000], 300, 50, 5e-3


def network() -> ViTForImageClassification:
    """One block of width 16 over patches of 2 x 2 pixels."""
    torch.manual_seed(0)
    image = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": CLASSES}
    block = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    return ViTForImageClassification(ViTConfig(**image, **block))


def classify(model: nn.Module, inputs: Tensor) -> Tensor:
    """Logits of digits as 64 numbers."""
    return model(pixel_values=inputs.view(-1, 1, 8, 8)).logits


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: list[Tensor]) -> None:
    """One step; the ladder sets the learning rates."""
    inputs, labels = batch
    loss = nn.functional.cross_entropy(classify(model, inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@torch.no_grad()
def score(model: nn.Module, data: TensorDataset) -> tuple[float, float]:
    """Loss and accuracy."""
    inputs, labels = data.tensors
    logits = classify(model.eval(), inputs)
    return float(nn.functional.cross_entropy(logits, labels)), float((logits.argmax(1) == labels).float().mean())


def main() -> None:
    """Train all sizes, and use each as any other model."""
    train, validation, test = digits()
    model = network()
    with tempfile.TemporaryDirectory() as folder:
        made = esper.ladder(
            model,
            train_step,
            parameters=PARAMETERS,
            steps=STEPS,
            data=DataLoader(train, batch_size=BATCH, shuffle=True),
            optimizer=torch.optim.AdamW(model.parameters(), lr=RATE),
            evaluate=lambda model: score(model, validation)[0],
            folder=folder,
        )
        for rung in made.rungs:
            plain = ViTForImageClassification.from_pretrained(rung.path)
            loss, accuracy = score(plain, test)
            print(f"{rung.parameters:,} parameters: test loss {loss:.3f}, accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
