"""What the tests marked `gpu` share."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def needs_gpu(test: Any) -> Any:
    """Mark a test as one for `make gpu`, and skip it where there is no CUDA device."""
    missing = not torch.cuda.is_available()
    return pytest.mark.gpu(pytest.mark.skipif(missing, reason="no CUDA device")(test))


@pytest.fixture
def full_float32() -> Iterator[None]:
    """Convolutions in TF32, torch's default, differ from the CPU's in the third digit."""
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    yield
    torch.backends.cudnn.allow_tf32 = before


def move(arguments: Any, device: torch.device = GPU) -> Any:
    """A tensor, or named ones, on a device; other values as they are."""
    if isinstance(arguments, Mapping):
        return {name: move(value, device) for name, value in arguments.items()}
    return arguments.to(device) if isinstance(arguments, torch.Tensor) else arguments
