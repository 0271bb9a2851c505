"""What training and measuring take, counted by hand, and growth that ends with its budget."""

import copy
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import esper
from esper.control.rules import Never
from esper.errors import ConfigError
from esper.grower.spending import Spending
from esper.growth.model import GrowingModel
from factories import Decomposed

WIDTH, CLASSES, EXAMPLES = 6, 3, 10
HOST = 2 * (4 * WIDTH + WIDTH * CLASSES)


def host() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))


def inputs(count: int = EXAMPLES) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(0))


def attached(**options: Any) -> GrowingModel:
    return esper.attach(host(), {"1": ["mlp", "norm"]}, inputs(2), **options)


def spent(model: GrowingModel) -> tuple[Spending, int]:
    """A count, and what a seed takes that is planted."""
    spending = Spending(model)
    seed = model.slots["1"].germinate("mlp", alpha=1.0)
    return spending, seed.flops_at(model.slots["1"].site)


@pytest.mark.parametrize("training", [True, False])
def test_a_pass_that_trains_takes_three_times_as_much_in_whatever_mode(training: bool) -> None:
    model = attached().train(training)
    spending, seed = spent(model)
    with torch.no_grad():
        model(inputs(1))
    assert spending.flops == HOST + seed
    spending, loss = Spending(model), model(inputs()).sum()
    assert spending.flops == EXAMPLES * (HOST + seed), "nobody differentiated yet"
    loss.backward(retain_graph=True)
    assert spending.flops == EXAMPLES * 3 * (HOST + seed)
    loss.backward()
    assert spending.flops == EXAMPLES * 5 * (HOST + seed)


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_frozen_host_is_differentiated_by_its_features_alone_and_not_without_seeds(by_hand: bool) -> None:
    model = attached(freeze_host=not by_hand)
    model.host.requires_grad_(False)
    spending = Spending(model)
    loss = model(inputs()).sum()
    if not by_hand:  # by what a slot adds, so that a loop need not know whether anything grows
        loss.backward()
    assert spending.flops == EXAMPLES * HOST
    model(inputs().requires_grad_()).sum().backward()
    assert spending.flops == EXAMPLES * 3 * HOST, "once more for the features, as before it something learns"
    again, seed = spent(model)
    model(inputs()).sum().backward()
    assert again.flops == EXAMPLES * (2 * HOST + 3 * seed)


class Answer:
    """Not looked into."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


@dataclass
class Parts:
    """Looked into."""

    logits: Tensor


class Wrapping(nn.Module):
    """Returns its answer in some form, and perhaps a parameter beside it."""

    def __init__(self, form: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.net, self.form, self.scale = host(), form, nn.Parameter(torch.ones(()))

    def forward(self, inputs: Tensor) -> Any:
        return self.form(self.net(inputs), self.scale)


@pytest.mark.parametrize(
    ("form", "take"),
    [
        (lambda logits, _: (None, [logits, 3]), lambda answer: answer[1][0]),
        (lambda logits, scale: {"scale": scale, "logits": logits}, lambda answer: answer["logits"]),
        (lambda logits, _: Parts(logits), lambda answer: answer.logits),
        (lambda logits, _: Answer(logits), lambda answer: answer.logits),
    ],
    ids=["tuple", "mapping", "dataclass", "of its own"],
)
def test_a_backward_pass_is_counted_once_whatever_the_host_returns(form: Any, take: Any) -> None:
    model = esper.attach(Wrapping(form), {"net.1": ["mlp"]}, inputs(2)).eval()
    spending = Spending(model)
    for passes in (3, 6):
        take(model(inputs())).sum().backward()
        assert spending.flops == EXAMPLES * passes * HOST
    with torch.no_grad():
        model(inputs())
    assert spending.flops == EXAMPLES * 7 * HOST
    assert not model.host.get_parameter("scale")._backward_hooks


def test_what_computes_parts_once_more_or_alone_is_not_counted() -> None:
    model = attached()
    spending = Spending(model)
    model.host[1](inputs())
    assert spending.flops == 0
    model.host[0].forward = partial(checkpoint, model.host[0].forward, use_reentrant=False)
    model(inputs()).sum().backward()
    assert spending.flops == EXAMPLES * 3 * HOST


def test_backward_passes_of_pickles_and_copies_are_their_own() -> None:
    model = attached()
    total = Spending(model)
    model(inputs()).sum().backward()
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        own = Spending(made)
        made(inputs()).sum().backward()
        assert own.flops == EXAMPLES * 3 * HOST
    assert total.flops == EXAMPLES * 3 * HOST


def test_longer_inputs_take_more() -> None:
    tokens = nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU())
    model = esper.attach(tokens, {"1": ["norm"]}, torch.randn(2, 5, 4)).eval()
    spending = Spending(model)
    model(torch.randn(3, 10, 4))
    assert spending.flops == 3 * 10 * 2 * 4 * WIDTH


def evaluate(model: GrowingModel) -> Tensor:
    model.eval()
    with torch.no_grad():
        return F.cross_entropy(model(inputs()), torch.arange(EXAMPLES) % CLASSES)


def grower_of(model: GrowingModel, controller: Any = "look", **options: Any) -> tuple[esper.Grower, Any]:
    optimizer = torch.optim.SGD(model.parameter_groups(lr=0.1))
    return esper.Grower(
        model, optimizer, controller=controller, evaluate=evaluate, classes=CLASSES, **options
    ), optimizer


def train(model: GrowingModel, optimizer: torch.optim.Optimizer) -> float:
    model.train()
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs()), torch.arange(EXAMPLES) % CLASSES)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def test_training_validation_and_looking_are_counted() -> None:
    model = attached()
    grower, optimizer = grower_of(model, Never())
    grower.step(train_loss=train(model, optimizer))
    # At the first decision evaluate is called twice.
    assert grower.spending.flops == EXAMPLES * (3 + 2) * HOST
    looking, optimizer = grower_of(attached(), "look", horizon=12)
    model = looking.model
    for _ in range(2):
        looking.step(train_loss=train(model, optimizer))
    site = model.slots["1"].site
    kinds = [esper.growth.blueprints.get(name) for name in model.slots["1"].blueprints]
    costs = [kind.cost_at(site) for kind in kinds]
    measured = sum(3 * EXAMPLES * cost.flops + 2 * EXAMPLES**2 * cost.parameters for cost in costs)
    assert looking.spending.flops == EXAMPLES * (2 * 4 + 1) * HOST + measured


def test_growth_ends_when_the_budget_is_spent_and_controllers_see_how_much_is() -> None:
    seen: list[float] = []

    class Watching(Never):
        def act(self, observation: Any, masks: Any, state: Any) -> Any:
            seen.append(float(observation.globals[0, 0]))
            return super().act(observation, masks, state)

    model = attached()
    grower, optimizer = grower_of(model, Watching(), training_flops=EXAMPLES * (5 * 4 + 1) * HOST)
    finished = [grower.step(train_loss=train(model, optimizer)).finished for _ in range(6)]
    assert finished == [False] * 4 + [True] * 2
    assert grower.finished
    assert len(seen) == 4
    assert seen == pytest.approx([5 / 21, 9 / 21, 13 / 21, 17 / 21])


def test_seconds_are_counted_too_and_survive_resumption() -> None:
    model = attached()
    grower, optimizer = grower_of(model, Never(), seconds=1000)
    time.sleep(0.02)
    grower.step(train_loss=train(model, optimizer))
    state, before = grower.state_dict(), grower.spending.seconds
    flops = grower.spending.flops
    assert before >= 0.02
    assert not grower.finished
    resumed, _ = grower_of(attached(), Never(), seconds=1000)
    resumed.load_state_dict(state)
    assert resumed.spending.seconds >= before - 0.01
    assert resumed.spending.flops == flops
    short, _ = grower_of(attached(), Never(), seconds=1e-6)
    assert short.finished


def test_what_cannot_be_counted_is_no_budget() -> None:
    with pytest.warns(UserWarning, match="torch cannot count aten::_linalg_svd in '0'; register the formula"):
        model = esper.attach(nn.Sequential(Decomposed(8, 8), nn.ReLU()), ["1"], torch.randn(2, 8))
    assert model.host_flops is None
    optimizer = torch.optim.SGD(model.parameter_groups(lr=0.1))
    sentence = "FLOPs are unknown, because torch cannot count aten::_linalg_svd in '0': limit decisions"
    with pytest.raises(ConfigError, match=sentence):
        esper.Grower(model, optimizer, controller=Never(), evaluate=lambda _: 1.0, training_flops=1e9)
    grower = esper.Grower(model, optimizer, controller=Never(), evaluate=lambda _: 1.0)
    with pytest.raises(ConfigError, match=sentence):
        _ = grower.spending.flops


def test_one_beside_another_leaves_it_counting() -> None:
    model = esper.attach(host(), {"1": ["mlp"]}, inputs(2))
    first = Spending(model, 1e9)
    second = Spending(model)
    model(inputs())
    assert first.flops == second.flops > 0
    assert first.share > 0
    del second
    before = first.flops
    copy.deepcopy(model)(inputs())
    assert first.flops == before, "a copy is not counted"
    assert not copy.deepcopy(model).input_hook.before_pass


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": nn.Linear(2, 2)}, "give the model that esper.attach returned"),
        ({"training_flops": 0}, "give a number of FLOPs above 0"),
        ({"seconds": -1}, "give a number of seconds above 0"),
        ({"seconds": float("nan")}, "give a number of seconds above 0"),
    ],
)
def test_what_cannot_be_counted_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Spending(**{"model": attached(), **options})


def test_a_compiled_model_is_counted() -> None:
    model = attached()
    spending = Spending(model)
    model.compile(backend="eager")
    model(inputs()).sum().backward()
    assert spending.flops == EXAMPLES * 3 * HOST
