"""A growing model shows how its host is called, and what else the host has to offer; so do its copies."""

import copy
import inspect
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import esper
from esper.growth.model import GrowingModel
from factories import Host, every_host, plant


class Scaled(nn.Module):
    """Says more of itself than its outputs."""

    accepts_loss_kwargs = False
    _private = 1

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.config = {"width": 8}

    def forward(self, inputs: Tensor, labels: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        return self.last(self.first(inputs).relu()) * scale

    def predict(self, inputs: Tensor) -> Tensor:
        return self(inputs).argmax(1)


def grown() -> GrowingModel:
    torch.manual_seed(0)
    model = esper.attach(Scaled(), {"first": ["mlp"]}, torch.zeros(2, 4))
    plant(model, "first", "mlp")
    return model


def by_pickle(model: GrowingModel) -> GrowingModel:
    return pickle.loads(pickle.dumps(model))


@every_host
def test_the_signature_is_the_host_s(host: Host) -> None:
    model, alone = host.attached(), host.network()
    assert inspect.signature(model.forward) == inspect.signature(alone.forward)
    assert inspect.signature(type(model).forward) == inspect.signature(type(alone).forward)
    assert isinstance(model, GrowingModel)
    assert type(alone).__name__ in type(model).__name__


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, by_pickle], ids=["copy", "deepcopy", "pickle"])
def test_copies_are_called_alike_and_compute_alike(copied: Callable[[GrowingModel], GrowingModel]) -> None:
    model = grown()
    other = copied(model)
    x = torch.ones(3, 4)
    assert type(other) is type(model)
    assert inspect.signature(other.forward) == inspect.signature(model.host.forward)
    assert torch.equal(other(x, scale=2.0), model(x, scale=2.0))
    if copied is not copy.copy:  # a forward that belonged to the first would still see this
        nn.init.zeros_(model.host.last.weight)
        assert not torch.equal(other(x), model(x))


def test_a_compiled_model_is_called_alike() -> None:
    model = grown()
    compiled = torch.compile(model, backend="eager")
    x = torch.ones(3, 4)
    assert torch.equal(compiled(x, scale=2.0), model(x, scale=2.0))


def test_what_only_the_host_has_is_read_from_it() -> None:
    model = grown()
    x = torch.randn(5, 4)
    assert model.config is model.host.config
    assert model.accepts_loss_kwargs is False
    assert torch.equal(model.predict(x), model(x).argmax(1))
    with pytest.raises(AttributeError, match="'GrowingScaled' object has no attribute 'nothing'"):
        model.nothing  # noqa: B018
    with pytest.raises(AttributeError):
        model._private  # noqa: B018
