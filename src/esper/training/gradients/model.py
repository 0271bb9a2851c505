"""The health of one model's seeds, in a training loop of your own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from esper.errors import ConfigError
from esper.training.gradients.health import GradientNorms, HealthTable, SeedHealth, judged

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
        learning = {name: _learning(parameters) for name, parameters in seeds.items()}
        for name, parameters in learning.items():
            if not parameters:
                raise ConfigError(f"seed {name!r} has no parameter that needs a gradient: leave it out, or unfreeze it")
        self._names = list(learning)
        self._groups = [_learning(incumbents), *learning.values()]
        """The incumbents' parameters and those of each seed."""
        self._norms: list[Tensor] = []
        """Of the groups, ``[1 + S]`` per minibatch."""

    @torch.no_grad()
    def observe(self) -> None:
        """Take in the gradients of a minibatch: after ``backward()``, before clipping. Waits for no device."""
        device = next((parameter.device for group in self._groups for parameter in group), _CPU)
        self._norms.append(torch.stack([_norm(group, device) for group in self._groups]))

    def report(self) -> dict[str, SeedHealth]:
        """The health of each seed over the minibatches since the last report."""
        table = self._judged() if self._norms else HealthTable.none(len(self._names))
        self._norms.clear()
        return {name: table.at(place) for place, name in enumerate(self._names)}

    def _judged(self) -> HealthTable:
        norms = torch.stack(self._norms).to("cpu", torch.float64).numpy()
        sizes = np.array([sum(parameter.numel() for parameter in group) for group in self._groups])
        return judged(GradientNorms(norms[:, 1:], sizes[1:]), GradientNorms(norms[:, :1], sizes[:1]))


def _learning(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if parameter.requires_grad]


def _norm(parameters: Sequence[nn.Parameter], device: torch.device) -> Tensor:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return get_total_norm(gradients).to(device) if gradients else torch.zeros((), device=device)
