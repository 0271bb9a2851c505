"""The slow, obvious health of gradients: from the ``grad`` of single modules, to which `HealthTable` is held."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from esper.engine.gradients import GradientNorms, HealthTable, compare_gradients
from esper.errors import ConfigError


@dataclass(frozen=True)
class SeedHealth:
    """The fields of `HealthTable` for one seed."""

    minibatches: int
    norm: float
    vanished: float
    exploded: float
    ratio: float


def health_at(table: HealthTable, *place: int) -> SeedHealth:
    """The health of one seed of a table."""
    return SeedHealth(**{name: array[place].item() for name, array in vars(table).items()})


class GradientHealth:
    """Watches the gradients of seeds beside those of what already counts in their model.

    Parameters that need no gradient when it is made are left out. Of the others, one whose ``grad`` is None counts as
    one with a gradient of zero. When seeds come or go, make another one.

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
        """Record the gradients of a minibatch: after ``backward()``, before clipping. Waits for no device."""
        device = next((parameter.device for group in self._groups for parameter in group), _CPU)
        self._norms.append(torch.stack([_compute_norm(group, device) for group in self._groups]))

    def report(self) -> dict[str, SeedHealth]:
        """The health of each seed over the minibatches since the last report."""
        table = self._assess() if self._norms else HealthTable.none(len(self._names))
        self._norms.clear()
        return {name: health_at(table, place) for place, name in enumerate(self._names)}

    def _assess(self) -> HealthTable:
        norms = torch.stack(self._norms).to("cpu", torch.float64).numpy()
        sizes = np.array([sum(parameter.numel() for parameter in group) for group in self._groups])
        return compare_gradients(GradientNorms(norms[:, 1:], sizes[1:]), GradientNorms(norms[:, :1], sizes[:1]))


_CPU = torch.device("cpu")


def _select_learning(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if parameter.requires_grad]


def _compute_norm(parameters: Sequence[nn.Parameter], device: torch.device) -> Tensor:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return get_total_norm(gradients).to(device) if gradients else torch.zeros((), device=device)
