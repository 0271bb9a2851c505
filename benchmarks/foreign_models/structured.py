"""Models of graphs, of sets and of what happens to an agent."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foreign_models.problem import Problem, Recipe, Splits, floats, split, standardise

NODES = 16


class GraphConvolution(nn.Module):
    """Each node's features beside the mean of its neighbours', through one layer."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.own, self.neighbours = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

    def forward(self, features: Tensor, adjacency: Tensor) -> Tensor:
        mean = adjacency @ features / adjacency.sum(-1, keepdim=True).clamp_min(1)
        return (self.own(features) + self.neighbours(mean)).relu()


class GraphClassifier(nn.Module):
    """Features ``[B, N, 3]`` and adjacency ``[B, N, N]`` of graphs to logits ``[B, 3]``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = GraphConvolution(3, 12), GraphConvolution(12, 12)
        self.readout = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3))

    def forward(self, features: Tensor, adjacency: Tensor) -> Tensor:
        return self.readout(self.conv2(self.conv1(features, adjacency), adjacency).mean(1))


def split_graphs(seed: int) -> Splits:
    """Do edges join nodes at random, nodes of one colour, or nodes of different colours? Two colours, much noise."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(3, size=2000)
    colours = rng.integers(2, size=(len(labels), NODES))
    alike = colours[:, :, None] == colours[:, None, :]
    preference = np.array([0.0, 0.08, -0.08])[labels][:, None, None]
    upper = np.triu(rng.random(alike.shape) < 0.22 + np.where(alike, preference, -preference), 1)
    adjacency = floats(upper | upper.swapaxes(1, 2))
    noise = rng.standard_normal((*colours.shape, 2))
    features = np.concatenate([2.0 * colours[:, :, None] - 1, noise], axis=2)
    return split((floats(features), adjacency), torch.from_numpy(labels), seed, 300, 600)


class DeepSet(nn.Module):
    """Points ``[B, N, 2]`` in any order to logits ``[B, 4]``."""

    def __init__(self) -> None:
        super().__init__()
        self.phi = nn.Sequential(nn.Linear(2, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU())
        self.rho = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 4))

    def forward(self, points: Tensor) -> Tensor:
        return self.rho(self.phi(points).amax(1))


def split_clouds(seed: int) -> Splits:
    """Points on a circle, a square, a cross or two parallel lines, turned, stretched and noisy."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(4, size=2000)
    along, side = rng.uniform(-1, 1, (len(labels), 24)), rng.integers(4, size=(len(labels), 24))
    angle = np.pi * along
    end = np.where(side % 2 == 0, 1.0, -1.0)
    figures = [
        (np.cos(angle), np.sin(angle)),
        (np.where(side < 2, along, end), np.where(side < 2, end, along)),
        (np.where(side < 2, along, 0), np.where(side < 2, 0, along)),
        (along, 0.6 * end),
    ]
    chosen = labels[:, None]
    points = np.stack([np.choose(chosen, [figure[axis] for figure in figures]) for axis in (0, 1)], axis=-1)
    turn = rng.uniform(0, 2 * np.pi, len(labels))
    rotation = np.stack([np.cos(turn), -np.sin(turn), np.sin(turn), np.cos(turn)], axis=-1).reshape(-1, 2, 2)
    points = np.einsum("npi,nij->npj", points * rng.uniform(0.7, 1.3, (len(labels), 1, 2)), rotation)
    return split(floats(points + 0.12 * rng.standard_normal(points.shape)), torch.from_numpy(labels), seed, 300, 600)


def make_value_network() -> nn.Sequential:
    """States ``[B, 4]`` of a cart with a pole to expected returns ``[B, 1]``."""
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def split_returns(seed: int) -> Splits:
    """Discounted returns of a clumsy policy that balances a pole (Barto et al., 1983), one for each state it saw."""
    rng = np.random.default_rng(seed)
    episodes, longest, discount = 120, 60, 0.95
    states, alive = rng.uniform(-0.3, 0.3, (episodes, 4)), np.ones(episodes, np.bool_)
    seen, lived = [], []
    for _ in range(longest):
        seen.append(states.copy())
        lived.append(alive.copy())
        # The policy pushes to where the pole falls, but at random in four of ten steps.
        push = np.where(rng.random(episodes) < 0.4, rng.choice([-1, 1], episodes), np.sign(states[:, 2] + states[:, 3]))
        _, speed, angle, turn = states.T
        pull = (10 * push + 0.05 * turn**2 * np.sin(angle)) / 1.1
        twist = (9.8 * np.sin(angle) - np.cos(angle) * pull) / (0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / 1.1))
        states = states + 0.03 * np.stack([speed, pull - 0.05 * twist * np.cos(angle) / 1.1, turn, twist], axis=1)
        alive = alive & (np.abs(states[:, 2]) < 0.5) & (np.abs(states[:, 0]) < 2)
    returns, later = [], np.zeros(episodes)
    for living in reversed(lived):
        later = living * (1 + discount * later)
        returns.append(later)
    kept = np.stack(lived)
    inputs, targets = floats(np.stack(seen)[kept]), floats(np.stack(returns[::-1])[kept][:, None])
    # Splits are of states, as in most logs: neighbours of a test state may have been trained on.
    few = len(targets) // 5
    return standardise(standardise(split(inputs, targets, seed, few, few)), targets=True)


PROBLEMS = (
    Problem(
        name="graph_network",
        build=GraphClassifier,
        data=split_graphs,
        task="classification",
        loss=F.cross_entropy,
        recipe=Recipe(epochs=25, batch_size=50, learning_rate=3e-3),
        slots={"conv1": ["mlp", "lowrank", "norm"], "conv2": ["mlp", "lowrank", "norm"]},
    ),
    Problem(
        name="deep_set",
        build=DeepSet,
        data=split_clouds,
        task="classification",
        loss=F.cross_entropy,
        recipe=Recipe(epochs=25, batch_size=50, learning_rate=3e-3),
        slots={"phi": ["mlp", "lowrank", "norm"], "rho.1": ["mlp", "lowrank", "norm"]},
    ),
    Problem(
        name="value_network",
        build=make_value_network,
        data=split_returns,
        task="regression",
        loss=F.mse_loss,
        recipe=Recipe(epochs=30, batch_size=64, learning_rate=1e-3),
        slots={"1": ["mlp", "lowrank"], "3": ["mlp", "lowrank"]},
    ),
)
