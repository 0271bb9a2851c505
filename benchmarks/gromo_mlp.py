"""Growing an MLP by the rule that looks, beside gromo 0.1.0: the same hosts, data, epochs and final sizes.

    pip install gromo==0.1.0
    python benchmarks/gromo_mlp.py [--task mnist1d] [--seeds 0 1 2 3 4]

gromo (https://github.com/growingnet/gromo) widens hidden layers by the neurons that TINY finds (Verbockhaven et al.
2024, arXiv 2405.19816). Here it grows at the decisions at which the rule looks, each time in the layer that it finds
best, by as many neurons as lead to the final size of the rule's network, with its scaling factor searched on training
data.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.nn import functional as F
from zoo.data import Splits, load

import esper
from esper.control.rules import LookSettings
from esper.errors import TaskError
from esper.train.workers import prepare_process

try:
    from gromo.containers.growing_mlp import GrowingMLP
    from gromo.utils.training_utils import compute_statistics
except ImportError as error:
    raise SystemExit("error: this compares with gromo: pip install gromo==0.1.0") from error

HIDDEN, LAYERS = 8, 3
EPOCHS, BATCH, RATE = 30, 64, 3e-3
SLOTS = {f"{2 * layer + 1}": "auto" for layer in range(LAYERS)}
"""Behind every activation of `plain`."""
FACTORS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
LOOKS = LookSettings().promise
GROWTHS = [decision for decision in range(EPOCHS) if LOOKS.is_due(np.array([decision]))[0]][:-1]
"""The last one would come when the rule plants nothing any more."""


@dataclass(frozen=True)
class Outcome:
    """What became of one host."""

    how: str
    accuracy: float
    parameters: int
    seconds: float
    layers: tuple[int, ...] = ()
    """Hidden layers that were grown, from 1, in their order."""


def gromo_host(splits: Splits, seed: int) -> GrowingMLP:
    """Three hidden layers."""
    torch.manual_seed(seed)
    features = splits.train.inputs[0].numel()
    cpu = torch.device("cpu")
    return GrowingMLP(features, splits.classes, HIDDEN, LAYERS, activation=nn.ReLU(), device=cpu)


def plain(host: GrowingMLP) -> nn.Sequential:
    """The same network with the same parameters, of torch's own layers."""
    parts: list[nn.Module] = []
    for layer in host.layers:
        linear = nn.Linear(layer.in_features, layer.out_features)
        linear.load_state_dict({"weight": layer.weight.detach().clone(), "bias": layer.bias.detach().clone()})
        parts += [linear, nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def train_epoch(net: nn.Module, optimizer: torch.optim.Optimizer, splits: Splits, seed: int, epoch: int) -> float:
    """One pass; the last minibatch's loss."""
    order = torch.randperm(len(splits.train), generator=torch.Generator().manual_seed(1000 * seed + epoch))
    loss = torch.zeros(())
    for index in order.split(BATCH):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(flat(splits.train.inputs[index])), splits.train.labels[index])
        loss.backward()
        optimizer.step()
    return loss.item()


def flat(inputs: Tensor) -> Tensor:
    """``[B, features]``."""
    return inputs.flatten(1)


@torch.no_grad()
def accuracy(net: nn.Module, inputs: Tensor, labels: Tensor) -> tuple[float, float]:
    """Loss and accuracy."""
    logits = net(flat(inputs))
    return F.cross_entropy(logits, labels).item(), (logits.argmax(1) == labels).float().mean().item()


def bare(splits: Splits, seed: int) -> Outcome:
    """Never grows."""
    began, net = time.perf_counter(), plain(gromo_host(splits, seed))
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE)
    for epoch in range(EPOCHS):
        train_epoch(net, optimizer, splits, seed, epoch)
    return _outcome("bare", net, splits, began)


def look(splits: Splits, seed: int) -> Outcome:
    """By the rule that looks."""
    began, net = time.perf_counter(), plain(gromo_host(splits, seed))
    validation = splits.validation
    model = esper.attach(net, SLOTS, flat(splits.train.inputs[:2]))
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=RATE))
    grower = esper.Grower(
        model,
        optimizer,
        controller="look",
        evaluate=lambda model: accuracy(model, validation.inputs, validation.labels),
        horizon=EPOCHS,
        classes=splits.classes,
    )
    for epoch in range(EPOCHS):
        grower.step(train_loss=train_epoch(model, optimizer, splits, seed, epoch))
    grower.finish()
    layers = tuple(int(slot) // 2 + 1 for slot in model.seeds)
    return _outcome("look", model.finalize(), splits, began, layers)


def gromo(splits: Splits, seed: int, size: int) -> Outcome:
    """By gromo, to about ``size`` parameters."""
    began, net, grown = time.perf_counter(), gromo_host(splits, seed), list[int]()
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE)
    for epoch in range(EPOCHS):
        train_epoch(net, optimizer, splits, seed, epoch)
        if epoch + 1 in GROWTHS:
            missing = (size - net.number_of_parameters()) / (len(GROWTHS) - GROWTHS.index(epoch + 1))
            layer = widen(net, splits, missing)
            if layer is not None:
                grown.append(layer)
                optimizer = torch.optim.AdamW(net.parameters(), lr=RATE)
    return _outcome("gromo", net, splits, began, tuple(grown))


def widen(net: GrowingMLP, splits: Splits, parameters: float) -> int | None:
    """Add neurons for about so many parameters where gromo finds it best; the hidden layer, from 1."""
    costs = [one.in_features + 1 + other.out_features for one, other in zip(net.layers, net.layers[1:], strict=False)]
    neurons = round(parameters / float(np.mean(costs)))
    if neurons < 1:
        return None
    measure(net, splits, neurons)
    layer = net.select_best_update()
    net.reset_computation()
    inputs, labels = flat(splits.train.inputs), splits.train.labels
    losses: list[float] = []
    for factor in FACTORS:
        net.set_scaling_factor(factor)
        with torch.no_grad():
            losses.append(F.cross_entropy(net.extended_forward(inputs), labels).item())
    net.set_scaling_factor(FACTORS[int(np.argmin(losses))] or FACTORS[1])
    net.apply_change()
    net.set_growing_layers("all")
    return layer + 1


def measure(net: GrowingMLP, splits: Splits, neurons: int) -> list[float]:
    """gromo's expected first-order improvement by widening each hidden layer."""
    data = torch.utils.data.TensorDataset(flat(splits.train.inputs), splits.train.labels)
    compute_statistics(net, torch.utils.data.DataLoader(data, BATCH), nn.CrossEntropyLoss(reduction="sum"))
    net.compute_optimal_updates(maximum_added_neurons=neurons)
    return [float(found["update_value"]) for found in net.update_information().values()]


def agreement(splits: Splits, seed: int) -> float:
    """Rank correlation over hidden layers of gromo's scores with the most that is promised behind each, early on."""
    net = gromo_host(splits, seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE)
    for epoch in range(LOOKS.first):
        train_epoch(net, optimizer, splits, seed, epoch)
    model = esper.attach(plain(net), SLOTS, flat(splits.train.inputs[:2]))

    def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    looked = model.look(losses, [(flat(splits.train.inputs[:512]), splits.train.labels[:512])], examples=512)
    promised = [max(row.promise_held_out for row in looked.rows if row.slot == slot) for slot in SLOTS]
    return float(spearmanr(measure(net, splits, neurons=4), promised).statistic)


def _outcome(how: str, net: nn.Module, splits: Splits, began: float, layers: tuple[int, ...] = ()) -> Outcome:
    size = sum(parameter.numel() for parameter in net.parameters())
    seconds = time.perf_counter() - began
    return Outcome(how, accuracy(net, splits.test.inputs, splits.test.labels)[1], size, seconds, layers)


def main(task: str = "mnist1d", seeds: tuple[int, ...] = (0, 1, 2, 3, 4)) -> None:
    """Print a table of means over seeds."""
    prepare_process()
    try:
        splits = load(task)
    except TaskError as error:
        raise SystemExit(f"error: {error}") from error
    outcomes: list[Outcome] = []
    for seed in seeds:
        grown = look(splits, seed)
        outcomes += [bare(splits, seed), grown, gromo(splits, seed, grown.parameters)]
    Console().print(table(outcomes))
    found = [agreement(splits, seed) for seed in seeds]
    Console().print(f"scores of layers, rank correlation: {np.mean(found):+.2f} ± {np.std(found, ddof=1):.2f}")


def table(outcomes: Sequence[Outcome]) -> Table:
    """Means ± standard deviations over seeds."""
    made = Table("how", "test accuracy", "parameters", "seconds", "layers grown, by seed")
    for how in dict.fromkeys(one.how for one in outcomes):
        own = [one for one in outcomes if one.how == how]
        right = [100 * one.accuracy for one in own]
        layers = ", ".join("".join(map(str, one.layers)) or "-" for one in own)
        size, seconds = (np.mean([getattr(one, name) for one in own]) for name in ("parameters", "seconds"))
        made.add_row(
            how, f"{np.mean(right):.1f} ± {np.std(right, ddof=1):.1f}", f"{size:,.0f}", f"{seconds:.1f}", layers
        )
    return made


if __name__ == "__main__":
    tyro.cli(main)
