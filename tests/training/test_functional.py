"""A prepared functional call returns what torch's own does."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.func import functional_call

from esper.training.execution import Functional


class Host(nn.Module):
    """Nested parameters, one of them shared by two layers, and a buffer that is written to."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3))
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.inner[0].weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return self.tied(self.inner(inputs)) + self.calls


def test_it_returns_what_functional_call_does_and_passes_gradients() -> None:
    host, inputs = Host(), torch.arange(6.0).view(2, 3)
    functional = Functional(copy.deepcopy(host))
    for scale in (1.0, 2.0):
        parameters = {name: (scale * own.detach()).requires_grad_() for name, own in host.named_parameters()}
        counts = {"calls": torch.tensor(scale)}, {"calls": torch.tensor(scale)}
        ours = functional(parameters, counts[0], inputs)
        theirs = functional_call(host, (parameters, counts[1]), (inputs,))
        assert torch.equal(ours, theirs)
        assert counts[0] == counts[1] == {"calls": scale + 1}
        assert torch.equal(functional(parameters, {"calls": torch.tensor(scale)}, inputs), theirs)
        gradients = [torch.autograd.grad(outputs.sum(), list(parameters.values())) for outputs in (ours, theirs)]
        assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_until_it_is_handed_anything_the_module_computes_with_what_it_had() -> None:
    host = Host()
    expected = copy.deepcopy(host)(torch.ones(2, 3))
    Functional(host)
    assert torch.equal(host(torch.ones(2, 3)), expected)
