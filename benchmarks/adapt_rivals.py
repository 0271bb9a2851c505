"""The rivals of growth in adapt_arms.py: ways of fine-tuning a network, or low-rank updates of it, on few examples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import peft
import torch
from adapt_gap import BATCH, EPOCHS, Case, Data, Problem, accuracy
from torch import Tensor, nn
from torch.nn import functional as F

REPLAYED = 3
"""Source examples in a batch of replay: about 5%."""
PROTECTED = 300
"""Source examples that some arms may learn from again."""
FOLDS = 2
"""Parts of the new data, by which a search chooses."""


@dataclass(frozen=True)
class Setting:
    """What an arm adapts, and by which rate."""

    case: Case
    problem: Problem
    host: nn.Module
    rate: float
    seed: int

    @property
    def fresh(self) -> Any:
        """A copy of the host."""
        return copy.deepcopy(self.host)

    @property
    def protected(self) -> Data:
        """Examples that the host has learned, for whoever may still see them."""
        return self.problem.source.pick(slice(PROTECTED))


@dataclass(frozen=True)
class Adapted:
    """What an arm made of the host, and how to have less of it."""

    network: nn.Module
    weigh: Callable[[float], nn.Module]
    """The network with that share, in [0, 1], of what it learned."""
    learned: int
    """Parameters that learned, or were added."""
    trainings: float = 1.0
    """Of 120 steps with `BATCH` examples, by which an arm learns as much; rough."""


Way = Callable[[Setting], Adapted]


def interpolate(host: nn.Module, network: nn.Module) -> Callable[[float], nn.Module]:
    old, new = host.state_dict(), network.state_dict()

    def weigh(share: float) -> nn.Module:
        mixed = copy.deepcopy(network)
        mixed.load_state_dict(
            {key: torch.lerp(old[key], new[key], share) if new[key].is_floating_point() else new[key] for key in new}
        )
        return mixed

    return weigh


def fit(
    network: nn.Module,
    parameters: Iterable[Any],
    data: Data,
    one: Setting,
    *,
    replayed: int = 0,
    at_rest: bool = False,
    penalty: Callable[[], Tensor | float] = lambda: 0.0,
    epoch: Callable[[torch.optim.Optimizer], None] = lambda _: None,
    after: Callable[[int], None] = lambda _: None,
) -> None:
    """Minibatches in random order, each with ``replayed`` examples of what the host has learned.

    Normalisation goes by the statistics of minibatches, and the network's own follow them, unless it is ``at_rest``.
    ``penalty`` is added to the loss, ``epoch`` is called before each epoch, ``after`` with the number of steps.
    """
    source = one.protected
    optimizer, generator = torch.optim.Adam(parameters, one.rate), torch.Generator().manual_seed(one.seed)
    steps = 0
    for _ in range(EPOCHS):
        epoch(optimizer)
        network.train(not at_rest)
        for rows in torch.randperm(len(data.labels), generator=generator).split(BATCH):
            batch = data.pick(rows)
            if replayed:
                old = source.pick(torch.randint(len(source.labels), (replayed,), generator=generator))
                batch = Data(torch.cat([batch.inputs, old.inputs]), torch.cat([batch.labels, old.labels]))
            optimizer.zero_grad()
            (F.cross_entropy(network(batch.inputs), batch.labels) + penalty()).backward()
            optimizer.step()
            steps += 1
            after(steps)


def count(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def tune_fully(one: Setting, *, replayed: int = 0) -> Adapted:
    network = one.fresh
    fit(network, network.parameters(), one.problem.target, one, replayed=replayed)
    return Adapted(network, interpolate(one.host, network), count(network.parameters()), 1.0 + replayed / BATCH)


def tune_statistics(one: Setting) -> Adapted:
    """Nothing learns, but the statistics by which the host normalises follow the new data."""
    network = one.fresh
    fit(network, network.parameters(), one.problem.target, replace(one, rate=0.0))
    return Adapted(network, interpolate(one.host, network), 0)


def tune_part(one: Setting, part: str) -> Adapted:
    """Nothing learns but the submodule ``part``."""
    network = one.fresh
    network.requires_grad_(False)
    network.get_submodule(part).requires_grad_(True)
    learned = list(network.get_submodule(part).parameters())
    fit(network, learned, one.problem.target, one)
    return Adapted(network, interpolate(one.host, network), count(learned))


def find_ratios(network: nn.Module, data: Data) -> dict[str, float]:
    """Norm of the gradient over that of the value, by parameter."""
    network.eval()
    network.zero_grad()
    F.cross_entropy(network(data.inputs), data.labels).backward()
    named = network.named_parameters()
    return {name: float(one.grad.norm() / one.norm().clamp(min=1e-8)) for name, one in named if one.grad is not None}


def tune_by_gradients(one: Setting) -> Adapted:
    """Auto-RGN (Lee et al. 2023, arXiv 2210.11466, section 5.2): each tensor's rate by its relative gradient norm."""
    network = one.fresh

    def scale(optimizer: torch.optim.Optimizer) -> None:
        ratios = find_ratios(network, one.problem.target)
        top = max(ratios.values())
        for group, ratio in zip(optimizer.param_groups, ratios.values(), strict=True):
            group["lr"] = one.rate * ratio / top

    fit(network, [{"params": [own]} for own in network.parameters()], one.problem.target, one, epoch=scale)
    return Adapted(network, interpolate(one.host, network), count(network.parameters()))


def tune_largest(one: Setting) -> Adapted:
    """The layer whose weight has the largest relative gradient norm."""
    ratios = find_ratios(one.fresh, one.problem.target)
    weights = [name for name in ratios if name.endswith("weight") and one.host.get_parameter(name).ndim > 1]
    return tune_part(one, max(weights, key=ratios.__getitem__).rpartition(".")[0])


def list_layers(host: nn.Module) -> list[str]:
    """Every linear and convolutional layer."""
    return [name for name, part in host.named_modules() if isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d)]


def tune_lora(one: Setting, rank: int, *, replayed: int = 0, at_rest: bool = False) -> Adapted:
    """PEFT's LoRA on every linear and convolutional layer."""
    config = peft.LoraConfig(r=rank, lora_alpha=8, target_modules=list_layers(one.host))
    return _tune_by_peft(one, config, replayed=replayed, at_rest=at_rest)


def tune_adalora(one: Setting) -> Adapted:
    """PEFT's AdaLoRA on every linear layer; it knows no convolutions."""
    targets = [name for name, part in one.host.named_modules() if isinstance(part, nn.Linear)]
    steps = EPOCHS * -(-len(one.problem.target.labels) // BATCH)
    config = peft.AdaLoraConfig(
        init_r=6, target_r=4, lora_alpha=8, tinit=steps // 6, tfinal=steps // 3, deltaT=5, total_step=steps,
        target_modules=targets,
    )  # fmt: skip
    return _tune_by_peft(one, config)


def _tune_by_peft(one: Setting, config: Any, *, replayed: int = 0, at_rest: bool = False) -> Adapted:
    torch.manual_seed(one.seed)
    network: Any = peft.get_peft_model(one.fresh, config)
    learned = [parameter for parameter in network.parameters() if parameter.requires_grad]
    adaptive = isinstance(config, peft.AdaLoraConfig)
    allocate = network.base_model.update_and_allocate if adaptive else (lambda _: None)
    number = count(learned)

    def penalise() -> Tensor | float:
        return config.orth_reg_weight * measure_skewness(network) if adaptive else 0.0

    fit(
        network, learned, one.problem.target, one,
        replayed=replayed, at_rest=at_rest, penalty=penalise, after=lambda steps: allocate(steps - 1),
    )  # fmt: skip
    merged = network.merge_and_unload()
    return Adapted(merged, interpolate(one.host, merged), number, 1.0 + replayed / BATCH)


def measure_skewness(network: nn.Module) -> Tensor:
    """How far AdaLoRA's factors are from orthogonal (Zhang et al. 2023, arXiv 2303.10512, equation 4), mean over them.

    PEFT adds it to the loss that a model returns, and these return none.
    """
    found: list[Tensor] = []
    for name, factor in network.named_parameters():
        if ".lora_A." in name or ".lora_B." in name:
            products = factor @ factor.T if ".lora_A." in name else factor.T @ factor
            found.append((products - torch.eye(len(products))).norm())
    return torch.stack(found).mean()


def search(one: Setting, candidates: Sequence[Way]) -> Adapted:
    """The way that does best on parts of the new data which it did not learn from, as `esper.adapt` chooses."""
    target = one.problem.target
    parts = [torch.arange(len(target.labels)) % FOLDS == fold for fold in range(FOLDS)]

    def try_out(candidate: Way, part: Tensor) -> float:
        rest = replace(one, problem=replace(one.problem, target=target.pick(~part)))
        return accuracy(candidate(rest).network, target.pick(part))

    found = [np.mean([try_out(candidate, part) for part in parts]) for candidate in candidates]
    best = candidates[int(np.argmax(found))](one)
    return replace(best, trainings=1.0 + (FOLDS - 1) * len(candidates))


def search_lora(one: Setting) -> Adapted:
    """LoRA everywhere, its rank and its rate by trying."""

    def candidate(rank: int, rate: float) -> Way:
        return lambda one: tune_lora(replace(one, rate=rate), rank)

    return search(one, [candidate(rank, rate) for rank in (1, 4, 16) for rate in (0.003, 0.01, 0.03)])


def search_layers(one: Setting) -> Adapted:
    """Surgical fine-tuning: every layer by itself at two rates, and all of them together at three, by trying."""

    def layer(name: str, rate: float) -> Way:
        return lambda one: tune_part(replace(one, rate=rate), name)

    def full(rate: float) -> Way:
        return lambda one: tune_fully(replace(one, rate=rate))

    layers = [layer(name, rate) for name in list_layers(one.host) for rate in (0.03, 0.1)]
    return search(one, [*layers, *(full(rate) for rate in (0.003, 0.01, 0.03))])
