"""Batches whose examples differ in length, as nested tensors.

In eval mode torch's `TransformerEncoder` hands them to its layers when a padding mask is given. Seeds know no masks:
they see such a batch with zeros where an example has ended, and what they put there is dropped.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor


def padded(ragged: Tensor, tokens: int = 0) -> Tensor:
    """``[B, T, D]``, zeros after the end of each example; T is the longest one's length, at least ``tokens``."""
    lengths = [len(example) for example in ragged.unbind()]
    shape = (len(lengths), max(tokens, *lengths), ragged.size(-1))
    return cast("Tensor", torch.nested.to_padded_tensor(ragged, 0.0, shape))


def as_ragged(features: Tensor, like: Tensor) -> Tensor:
    """``features [B, T, D]`` cut to the lengths of the examples of ``like``."""
    parts = zip(features, like.unbind(), strict=True)
    ragged: Tensor = torch.nested.as_nested_tensor([example[: len(other)] for example, other in parts])
    return ragged
