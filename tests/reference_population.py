"""The slow, obvious population: a Python loop over separate models, each with its own `torch.optim` optimizer.

Tests hold the fast population to this one, and benchmarks measure it beside the fast one. It shares the lifecycle's
decisions and nothing else: hosts have their true widths, seeds are modules in slots, attribution is separate passes.
"""

import copy
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.growth.blueprints.registry import get
from esper.growth.model import GrowingModel
from esper.growth.slot import Seed, Slot, side_pass
from esper.lifecycle.actions import Blend
from esper.lifecycle.table import SeedMeasurements, SeedTable, Stage
from esper.lifecycle.transitions import step
from esper.numerics.random_streams import module_generator
from esper.population.learning import Batch
from esper.population.population import Actions, NetworkSpec, PopulationConfig
from esper.tasks.suite import OptimizerSettings


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Over all labels: those of ``[B]`` examples, or of every position ``[B, T]``."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


class ReferencePopulation:
    """E networks, one after the other. Measurements are set from outside."""

    def __init__(self, config: PopulationConfig, networks: Sequence[NetworkSpec]) -> None:
        self.config = config
        self.networks = list(networks)
        example = config.example_input.to(device=config.device, dtype=config.dtype)
        self._names = [place if isinstance(place, str) else place[-1] for place in config.slots]
        self.models = [self._attach(network.host, example) for network in networks]
        self.optimizers = [
            make_optimizer(model.host.parameters(), network.learning_rate, config.optimizer)
            for model, network in zip(self.models, networks, strict=True)
        ]
        shape = (len(networks), len(config.slots))
        self.table = SeedTable.dormant(*shape)
        self.measurements = SeedMeasurements.none(*shape)
        self.germinations = np.zeros(shape, np.int64)
        self.seeds: dict[tuple[int, int], Seed] = {}
        """Live and fossilized seeds by network and slot."""

    def _attach(self, host: nn.Module, example: Tensor) -> GrowingModel:
        """Every slot offers what the population's configuration names and the site supports."""
        chains = {place[-1]: place for place in self.config.slots if not isinstance(place, str)}

        def attach(offers: dict[str, Sequence[str] | None]) -> GrowingModel:
            copied = copy.deepcopy(host).to(device=self.config.device, dtype=self.config.dtype)
            return GrowingModel(copied, offers, example, chains=list(chains.values()))

        names = self.config.blueprints
        probe = attach({name: names if name in chains else None for name in self._names})
        return attach(
            {
                name: names if name in chains else [one for one in names if get(one).supports(probe.slots[name].site)]
                for name in self._names
            }
        )

    def decide(self, actions: Actions) -> None:
        """Take one action per network; arguments and errors as `Population.decide`."""
        kinds = [get(name) for name in self.config.blueprints]
        compatible = np.array(
            [[[kind.supports(slot.site) for kind in kinds] for slot in self._slots(model)] for model in self.models]
        )
        result = step(self.table, self.measurements, actions, self.config.rules, compatible)
        self.table = result.table
        changes = result.transitions
        for index in range(len(changes)):
            where = (int(changes.env[index]), int(changes.slot[index]))
            blueprint = int(changes.blueprint[index])
            if changes.after[index] == Stage.GERMINATED:
                self._germinate(*where, self.config.blueprints[blueprint], Blend(changes.blend[index]))
            elif changes.after[index] == Stage.PRUNED:
                self._prune(*where)

    def _slots(self, model: GrowingModel) -> list[Slot]:
        return [model.slots[name] for name in self._names]

    def _germinate(self, network: int, slot: int, blueprint: str, blend: Blend) -> None:
        generator = module_generator(self.networks[network].seed, slot, int(self.germinations[network, slot]))
        self.germinations[network, slot] += 1
        place = self.models[network].slots[self._names[slot]]
        self.seeds[network, slot] = place.germinate(blueprint, generator, blend=blend)

    def _prune(self, network: int, slot: int) -> None:
        seed = self.seeds.pop((network, slot))
        optimizer = self.optimizers[network]
        gone = set(seed.parameters())
        for parameter in gone:
            optimizer.state.pop(parameter, None)
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if not gone & set(group["params"])]
        self.models[network].slots[self._names[slot]].remove()

    def train(self, batches: Iterable[Batch]) -> None:
        """One optimizer step per minibatch in every network."""
        for batch in batches:
            for network in range(len(self.models)):
                self._train_one(network, batch.inputs[network], batch.labels[network])

    def _train_one(self, network: int, inputs: Tensor, labels: Tensor) -> None:
        model, optimizer = self.models[network], self.optimizers[network]
        optimizer.zero_grad()
        own = {slot: seed for (owner, slot), seed in self.seeds.items() if owner == network}
        isolated = list[Seed]()
        with ExitStack() as stack:
            for slot, seed in own.items():
                self._join(optimizer, network, slot, seed)
                seed.alpha.fill_(float(self.table.alpha[network, slot]))
                if self.table.stage[network, slot] == Stage.TRAINING:
                    isolated.append(seed)
                    stack.enter_context(model.slots[self._names[slot]].disabled())
            mean_loss(model(inputs), labels).backward()
        if isolated:
            self._shadow(model, isolated, inputs, labels)
        if self.config.optimizer.clip_norm is not None:
            nn.utils.clip_grad_norm_(
                [*model.host.parameters(), *(p for seed in own.values() for p in seed.parameters())],
                self.config.optimizer.clip_norm,
            )
        optimizer.step()

    def _join(self, optimizer: torch.optim.Optimizer, network: int, slot: int, seed: Seed) -> None:
        """Give a seed to the optimizer in the first step in which it learns."""
        known = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        fresh = [parameter for parameter in seed.parameters() if parameter not in known]
        if fresh and self.table.stage[network, slot] != Stage.GERMINATED:
            optimizer.add_param_group({"params": fresh})

    def _shadow(self, model: GrowingModel, isolated: Sequence[Seed], inputs: Tensor, labels: Tensor) -> None:
        """Give the isolated seeds the gradients of a pass in which they count fully; nobody else gets any."""
        learning = [parameter for seed in isolated for parameter in seed.parameters()]
        with side_pass(model), ExitStack() as stack:
            for seed in isolated:
                stack.enter_context(seed.temporary_alpha(1.0))
            gradients = torch.autograd.grad(mean_loss(model(inputs), labels), learning)
        for parameter, gradient in zip(learning, gradients, strict=True):
            parameter.grad = gradient

    @torch.inference_mode()
    def logits(self, inputs: Tensor, alphas: dict[tuple[int, int], float] | None = None) -> Tensor:
        """Outputs ``[E, N, ...]`` on ``inputs`` ``[E, N, ...]``; ``alphas`` overrides those of single seeds."""
        overrides = alphas or {}
        for where, seed in self.seeds.items():
            seed.alpha.fill_(overrides.get(where, float(self.table.alpha[where])))
        for model in self.models:
            model.eval()
        outputs = torch.stack([model(own) for model, own in zip(self.models, inputs, strict=True)])
        for model in self.models:
            model.train()
        return outputs


def make_optimizer(parameters: Iterable[Any], learning_rate: float, settings: OptimizerSettings) -> Any:
    """Of torch's, for parameters or groups of them."""
    usual = {"lr": learning_rate, "weight_decay": settings.weight_decay}
    if settings.name == "adamw":
        return torch.optim.AdamW(parameters, betas=settings.betas, **usual)
    return torch.optim.SGD(parameters, momentum=settings.momentum, **usual)
