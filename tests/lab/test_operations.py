"""Operations are counted where a kernel would run: not views, not allocations, and not what others are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from esper.lab.operations import ProfiledEvent, count_operations

TEN = torch.arange(10.0)
SQUARE = torch.ones(3, 3)


def backward() -> None:
    leaf = TEN.clone().requires_grad_()
    torch.autograd.grad((leaf * leaf.detach()).sum(), leaf)


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (lambda: TEN.view(2, 5).transpose(0, 1).unsqueeze(0)[:, 1], {}),
        (lambda: TEN.contiguous().to(torch.float32).reshape(5, 2), {}),
        (lambda: torch.empty(3).resize_(4), {}),
        (lambda: TEN + TEN, {"add": 1}),
        (lambda: TEN.to(torch.float64), {"copy_": 1}),
        (TEN.view(2, 5).mT.contiguous, {"copy_": 1}),
        (lambda: TEN.index_select(0, torch.tensor([1, 2])), {"index_select": 1}),
        (lambda: SQUARE @ SQUARE, {"mm": 1}),
        (TEN[0].item, {"_local_scalar_dense": 1}),
        (backward, {"copy_": 1, "mul": 2, "fill_": 2}),
    ],
    ids=["views", "nothing to copy", "memory", "sum", "cast", "copy", "gather", "product", "read", "backward"],
)
def test_only_what_would_launch_a_kernel_counts(work: Callable[[], object], expected: dict[str, int]):
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        work()
    assert count_operations(cast("list[ProfiledEvent]", profiled.events())) == expected
