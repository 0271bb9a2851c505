"""Small hosts, with and without connections across their slots."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from esper.population.population import NetworkSpec, PopulationConfig


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, features: Tensor) -> Tensor:
        return torch.tanh(self.linear(features))


class Chain(nn.Module):
    """Nothing bypasses a slot."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Layer(4), Layer(4), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.second(self.first(inputs)))


class Residual(Chain):
    """What the first layer yields bypasses the second, whose slot therefore may not append to the batch."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        return self.head(hidden + self.second(hidden))


class InputSkip(Chain):
    """The input bypasses everything."""

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.second(self.first(inputs)) * inputs)


def small(kind: type[Chain], count: int) -> tuple[PopulationConfig, list[NetworkSpec]]:
    torch_seed = torch.Generator().manual_seed(0)

    def host() -> nn.Module:
        model = kind()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(generator=torch_seed)
        return model

    shared = PopulationConfig(
        kind(), ("first", "second"), ("mlp", "gate", "input_skip"), torch.zeros(2, 4), dtype=torch.float64
    )
    return shared, [NetworkSpec(host(), (4, 4), 0.05, seed) for seed in range(count)]
