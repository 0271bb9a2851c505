"""What the examples share: handwritten digits, and a network that is too small for them."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

CLASSES = 10


def digits() -> tuple[TensorDataset, TensorDataset, TensorDataset]:
    """Images of 8x8 pixels as 64 numbers, and their labels: for training, for decisions about growth, for the end."""
    bunch = load_digits()
    inputs = torch.tensor(bunch.data / 16, dtype=torch.float32)
    labels = torch.tensor(bunch.target)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    train, validation, test = (TensorDataset(inputs[part], labels[part]) for part in order.split([1000, 400, 397]))
    return train, validation, test


def small_network(seed: int = 0) -> nn.Sequential:
    """Three layers; the two hidden ones are 6 wide."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, CLASSES))


@torch.no_grad()
def score(model: nn.Module, data: TensorDataset) -> tuple[float, float]:
    """Loss and accuracy."""
    model.eval()
    inputs, labels = data.tensors
    logits: Tensor = model(inputs)
    return float(F.cross_entropy(logits, labels)), float((logits.argmax(1) == labels).float().mean())
