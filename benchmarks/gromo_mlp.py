"""Width and modules on offer in an MLP, beside gromo 0.1.0 and static networks of the same size.

    pip install gromo==0.1.0
    python benchmarks/gromo_mlp.py FOLDER arms        # growth by rules and by gromo, static networks
    python benchmarks/gromo_mlp.py FOLDER scores      # promise of each kind beside gromo's scores, on the same hosts
    python benchmarks/gromo_mlp.py FOLDER parts       # after arms: gromo without its update of weights, or its neurons
    python benchmarks/gromo_mlp.py FOLDER table

The hosts, data and order of minibatches are the same for all. gromo (https://github.com/growingnet/gromo) widens hidden
layers by the neurons that TINY finds (Verbockhaven et al. 2024, arXiv 2405.19816). Here it grows at the decisions at
which the rule looks, each time in the layer that it finds best, by as many neurons as lead to the size of the network
that it is compared with, with its scaling factor searched on training data. Other networks are given the same size, and
once more also the same training FLOPs.

FLOPs are those of matrix products, a backward pass counted as two forward passes: of a rule's training, validation and
promises; of gromo's training, statistics and trials of factors; of static networks their training alone. What is solved
by eigenvalues or linear systems is not counted. Results are kept, one JSON line each;
stopped, the same command goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from result_files import ResultFile
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from width_mlp import (
    BATCH,
    BOTH,
    EPOCHS,
    GROMO,
    GROMO_SHAPE,
    GROWTHS,
    HIDDEN,
    LAYERS,
    OFFERS,
    PARTS,
    RANDOM,
    RANDOM_WITHOUT_UPDATE,
    SEEDS,
    STATIC,
    TASKS,
    UNIFORM,
    WIDTH_SLOTS,
    WITHOUT_UPDATE,
    Arm,
    Result,
    conclude,
    count,
    flat,
    grow,
    list_arms,
    list_parts,
    make_final_shape,
    make_host,
    make_mlp,
    make_optimizer,
    train_epoch,
    train_static,
)
from width_tables import (
    Score,
    correlate,
    describe_result,
    tabulate_arms,
    tabulate_kinds,
    tabulate_looks,
    tabulate_scores,
)
from zoo.data import Splits, load

import esper
from esper.dash.output import print_line
from esper.errors import TaskError
from esper.train.workers import prepare_process

try:
    from gromo.containers.growing_mlp import GrowingMLP
    from gromo.utils.training_utils import compute_statistics
except ImportError as error:
    raise SystemExit("error: this compares with gromo: pip install gromo==0.1.0") from error

FACTORS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
MOST_UPDATES = 6
"""Of gromo at one decision."""
Step = Literal["arms", "scores", "parts", "table"]


def make_gromo(host: nn.Sequential) -> GrowingMLP:
    """The same network with the same parameters, of gromo's layers."""
    layers = [part for part in host if isinstance(part, nn.Linear)]
    cpu = torch.device("cpu")
    net = GrowingMLP(layers[0].in_features, layers[-1].out_features, HIDDEN, LAYERS, activation=nn.ReLU(), device=cpu)
    with torch.no_grad():
        for layer, own in zip(layers, net.layers, strict=True):
            own.weight.copy_(layer.weight)
            own.bias.copy_(layer.bias)
    return net


def grow_gromo(arm: Arm, splits: Splits, size: int, flops: float) -> Result:
    """By gromo, to about ``size`` parameters, for all epochs or as many FLOPs."""
    began, net = time.perf_counter(), make_gromo(make_host(splits, arm.seed))
    grown, spent, epoch = list[tuple[str, str]](), 0.0, 0
    optimizer = make_optimizer(net.parameters())
    while (spent < flops or epoch <= GROWTHS[-1]) if arm.equal_flops else epoch < EPOCHS:
        train_epoch(net, optimizer, splits, arm.seed, epoch)
        products = sum(layer.in_features * layer.out_features for layer in net.layers)
        spent += 3 * 2 * products * len(splits.train)
        epoch += 1
        if epoch in GROWTHS:
            due = (size - net.number_of_parameters()) / (len(GROWTHS) - GROWTHS.index(epoch))
            due += net.number_of_parameters()
            # A layer gets at most as many neurons at once as the next one has outputs.
            for _ in range(MOST_UPDATES):
                with FlopCounterMode(display=False) as counter:
                    found = widen(net, splits, due - net.number_of_parameters(), arm.how)
                spent += counter.get_total_flops()
                if found is None:
                    break
                grown.append(found)
            optimizer = make_optimizer(net.parameters())
    return conclude(arm, net, splits, (spent, epoch, began), tuple(grown))


def widen(net: GrowingMLP, splits: Splits, parameters: float, how: str = GROMO) -> tuple[str, str] | None:
    """Add neurons for about so many parameters where gromo finds it best; the hidden layer, from 1, and how many.

    ``how`` may be one of `PARTS`: random weights have the norms of those that gromo computed.
    """
    costs = [one.in_features + 1 + other.out_features for one, other in zip(net.layers, net.layers[1:], strict=False)]
    neurons = round(parameters / float(np.mean(costs)))
    if neurons < 1:
        return None
    score_gromo(net, splits, neurons)
    layer = net.select_best_update()
    before = net.layers[layer].out_features
    reader, update = net.layers[layer + 1], net.layers[layer + 1].optimal_delta_layer
    with torch.no_grad():
        if how in (WITHOUT_UPDATE, RANDOM_WITHOUT_UPDATE) and update is not None:
            for part in update.parameters():
                part.zero_()
        if how in (RANDOM, RANDOM_WITHOUT_UPDATE):
            for weight in (reader.extended_input_layer.weight, net.layers[layer].extended_output_layer.weight):
                drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(before))
                weight.copy_(drawn * weight.norm() / drawn.norm())
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
    return str(layer + 1), str(net.layers[layer].out_features - before)


def score_gromo(net: GrowingMLP, splits: Splits, neurons: int) -> list[tuple[float, float]]:
    """gromo's expected first-order improvement by widening each hidden layer: of all, and of the neurons alone."""
    data = torch.utils.data.TensorDataset(flat(splits.train.inputs), splits.train.labels)
    compute_statistics(net, torch.utils.data.DataLoader(data, BATCH), nn.CrossEntropyLoss(reduction="sum"))
    net.compute_optimal_updates(maximum_added_neurons=neurons)
    return [
        (float(found["update_value"]), float(found["update_value"] - found["parameter_improvement"]))
        for found in net.update_information().values()
    ]


def do_arm(arm: Arm, splits: Splits, known: Callable[[Arm], Result]) -> Result:
    """Train in one way; ``known`` gives what is compared with."""
    if arm.how in OFFERS:
        return grow(arm, splits)
    other = known(Arm(arm.task, arm.like, arm.seed)) if arm.like else None
    if other is not None and arm.how in (GROMO, *PARTS):
        return grow_gromo(arm, splits, other.parameters, other.flops)
    began, features = time.perf_counter(), splits.train.inputs[0].numel()
    net: nn.Module = make_host(splits, arm.seed)
    if other is not None and arm.how == STATIC:
        net = make_final_shape(other.grown, splits, arm.seed)
    elif other is not None and arm.how == UNIFORM:
        nets = [make_mlp(features, [width] * LAYERS, splits.classes) for width in range(HIDDEN, 4 * HIDDEN)]
        sizes = [abs(count(net) - other.parameters) for net in nets]
        torch.manual_seed(arm.seed)
        net = make_mlp(features, [HIDDEN + int(np.argmin(sizes))] * LAYERS, splits.classes)
    elif arm.how == GROMO_SHAPE:
        widths = [HIDDEN] * LAYERS
        for layer, neurons in known(Arm(arm.task, GROMO, arm.seed, arm.like)).grown:
            widths[int(layer) - 1] += int(neurons)
        torch.manual_seed(arm.seed)
        net = make_mlp(features, widths, splits.classes)
    flops = other.flops if other is not None and arm.equal_flops else None
    net, spent, epochs = train_static(net, splits, arm.seed, flops)
    return conclude(arm, net, splits, (spent, epochs, began))


def score(task: str, seed: int, splits: Splits) -> Iterable[Score]:
    """The bare host after as many epochs as at each look: what gromo and promise say of each hidden layer."""
    host = make_host(splits, seed)
    optimizer = make_optimizer(host.parameters())

    def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    for epoch in range(GROWTHS[-1]):
        train_epoch(host, optimizer, splits, seed, epoch)
        if epoch + 1 not in GROWTHS:
            continue
        model = esper.attach(host, OFFERS[BOTH], flat(splits.train.inputs[:2]))
        batch = flat(splits.train.inputs[:512]), splits.train.labels[:512]
        rows = model.look(losses, [batch], examples=512).rows
        model.release()
        net = make_gromo(host)
        found = score_gromo(net, splits, HIDDEN)
        for slot, layer in WIDTH_SLOTS.items():
            units = next(row for row in rows if (row.slot, row.blueprint) == (slot, f"units_{HIDDEN}"))
            behind = [row for row in rows if row.slot == f"{2 * layer - 1}"]
            module = max(behind, key=lambda row: row.promise_held_out)
            made, read = net.layers[layer - 1], net.layers[layer]
            yield Score(
                task,
                seed,
                epoch + 1,
                layer,
                *found[layer - 1],
                HIDDEN * (made.in_features + 1 + read.out_features),
                units.promise_held_out,
                units.promise,
                units.parameters,
                module.blueprint,
                module.promise_held_out,
                module.promise,
                module.parameters,
            )


def main(
    folder: tyro.conf.Positional[Path],
    step: tyro.conf.Positional[Step],
    tasks: tuple[str, ...] = TASKS,
    seeds: tuple[int, ...] = SEEDS,
    longer: bool = True,
) -> None:
    """Do a step, or what is missing of it; `table` prints what is known.

    Args:
        folder: Keeps the results.
        step: What to do.
        tasks: Data sets.
        seeds: One run per seed and way to train.
        longer: Whether to train other networks for as many FLOPs as growth, too, which takes half of the time.
    """
    prepare_process()
    console = Console(width=160)
    arms, scores = ResultFile(folder / "mlp_arms.jsonl", Result), ResultFile(folder / "mlp_scores.jsonl", Score)
    found: dict[Arm, Result] = {one.arm: one for one in arms.results}
    for seed in seeds if step != "table" else ():
        for task in tasks:
            try:
                splits = load(task)
            except TaskError as error:
                raise SystemExit(f"error: {error}") from error
            if step == "scores" and (task, seed) not in {(one.task, one.seed) for one in scores.results}:
                for one in list(score(task, seed, splits)):
                    scores.add(one)
            listed = {"arms": list_arms, "parts": list_parts}.get(step)
            for arm in listed(task, seed) if listed else ():
                if arm not in found and (longer or not arm.equal_flops):
                    found[arm] = do_arm(arm, splits, found.__getitem__)
                    arms.add(found[arm])
                    print_line(console, describe_result(found[arm]))
    for lines in (
        tabulate_arms(arms.results),
        tabulate_kinds(arms.results),
        tabulate_looks(arms.results),
        tabulate_scores(scores.results),
        correlate(scores.results),
    ):
        for line in (*lines, ""):
            print_line(console, line)


if __name__ == "__main__":
    tyro.cli(main)
