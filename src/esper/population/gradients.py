"""Whether gradients reach seeds in proportion: how they compare with those of what already counts, the incumbents.

Gradients are compared as root mean squares per parameter, so neither the sizes of seed and network nor a factor of the
loss matters. In a network that learns well, gradients have much the same scale everywhere (Glorot and Bengio 2010,
section 4.2); they vanish or explode where they are orders of magnitude smaller or larger (Pascanu, Mikolov and Bengio
2013, section 2).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from esper.errors import ConfigError
from esper.lifecycle.stages import Stage
from esper.numerics.arrays import Bools, Floats, Ints, replace_where
from esper.population.population import Population

VANISHED = 1e-3
"""A seed's gradient vanishes where its ratio to the incumbents' is less.

On the token suite, where seeds learn, means over a decision's minibatches lie between .004 and 9.
"""
EXPLODED = 1e2
"""It explodes where the ratio is greater. Clipping sets in at up to ten times the usual norm (Pascanu et al.)."""


@dataclass(frozen=True)
class SeedHealth:
    """The gradients of one seed since the last decision, each as it was before any clipping.

    A minibatch is what one step of the optimizer learns from: where a loop of your own adds up gradients over several
    backward passes, their sum; where it scales its losses, the gradient without that; in several processes, the first
    one's own gradient, before it is averaged.
    """

    minibatches: int
    """How many there were; 0 for a seed that does not learn."""
    norm: float
    """Mean over the minibatches; not finite if it was so in one."""
    vanished: float
    """Fraction of the minibatches in which the ratio was below `VANISHED` or no gradient arrived."""
    exploded: float
    """Fraction in which the ratio was above `EXPLODED` or the gradient was not finite."""
    ratio: float
    """Root mean square per parameter of the seed's gradient over that of the incumbents'.

    Mean over the minibatches in which the former was finite and the latter finite and not zero; NaN without any.
    """


@dataclass(frozen=True)
class HealthTable:
    """The fields of `SeedHealth` for many seeds, each an array ``[..., S]``."""

    minibatches: Ints
    norm: Floats
    vanished: Floats
    exploded: Floats
    ratio: Floats

    @classmethod
    def none(cls, *shape: int) -> Self:
        """No seed learns: 0 everywhere, and NaN as ratio."""
        zeros = np.zeros(shape)
        return cls(np.zeros(shape, np.int64), zeros, zeros.copy(), zeros.copy(), np.full(shape, np.nan))

    def at(self, *place: int) -> SeedHealth:
        """One seed's."""
        return SeedHealth(**{name: array[place].item() for name, array in vars(self).items()})


@dataclass(frozen=True)
class GradientNorms:
    """Norms of gradients in T minibatches, at least one."""

    values: Floats
    """``[T, ...]``."""
    parameters: Ints
    """How many parameters each gradient is of, ``[...]``."""

    @property
    def root_mean_squares(self) -> Floats:
        """Per parameter, ``[T, ...]``."""
        return self.values / np.sqrt(np.maximum(self.parameters, 1))


def assess_health(seeds: GradientNorms, incumbents: GradientNorms) -> HealthTable:
    """The health of seeds, ``[..., S]``, from norms ``[T, ..., S]`` and those of their incumbents, ``[T, ..., 1]``."""
    scale = incumbents.root_mean_squares
    usable = np.isfinite(scale) & (scale > 0)
    with np.errstate(over="ignore"):
        ratio = seeds.root_mean_squares / np.where(usable, scale, np.nan)
    vanished = (seeds.values == 0) | (ratio < VANISHED)
    exploded = ~np.isfinite(seeds.values) | (ratio > EXPLODED)
    compared = np.isfinite(ratio)
    count: Ints = compared.sum(0)
    total = np.where(compared, ratio, 0.0).sum(0)
    return HealthTable(
        np.full(count.shape, len(ratio)),
        seeds.values.mean(0),
        vanished.mean(0),
        exploded.mean(0),
        np.divide(total, count, out=np.full(count.shape, np.nan), where=count > 0),
    )


def row_norms(gradients: Sequence[Tensor]) -> Tensor:
    """Norms ``[R]`` of the rows' gradients, given as ``[r, P]`` per block in the order of the population's blocks."""
    hosts, *banks = gradients
    # Two formulas, which differ in the last bit: policies see these figures and were trained with just these.
    return torch.cat([hosts.square().sum(1).sqrt(), *(bank.norm(dim=1) for bank in banks)])


def split_by_slot(population: Population, rows: Floats) -> tuple[Floats, Floats]:
    """Figures ``[T, R]`` of the population's rows as those of hosts ``[T, E]`` and of seeds ``[T, E, S]``.

    The latter are 0 in slots without a seed.
    """
    hosts, seeds = np.split(rows, [population.size], axis=1)
    slots = np.zeros((len(rows), *population.table.stage.shape))
    first = 0
    for kind, bank in population.banks.items():
        slots[:, bank.block.owners.numpy(), kind.slot] = seeds[:, first : first + len(bank)]
        first += len(bank)
    return hosts, slots


def measure_seed_health(population: Population, hosts: Floats, seeds: Floats, learning: Bools) -> HealthTable:
    """The health ``[E, S]`` of the seeds that are ``learning``, bool ``[E, S]``, from norms ``[T, E]``, ``[T, E, S]``.

    The incumbents of a network are its host and its fossils; fossils themselves are compared with all of them.
    """
    table = population.table
    fossils = table.stage == Stage.FOSSILIZED
    incumbents = GradientNorms(
        np.sqrt(hosts**2 + np.where(fossils, seeds**2, 0.0).sum(2))[..., None],
        (population.host_parameters + population.parameters_in(fossils))[:, None],
    )
    health = assess_health(GradientNorms(seeds, population.specs.costs.parameters.resident(table)), incumbents)
    return replace_where(learning, HealthTable.none(*table.stage.shape), health)


_CPU = torch.device("cpu")


class GradientHealth:
    """Watches the gradients of seeds beside those of what already counts in their model.

    ```python
    health = GradientHealth(model.host.parameters(), {name: seed.parameters() for name, seed in model.seeds.items()})
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss(model(inputs), labels).backward()
        health.observe()
        optimizer.step()
    found = health.report()
    ```

    Parameters that need no gradient when it is made are left out: frozen ones say nothing. Of the others, one whose
    ``grad`` is None counts as one with a gradient of zero. When seeds come or go, make another one. Until the report, a
    few numbers are kept per minibatch.

    Args:
        incumbents: Parameters of the host and of fossilized seeds.
        seeds: Parameters of each seed, by name; a fossilized one may be among them as well.

    Raises:
        ConfigError: a seed has no parameter that needs a gradient.
    """

    def __init__(self, incumbents: Iterable[nn.Parameter], seeds: Mapping[str, Iterable[nn.Parameter]]) -> None:
        learning = {name: _select_learning(parameters) for name, parameters in seeds.items()}
        for name, parameters in learning.items():
            if not parameters:
                raise ConfigError(f"seed {name!r} has no parameter that needs a gradient: leave it out, or unfreeze it")
        self._names = list(learning)
        self._groups = [_select_learning(incumbents), *learning.values()]
        """The incumbents' parameters and those of each seed."""
        self._norms: list[Tensor] = []
        """Norms by group, ``[1 + S]`` per minibatch."""

    @torch.no_grad()
    def observe(self) -> None:
        """Take in the gradients of a minibatch: after ``backward()``, before clipping. Waits for no device."""
        device = next((parameter.device for group in self._groups for parameter in group), _CPU)
        self._norms.append(torch.stack([_compute_norm(group, device) for group in self._groups]))

    def report(self) -> dict[str, SeedHealth]:
        """The health of each seed over the minibatches since the last report."""
        table = self._assess() if self._norms else HealthTable.none(len(self._names))
        self._norms.clear()
        return {name: table.at(place) for place, name in enumerate(self._names)}

    def _assess(self) -> HealthTable:
        norms = torch.stack(self._norms).to("cpu", torch.float64).numpy()
        sizes = np.array([sum(parameter.numel() for parameter in group) for group in self._groups])
        return assess_health(GradientNorms(norms[:, 1:], sizes[1:]), GradientNorms(norms[:, :1], sizes[:1]))


def _select_learning(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if parameter.requires_grad]


def _compute_norm(parameters: Sequence[nn.Parameter], device: torch.device) -> Tensor:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return get_total_norm(gradients).to(device) if gradients else torch.zeros((), device=device)
