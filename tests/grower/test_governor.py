"""The snapshot of one model, and the governor that restores it."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import esper
from esper.engine.engine import GrowthConfig
from esper.engine.governor import Governor, GovernorSettings, Trouble, skill
from esper.errors import DivergedError
from esper.grower import Grower
from esper.grower.governor import LearningCheck, ModelSnapshot, Rollback, describe_rollback
from esper.grower.scores import Scores
from esper.growth.blueprints import registry
from esper.growth.model import GrowingModel
from esper.lifecycle.transitions import Transitions
from esper.serialization import pack_state
from factories import CLASSES, Loop, mlp, numbers, score
from growth.blueprint_cases import Broken

EVERYONE, NOBODY = np.ones(1, np.bool_), np.zeros(1, np.bool_)
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01),
}


class Host(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.dropout = nn.Dropout(0.3)
        for layer in (self.first, self.last):
            nn.init.normal_(layer.weight, std=0.5, generator=generator)
            nn.init.zeros_(layer.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.dropout(self.norm(self.first(inputs)).relu()))


def attach() -> GrowingModel:
    return GrowingModel(Host(), ("first", "norm"), torch.ones(4, 6))


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(16, 6, generator=generator)
    return inputs, inputs[:, :3].argmax(1)


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, spoil: float = 0.0) -> float:
    inputs, labels = batch(seed)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs + spoil), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


class ModelGovernor:
    """A governor of one model without a lifecycle table, as its own network."""

    size = 1

    def __init__(
        self,
        model: GrowingModel,
        optimizer: torch.optim.Optimizer,
        settings: GovernorSettings | None = None,
        classes: int | None = None,
    ) -> None:
        self.copies, self.classes = ModelSnapshot(model, optimizer), classes
        self.governor = Governor(self, settings or GovernorSettings())
        self.learning = LearningCheck(self.governor.settings, Scores(None, None, classes, None))
        self.pruned: list[str] = []

    def snapshot(self, rows: np.ndarray) -> None:
        self.copies.take()

    def restore(self, rows: np.ndarray) -> Transitions:
        before = self.copies.model.seeds
        self.copies.restore()
        self.pruned = sorted(before.keys() - self.copies.model.seeds.keys())
        return Transitions.none()

    def check(self, loss: float, accuracy: float = math.nan) -> Rollback | None:
        finite = self.copies.is_finite() and math.isfinite(loss)
        found = skill(np.array([[accuracy if self.classes else math.nan]]), self.classes or 2)
        intervention = self.governor.check(np.array([loss]), found, np.array([finite]), None, EVERYONE)
        if intervention.rows[0] and self.pruned:
            self.governor.expect_change(EVERYONE, forget_skill=NOBODY)
        self.learning.require_rollbacks_left(self.governor, intervention, loss)
        rollback = describe_rollback(intervention, loss, ())
        return None if rollback is None else replace(rollback, pruned=tuple(self.pruned))  # there is no table of slots

    def state_dict(self) -> dict[str, Any]:
        parts = {"snapshot": self.copies, "governor": self.governor, "learning": self.learning}
        return {name: part.state_dict() for name, part in parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.copies.load_state_dict(state["snapshot"])
        self.governor.load_state_dict(state["governor"])
        self.learning.load_state_dict(state["learning"])


@pytest.fixture(params=OPTIMIZERS)
def make(request: pytest.FixtureRequest) -> MakeOptimizer:
    return OPTIMIZERS[request.param]


def test_a_blow_up_is_undone_in_place(make: MakeOptimizer) -> None:
    torch.manual_seed(0)
    model = attach()
    optimizer = make(model)
    governor = ModelGovernor(model, optimizer)
    for seed in range(3):
        assert not governor.check(learn(model, optimizer, seed))
    kept, identities = copy.deepcopy(model.state_dict()), [id(parameter) for parameter in model.parameters()]
    random, moments = torch.get_rng_state(), pack_state(optimizer.state_dict())
    loss = learn(model, optimizer, 3, spoil=math.nan)
    assert not all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values())
    done = governor.check(loss)
    assert done is not None
    assert [id(parameter) for parameter in model.parameters()] == identities
    assert {id(one) for group in optimizer.param_groups for one in group["params"]} == set(identities)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, kept[name]), name
    assert kept["host.norm.num_batches_tracked"] == 3
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(pack_state(optimizer.state_dict()), moments)
    assert (done.trouble, done.pruned) == (Trouble.NOT_FINITE, ())
    assert math.isnan(done.loss)
    assert done.loss_restored > 0


def test_the_first_step_after_a_rollback_is_that_after_the_snapshot(make: MakeOptimizer) -> None:
    torch.manual_seed(0)
    model = attach()
    optimizer = make(model)
    snapshot = ModelSnapshot(model, optimizer)
    for seed in range(4):
        learn(model, optimizer, seed)
    snapshot.take()
    random = torch.get_rng_state()
    twin = copy.deepcopy(model)
    twin_optimizer = make(twin)
    twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    learn(model, optimizer, 4, spoil=math.inf)
    for _ in range(2):  # a restored snapshot can be restored again
        snapshot.restore()
        learn(model, optimizer, 5)
    torch.set_rng_state(random)
    learn(twin, twin_optimizer, 5)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, twin.state_dict()[name]), name


def test_what_an_optimizer_keeps_in_its_groups_returns_but_not_the_learning_rate() -> None:
    model = attach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer.param_groups[0]["k"] = 3
    snapshot = ModelSnapshot(model, optimizer)
    snapshot.take()
    optimizer.param_groups[0] |= {"k": 5, "lr": 0.1}
    snapshot.restore()
    assert (optimizer.param_groups[0]["k"], optimizer.param_groups[0]["lr"]) == (3, 0.1)


def test_the_state_of_what_is_not_in_the_model_is_named() -> None:
    model, apart = attach(), nn.Linear(2, 2)
    optimizer = torch.optim.AdamW([*model.parameters(), *apart.parameters()])
    snapshot = ModelSnapshot(model, optimizer)
    snapshot.take()
    apart(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.warns(UserWarning, match="a state of what is not in the growing model"):
        snapshot.restore()
    assert list(optimizer.state) == list(apart.parameters())


def test_snapshots_are_taken_on_good_vitals_only() -> None:
    model = attach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    governor = ModelGovernor(model, optimizer)
    for value, loss in ((1.0, 1.0), (2.0, 1.0), (3.0, 0.9), (4.0, 1.5), (5.0, 9.0)):
        nn.init.constant_(model.host.last.bias, value)
        assert governor.check(loss) is None
    rollback = governor.check(math.nan)
    assert rollback is not None
    assert rollback.loss_restored == pytest.approx(0.9)
    assert model.host.last.bias.tolist() == [3.0] * 3


def test_after_a_rollback_the_losses_and_the_skill_are_usual_that_were_so_at_the_snapshot() -> None:
    model = attach()
    governor = ModelGovernor(model, torch.optim.SGD(model.parameters(), lr=0.0), classes=3)
    for _ in range(4):
        assert not governor.check(1.0, 0.8)
    assert troubles([governor.check(math.nan, 0.8)]) == [Trouble.NOT_FINITE]
    assert troubles([governor.check(9.0, 0.5) for _ in range(3)]) == [None, None, Trouble.EXPLODED]
    assert troubles([governor.check(1.0, 0.33) for _ in range(3)]) == [None, None, Trouble.COLLAPSED]


def troubles(rollbacks: list[Rollback | None]) -> list[Trouble | None]:
    return [None if rollback is None else rollback.trouble for rollback in rollbacks]


def test_an_optimizer_that_overflowed_is_seen() -> None:
    model = attach()
    optimizer = torch.optim.AdamW(model.parameters())
    governor = ModelGovernor(model, optimizer)
    loss = learn(model, optimizer, 0)
    optimizer.state[model.host.last.bias]["exp_avg_sq"].fill_(math.inf)
    assert troubles([governor.check(loss)]) == [Trouble.NOT_FINITE]


def test_rollbacks_are_bounded() -> None:
    model = attach()
    optimizer = torch.optim.AdamW(model.parameters())
    governor = ModelGovernor(model, optimizer, GovernorSettings(max_rollbacks=2))
    for _ in range(2):
        assert governor.check(math.nan)
    assert governor.governor.rollbacks.tolist() == [2]
    learn(model, optimizer, 0, spoil=math.nan)
    message = r"again \(.* is infinite or not a number\) after 2 rollbacks without .* lower the learning rate"
    with pytest.raises(DivergedError, match=message):
        governor.check(math.nan)
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def test_a_model_that_has_regained_its_loss_has_all_rollbacks_again() -> None:
    """Twenty bad batches, each of them overcome, end no training; a model that stays worse is ended."""
    model = attach()
    governor = ModelGovernor(model, torch.optim.SGD(model.parameters(), lr=0.0), GovernorSettings(max_rollbacks=1))
    for _ in range(20):
        assert governor.check(1.0) is None
        assert governor.check(math.nan) is not None
    assert governor.check(1.2) is None
    with pytest.raises(DivergedError, match="after 1 rollbacks without recovering"):
        governor.check(math.nan)


def test_after_a_rollback_to_before_any_check_every_finite_loss_is_a_recovery() -> None:
    model = attach()
    governor = ModelGovernor(model, torch.optim.SGD(model.parameters(), lr=0.0), GovernorSettings(max_rollbacks=1))
    for _ in range(3):
        assert governor.check(math.nan) is not None
        assert governor.check(5.0) is None


@pytest.mark.parametrize(("saved", "here"), [(2, 1), (1, 2)])
def test_a_snapshot_is_loaded_where_there_are_other_generators(
    saved: int, here: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a model goes from a GPU to the CPU, or back: what both have is put back, and the rest is left alone."""

    def snapshot(count: int) -> tuple[ModelSnapshot, list[torch.Generator]]:
        model, generators = attach(), [torch.Generator().manual_seed(count + place) for place in range(count)]
        monkeypatch.setattr("esper.grower.governor.global_generators", lambda _: generators)
        # A group may hold what no file holds, here a number of numpy's.
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=np.float64(0.01))
        return ModelSnapshot(model, optimizer), generators

    (first, sources), (other, generators) = snapshot(saved), snapshot(here)
    first.take()
    other.load_state_dict(first.state_dict())
    untouched = [generator.get_state() for generator in generators[saved:]]
    other.restore()
    assert torch.equal(generators[0].get_state(), sources[0].get_state())
    assert all(torch.equal(one.get_state(), state) for one, state in zip(generators[saved:], untouched, strict=True))
    assert all(torch.equal(*pair) for pair in zip(first.model.parameters(), other.model.parameters(), strict=True))


class Growing:
    """A model with a slot behind each hidden layer, whose optimizer owns what has grown."""

    def __init__(self) -> None:
        self.model = attach()
        self.optimizer = torch.optim.AdamW(self.model.parameter_groups(lr=0.01))
        self.model.link(self.optimizer)
        self.governor = ModelGovernor(self.model, self.optimizer, classes=3)

    def germinate(self, slot: str, alpha: float = 1.0) -> None:
        seed = self.model.slots[slot].germinate("mlp", torch.Generator().manual_seed(3))
        seed.alpha.fill_(alpha)

    def learn(self, seed: int, spoil: float = 0.0) -> Rollback | None:
        return self.governor.check(learn(self.model, self.optimizer, seed, spoil))

    def owned(self) -> set[int]:
        return {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}


def pruned(rollback: Rollback | None) -> tuple[str, ...]:
    assert rollback is not None
    return rollback.pruned


def test_live_seeds_are_pruned_and_fossils_restored() -> None:
    grown = Growing()
    grown.germinate("first")
    grown.germinate("norm")
    grown.model.slots["first"].fossilize()
    grown.learn(0)
    kept = copy.deepcopy(grown.model.seeds["first"].state_dict())
    assert pruned(grown.learn(1, math.nan)) == ("norm",)
    assert set(grown.model.seeds) == {"first"}
    for name, tensor in grown.model.seeds["first"].state_dict().items():
        assert torch.equal(tensor, kept[name])
    assert grown.owned() == {id(parameter) for parameter in grown.model.parameters()}
    assert not grown.learn(2)


def test_a_seed_fossilized_since_the_snapshot_stays_at_its_alpha() -> None:
    grown = Growing()
    grown.germinate("first", alpha=0.3)
    grown.learn(0)
    seed = grown.model.seeds["first"]
    kept = copy.deepcopy(seed.blueprint.state_dict())
    seed.alpha.fill_(1.0)
    grown.model.slots["first"].fossilize()
    assert pruned(grown.learn(1, math.nan)) == ()
    assert seed.alpha == 1.0
    for name, tensor in seed.blueprint.state_dict().items():
        assert torch.equal(tensor, kept[name])


def test_a_fossil_that_the_snapshot_lacks_goes() -> None:
    grown = Growing()
    grown.learn(0)
    grown.germinate("first")
    grown.model.slots["first"].fossilize()
    assert pruned(grown.learn(1, math.nan)) == ("first",)
    assert grown.owned() == {id(parameter) for parameter in grown.model.parameters()}


def test_it_goes_on_where_it_was_saved() -> None:
    """The window of losses, the rollbacks and the snapshot come back; the model is what its own state dict has."""
    grown = Growing()
    for seed in range(4):
        grown.learn(seed)
    grown.learn(4, math.nan)
    grown.learn(5)
    saved, model = copy.deepcopy(grown.governor.state_dict()), copy.deepcopy(grown.model.state_dict())
    twin = Growing()
    twin.model.load_state_dict(model)
    twin.governor.load_state_dict(saved)
    for one in (grown, twin):
        nn.init.zeros_(one.model.host.last.bias)
    checks = [(1.0, 0.8), *[(40.0, 0.5)] * 4]
    first, other = ([one.governor.check(*check) for check in checks] for one in (grown, twin))
    assert [rollback is not None for rollback in first].count(True) == 1
    assert first == other
    assert twin.governor.governor.rollbacks.tolist() == grown.governor.governor.rollbacks.tolist() == [1]
    for name, tensor in grown.model.state_dict().items():
        assert torch.equal(tensor, twin.model.state_dict()[name]), name


def test_a_seed_that_cannot_be_made_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._registry, Broken.name, Broken)
    model = esper.attach(mlp(), {"0": [Broken.name]}, numbers(7))
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=0.01))
    grower = Grower(
        model, optimizer, controller="heuristic", evaluate=lambda one: score(one, numbers(7)), classes=CLASSES
    )
    found = model(numbers(7)).square().mean()
    found.backward()
    optimizer.step()
    table, state, keys = copy.deepcopy(grower.network.table), optimizer.state_dict(), model.state_dict().keys()
    with pytest.raises(MemoryError):
        grower.step(train_loss=found)
    assert model.seeds == {}
    assert model.state_dict().keys() == keys
    assert optimizer.state_dict()["param_groups"] == state["param_groups"]
    assert optimizer.state_dict()["state"].keys() == state["state"].keys()
    assert np.array_equal(grower.network.table.stage, table.stage)
    assert grower.network.germinations.tolist() == [0]


def test_the_rollback_that_is_too_many_leaves_sound_books() -> None:
    loop = Loop("all_at_start", growth=GrowthConfig(governor=GovernorSettings(max_rollbacks=0)))
    for _ in range(2):
        loop.epoch()
    assert loop.model.seeds
    with pytest.raises(DivergedError, match="is infinite or not a number"):
        loop.epoch(lambda _: math.nan)
    assert loop.model.seeds == {}
    assert not loop.grower.network.table.owning.any()
    loop.epoch()
