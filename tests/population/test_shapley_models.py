"""What the seeds of one attached model earn, by its user's own measure."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from esper.growth.model import GrowingModel
from esper.population.shapley import attribute_model
from factories import Chain, Layer


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def growing(alphas: dict[str, float]) -> GrowingModel:
    """A host with seeds of these alphas that have something to say."""
    generator = torch.Generator().manual_seed(0)
    model = GrowingModel(stirred(Chain(), generator), ("first", "second"), torch.zeros(2, 4))
    for name, alpha in alphas.items():
        seed = model.slots[name].germinate("mlp", generator)
        seed.alpha.fill_(alpha)
        stirred(seed, generator)
    return model


def stirred(module: nn.Module, generator: torch.Generator) -> nn.Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter, generator=generator)
    return module


def inputs() -> Tensor:
    return torch.randn(20, 4, generator=torch.Generator().manual_seed(1))


def spread(model: GrowingModel) -> float:
    """A measure that knows nothing of seeds."""
    with torch.no_grad():
        return float(model(inputs()).var())


def alphas_of(model: GrowingModel) -> dict[str, float]:
    return {name: float(seed.alpha) for name, seed in model.seeds.items()}


def measured(**alphas: float) -> float:
    """The measure of the model with these alphas in place of its own."""
    model = growing({"first": 0.5, "second": 1.0})
    for name, seed in model.seeds.items():
        seed.alpha.fill_(alphas.get(name, 0.0))
    return spread(model)


def test_values_are_those_of_models_with_their_seeds_taken_out() -> None:
    model = growing({"first": 0.5, "second": 1.0})
    model.slots["second"].fossilize()
    found = attribute_model(model, spread, rng())
    none, first, second, both = measured(), measured(first=0.5), measured(second=1.0), measured(first=0.5, second=1.0)
    synergy = both - first - second + none
    assert abs(synergy) > 1e-3
    assert found.values == pytest.approx({"first": first - none + synergy / 2, "second": second - none + synergy / 2})
    assert found.interactions == pytest.approx({("first", "second"): synergy})
    assert found.errors == {"first": 0.0, "second": 0.0}
    assert (found.host_value, found.full_value) == (pytest.approx(none), pytest.approx(both))


def test_without_seeds_nobody_earns() -> None:
    found = attribute_model(growing({}), spread, rng())
    assert found.values == {}
    assert found.host_value == found.full_value == spread(growing({}))


def test_alphas_are_what_they_were_although_the_measure_fails() -> None:
    alphas = {"first": 0.5, "second": 1.0}
    model = growing(alphas)

    def failing(model: GrowingModel) -> float:
        if alphas_of(model) == {"first": 0.5, "second": 0.0}:
            raise ZeroDivisionError
        return 0.0

    with pytest.raises(ZeroDivisionError):
        attribute_model(model, failing, rng())
    assert alphas_of(model) == alphas


class Eight(nn.Module):
    """More slots than all coalitions can be asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(4) for _ in range(8)))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


def test_many_seeds_are_estimated_and_no_coalition_is_measured_twice() -> None:
    names = [f"layers.{number}" for number in range(8)]
    model = GrowingModel(Eight(), names, torch.zeros(2, 4))
    for name in names:
        model.slots[name].germinate("mlp", torch.Generator()).alpha.fill_(1.0)
    seen: list[tuple[float, ...]] = []

    def weighted(model: GrowingModel) -> float:
        seen.append(tuple(alphas_of(model).values()))
        return sum((place + 1) * alpha for place, alpha in enumerate(seen[-1])) + seen[-1][0] * seen[-1][7]

    found = attribute_model(model, weighted, rng(), pairs=4)
    assert list(found.values.values()) == pytest.approx([1.5, 2, 3, 4, 5, 6, 7, 8.5])
    assert list(found.errors.values()) == pytest.approx([0] * 8)
    assert found.interactions is None
    assert len(seen) == len(set(seen)) <= 2 * 4 * 7 + 2
    assert set(alphas_of(model).values()) == {1.0}
