"""The slow, obvious health of gradients: from the ``grad`` of single modules, to which `HealthTable` is held."""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from esper.engine.gradients import GradientHealthSettings, HealthTable

NAN = float("nan")


@dataclass(frozen=True)
class SeedHealth:
    """The fields of `HealthTable` for one seed."""

    minibatches: int
    norm: float
    vanished: float
    exploded: float
    ratio: float


NOT_LEARNING = SeedHealth(0, 0.0, 0.0, 0.0, NAN)


def health_at(table: HealthTable, *place: int) -> SeedHealth:
    """The health of one seed of a table."""
    return SeedHealth(**{name: array[place].item() for name, array in vars(table).items()})


class GradientReference:
    """The health of the seeds of one network, number by number.

    Args:
        incumbents: The host, and fossils.
        seeds: Modules that learn, by any key; fossils may be among them.
        settings: When a gradient has vanished or exploded.
    """

    def __init__(
        self,
        incumbents: Iterable[nn.Module],
        seeds: Mapping[Hashable, nn.Module],
        settings: GradientHealthSettings = GradientHealthSettings(),  # noqa: B008 (immutable)
    ) -> None:
        self._incumbents, self._seeds, self._settings = list(incumbents), dict(seeds), settings
        self._norms: dict[Hashable, list[float]] = {key: [] for key in seeds}
        self._ratios: dict[Hashable, list[float]] = {key: [] for key in seeds}

    def observe(self) -> None:
        """Record the gradients of a minibatch, after ``backward()`` and before they are clipped."""
        norm, count = _measure(self._incumbents)
        for key, seed in self._seeds.items():
            own_norm, own_count = _measure([seed])
            usable = math.isfinite(norm) and norm > 0
            self._norms[key].append(own_norm)
            self._ratios[key].append((own_norm / own_count**0.5) / (norm / count**0.5) if usable else NAN)

    def report(self) -> dict[Hashable, SeedHealth]:
        """The health of each seed over all minibatches, by its key."""
        return {key: self._assess(self._norms[key], self._ratios[key]) for key in self._seeds}

    def _assess(self, norms: Sequence[float], ratios: Sequence[float]) -> SeedHealth:
        vanished = exploded = 0
        for norm, ratio in zip(norms, ratios, strict=True):
            vanished += norm == 0 or ratio < self._settings.vanished_ratio
            exploded += not math.isfinite(norm) or ratio > self._settings.exploded_ratio
        comparable = [ratio for ratio in ratios if math.isfinite(ratio)]
        mean = sum(comparable) / len(comparable) if comparable else NAN
        return SeedHealth(len(norms), sum(norms) / len(norms), vanished / len(norms), exploded / len(norms), mean)


def _measure(modules: Iterable[nn.Module]) -> tuple[float, int]:
    """Norm of the gradient of all their parameters that learn, and how many numbers these are."""
    squares, count = 0.0, 0
    for module in modules:
        for parameter in module.parameters():
            if parameter.requires_grad:
                count += parameter.numel()
                if parameter.grad is not None:  # one without a gradient counts as one of zeros
                    squares += float(parameter.grad.double().square().sum())
    return squares**0.5, count
