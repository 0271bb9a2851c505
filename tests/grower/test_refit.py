"""`esper.Refit` in a loop of one's own: seeds on probation are compared with a model that trains on without them."""

from __future__ import annotations

import copy
import gc
import io
import math
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

import esper
from esper import Grower, GrowingModel
from esper.control.rules import Heuristic, HeuristicSettings, Planting, Schedule
from esper.engine.engine import GrowthConfig
from esper.errors import CheckpointError, ConfigError
from esper.grower.refit import REFIT_DECISIONS, SeedlessFork
from esper.growth.persist import plant_structure
from esper.lifecycle.rules import Reason, Rules, evaluate_gates
from esper.lifecycle.table import Stage
from factories import HELD, RINGS, SLOTS, WIDTH, make_data, packed, validate

HORIZON = 20
DECISIONS = 9


def stack(first: nn.Module, after: nn.Module, second: nn.Module) -> nn.Sequential:
    return nn.Sequential(first, after, second, nn.ReLU(), nn.Linear(WIDTH, RINGS))


class Tied(nn.Sequential):
    """With a tensor in two places."""

    def __init__(self) -> None:
        first, second, last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        last.weight = second.weight
        super().__init__(first, nn.ReLU(), second, nn.ReLU(), last, nn.Linear(WIDTH, RINGS))


class Counting(nn.Module):
    """With a buffer that is assigned anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * inputs.detach().mean(0)
        return inputs - self.mean


HOSTS: dict[str, Callable[[], nn.Module]] = {
    "running statistics": lambda: stack(nn.Linear(4, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)),
    "dropout": lambda: stack(nn.Linear(4, WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH)),
    "tied": Tied,
    "parametrized": lambda: stack(weight_norm(nn.Linear(4, WIDTH)), nn.ReLU(), weight_norm(nn.Linear(WIDTH, WIDTH))),
    "assigned buffer": lambda: stack(nn.Linear(4, WIDTH), Counting(), nn.Linear(WIDTH, WIDTH)),
}
BATCHED = "running statistics"


def adam(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-2)


class Training:
    """A model, its optimizer with a schedule, and how it learns."""

    def __init__(
        self,
        host: str = BATCHED,
        optimizer: Callable[[Any], torch.optim.Optimizer] = adam,
        how: str = "plain",
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        self.model = esper.attach(HOSTS[host](), SLOTS, torch.zeros(4, 4))
        self.optimizer = optimizer(self.model.parameter_groups())
        self.how = how
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=how == "scaled")
        self.begin()

    def begin(self) -> None:
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.97)

    def twin(self) -> Training:
        """The same once more, by copies."""
        other = copy.copy(self)
        other.model, other.optimizer, other.scaler = copy.deepcopy((self.model, self.optimizer, self.scaler))
        other.model.link(other.optimizer)
        other.begin()
        return other

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        mixed = torch.autocast("cpu", torch.bfloat16) if self.how == "mixed" else nullcontext()
        with mixed:
            return F.cross_entropy(self.model(inputs), labels)

    def learn(self, beside: Callable[[Tensor, Tensor, Tensor], None]) -> None:
        """Two steps; ``beside`` gets each loss and its minibatch before it is differentiated."""
        self.model.train()
        inputs, labels = make_data()
        for part in (slice(0, 48), slice(48, 96)):
            self.optimizer.zero_grad()
            for half in (slice(0, 24), slice(24, 48)) if self.how == "accumulated" else (slice(48),):
                x, y = inputs[part][half], labels[part][half]
                loss = self.loss(x, y)
                beside(loss, x, y)
                self.scaler.scale(loss / 2 if self.how == "accumulated" else loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()

    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


def planting(*steps: int) -> Schedule:
    """One seed in every slot, after these decisions."""
    return Schedule([Planting(step, place, 0) for place, step in enumerate(steps)], HORIZON)


def grown(training: Training, controller: Any, **options: Any) -> Grower:
    options = {"rules": HELD, "evaluate": esper.Refit(validate), "scaler": training.scaler, **options}
    if not training.scaler.is_enabled():
        options["scaler"] = None
    return Grower(
        training.model,
        training.optimizer,
        controller=controller,
        horizon=HORIZON,
        loss=training.loss,
        **options,
    )


def forked(fork: SeedlessFork, model: GrowingModel) -> dict[str, Tensor]:
    """What the model is where it is the fork."""
    return fork.run(lambda: {name: tensor.detach().clone() for name, tensor in model.state_dict().items()})


class ByHand:
    """A branch of the model without the seed in slot ``0``."""

    def __init__(self, training: Training) -> None:
        self.mine, self._of = training.twin(), training
        self.mine.model.slots["0"].prune()

    def follow(self) -> None:
        """What comes and grows elsewhere, comes and grows here."""
        for name, slot in self._of.model.slots._modules.items():
            own = self.mine.model.slots._modules[name]
            if slot.seed is None or slot.name == "0":
                continue
            if own.seed is None:
                own.occupant = copy.deepcopy(slot.seed)
                own.optimizer_link.add_parameters(own.name, list(own.seed.parameters()))
            own.seed.alpha.copy_(slot.seed.alpha)
            own.seed.requires_grad_(next(slot.seed.parameters()).requires_grad)

    def learn(self, minibatches: list[tuple[Tensor, Tensor, Tensor]]) -> None:
        """As its owner does, of the same minibatches, with the random numbers that each came with."""
        left = iter(minibatches)
        usual = self.mine.loss

        def loss(inputs: Tensor, labels: Tensor) -> Tensor:
            state, x, y = next(left)
            assert torch.equal(x, inputs)
            assert torch.equal(y, labels)
            torch.set_rng_state(state)
            return usual(inputs, labels)

        state = torch.get_rng_state()
        self.mine.loss = loss  # type: ignore[method-assign]
        self.mine.learn(lambda *_: None)
        self.mine.loss = usual  # type: ignore[method-assign]
        torch.set_rng_state(state)


def compared(training: Training, grower: Grower) -> int:
    """Train, and compare the fork with a branch by hand; at how many decisions."""
    hand, checked = None, 0
    for _ in range(DECISIONS + 3):
        seen: list[tuple[Tensor, Tensor, Tensor]] = []

        def beside(loss: Tensor, x: Tensor, y: Tensor, seen: Any = seen) -> None:
            seen.append((torch.get_rng_state(), x, y))
            grower.isolated_backward(loss, x, y)

        training.learn(beside)
        if hand is not None:
            hand.learn(seen)
            expected = hand.mine.tensors()
            found = forked(grower.backend.forks.forks["0"], training.model)
            assert expected.keys() == found.keys()
            for name, tensor in expected.items():
                torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, msg=name)
            with_seed, without = validate(training.model), validate(hand.mine.model)
        decision = grower.step(train_loss=1.0)
        if hand is not None:
            checked += 1
            if checked >= REFIT_DECISIONS:
                assert decision.contributions["0"] == with_seed[1] - without[1]
            else:
                assert "0" not in decision.contributions
            hand.follow()
        elif "0" in grower.backend.forks.forks:
            hand = ByHand(training)
    return checked


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    lambda groups: torch.optim.NAdam(groups, lr=1e-2),
    lambda groups: torch.optim.Adam(groups, lr=torch.tensor(1e-2), foreach=False),
]


@pytest.mark.parametrize(
    ("options", "second"),
    [
        *(({"host": host}, 1) for host in HOSTS),
        *(({"how": how}, 1) for how in ("accumulated", "scaled", "mixed")),
        *(({"optimizer": optimizer}, 1) for optimizer in OPTIMIZERS),
        ({}, 6),  # another seed comes when the fork is there
    ],
)
def test_a_fork_is_a_branch_without_the_seed(options: dict[str, Any], second: int) -> None:
    training = Training(**options)
    assert compared(training, grown(training, planting(0, second))) > REFIT_DECISIONS
    assert training.model.slots["2"].seed is not None


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("how", ["plain", "accumulated", "scaled", "mixed"])
def test_the_model_does_not_notice(host: str, how: str) -> None:
    def run(refit: bool) -> tuple[dict[str, Tensor], list[Any]]:
        training = Training(host, how=how)
        seen: list[Any] = []
        for parameter in training.model.host.parameters():
            parameter.register_hook(lambda gradient: seen.append(gradient.clone()))
        grower = grown(training, planting(0, 1), evaluate=esper.Refit(validate) if refit else validate)
        for _ in range(DECISIONS):
            training.learn(grower.isolated_backward)
            grower.step(train_loss=1.0)
        assert (len(grower.backend.forks.forks) == 2) is refit
        moments = [v for s in training.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
        return training.tensors(), [*seen, *moments, torch.get_rng_state()]

    (mine, all_mine), (theirs, all_theirs) = run(True), run(False)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    torch.testing.assert_close(all_mine, all_theirs, rtol=0, atol=0)


def separable(examples: int, seed: int) -> tuple[Tensor, Tensor]:
    """What the host learns well by itself: the largest of three linear functions."""
    points = torch.randn(examples, 4, generator=torch.Generator().manual_seed(seed))
    return points, (points @ torch.randn(4, RINGS, generator=torch.Generator().manual_seed(9))).argmax(1)


def grow_idle_seed(refit: bool, seed: int, probation: int, decisions: int, **options: Any) -> list[esper.Decision]:
    """A seed in a host that needs none, until it was kept or pruned."""
    torch.manual_seed(seed)
    host = nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, RINGS))
    model = esper.attach(host, {"0": ["mlp"]}, torch.zeros(2, 4))
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=2e-2))
    inputs, labels = separable(1024, 0)

    @torch.no_grad()
    def evaluate(network: nn.Module) -> tuple[float, float]:
        network.eval()
        points, expected = separable(256, 1)
        logits = network(points)
        return float(F.cross_entropy(logits, expected)), float((logits.argmax(1) == expected).float().mean())

    grower = Grower(
        model,
        optimizer,
        esper.Refit(evaluate) if refit else evaluate,
        controller=Heuristic(HeuristicSettings(preferences=((0, 0),), most=1, probation=probation), HORIZON),
        horizon=HORIZON,
        loss=lambda x, y: F.cross_entropy(model(x), y),
        **options,
    )
    made: list[esper.Decision] = []
    for _ in range(decisions):
        model.train()
        for x, y in zip(inputs.split(32), labels.split(32), strict=True):
            loss = F.cross_entropy(model(x), y)
            grower.isolated_backward(loss, x, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        made.append(grower.step(train_loss=loss))
    return made


@pytest.mark.landing
@pytest.mark.parametrize("seed", [0, 1])
def test_a_seed_that_the_host_only_leans_on_is_kept_by_dependence_and_pruned_by_refit(seed: int) -> None:
    for refit, end in ((False, Stage.FOSSILIZED), (True, Stage.PRUNED)):
        decisions = grow_idle_seed(refit, seed, 3, 8, rent=1e-3)
        change = decisions[-1].changes[-1]
        assert (change.before, change.after) == (Stage.HOLDING, end)
        assert (decisions[-1].contributions["0"] > 0.01) is not refit


@pytest.mark.landing
@pytest.mark.parametrize("every", [1, 2, 3])
def test_nothing_decides_on_a_seed_before_its_fork_is_old_enough(every: int) -> None:
    """Neither rules nor gates, and not on what was known of it before its probation."""
    decisions = grow_idle_seed(True, 0, 1, 9, growth=GrowthConfig(counterfactual_every=every))
    changes = [(decision.number, change) for decision in decisions for change in decision.changes]
    entered = next(number for number, change in changes if change.after is Stage.HOLDING)
    left = next(number for number, change in changes if change.before is Stage.HOLDING)
    assert left >= entered + REFIT_DECISIONS
    for decision in decisions[entered : entered + REFIT_DECISIONS - 1]:
        assert "0" not in decision.contributions
    assert "0" in decisions[left - 1].contributions
    usual = grow_idle_seed(False, 0, 1, 6, growth=GrowthConfig(counterfactual_every=1))
    assert usual[entered].changes[0].before is Stage.HOLDING, "by dependence it is decided on at once"


def test_forks_go_when_their_seeds_are_kept_which_needs_a_measurement() -> None:
    training = Training()
    grower = grown(training, "all_at_start", rules=Rules(harm_tolerance=1.0))
    seen, said = set[str](), list[Reason]()
    for _ in range(DECISIONS):
        training.learn(grower.isolated_backward)
        before = grower.network.table
        grower.step(train_loss=1.0)
        if before.stage[0, 0] == Stage.HOLDING:
            gates = evaluate_gates(before, grower.network.measurements, grower.config.rules)
            said.append(Reason(int(gates[0, 0])))
        seen |= grower.backend.forks.forks.keys()
        held = {
            slot for slot, stage in zip(SLOTS, grower.network.table.stage[0], strict=True) if stage == Stage.HOLDING
        }
        assert grower.backend.forks.forks.keys() == held
    assert seen == set(SLOTS)
    assert said[0] is Reason.NOT_MEASURED
    assert said[1] is not Reason.NOT_MEASURED
    assert all(seed.fossilized for seed in training.model.seeds.values())


def test_a_rollback_drops_forks_and_they_begin_anew() -> None:
    training = Training()
    grower = grown(training, planting(0, DECISIONS + 2))
    begun: list[SeedlessFork] = []
    for number in range(HORIZON):
        training.learn(grower.isolated_backward)
        if number == DECISIONS:
            nn.init.constant_(next(training.model.parameters()), math.nan)
        decision = grower.step(train_loss=1.0)
        if number == DECISIONS:
            assert decision.rollback is not None
            assert not grower.backend.forks.forks
        begun += [fork for fork in grower.backend.forks.forks.values() if fork not in begun]
    assert grower.backend.forks.forks.keys() == {"2"}
    assert len(begun) == 2


def resumed(training: Training, grower: Grower, how: Callable[[Training], Grower]) -> tuple[Training, Grower]:
    """In new objects, from what went through a file."""
    file = io.BytesIO()
    whole = {part: vars(training)[part].state_dict() for part in ("model", "optimizer", "scheduler")}
    torch.save({**whole, "grower": grower.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = Training(seed=5)
    plant_structure(other.model, saved["grower"]["seeds"])
    other.model.load_state_dict(saved["model"])
    other.optimizer = adam(other.model.parameter_groups())
    other.begin()
    again = how(other)
    other.optimizer.load_state_dict(saved["optimizer"])
    other.scheduler.load_state_dict(saved["scheduler"])
    again.load_state_dict(saved["grower"])
    return other, again


def test_a_resumed_run_equals_one_that_was_never_cut() -> None:
    training = Training()
    grower = grown(training, planting(0, 7))
    decisions: list[esper.Decision] = []
    states: list[dict[str, Any]] = []

    def go_on(training: Training, grower: Grower) -> None:
        training.learn(grower.isolated_backward)
        decisions.append(grower.step(train_loss=1.0))
        states.append({"grower": packed(grower.state_dict()), "model": training.tensors()})

    while not grower.backend.forks.forks:
        go_on(training, grower)
    other, again = resumed(training, grower, lambda training: grown(training, planting(0, 7)))
    cut = len(decisions)
    for _ in range(DECISIONS):
        go_on(training, grower)
    for _ in range(DECISIONS):
        go_on(other, again)
    never, late = slice(cut, cut + DECISIONS), slice(cut + DECISIONS, None)
    assert [one.contributions for one in decisions[late]] == [one.contributions for one in decisions[never]]
    torch.testing.assert_close(states[late], states[never], rtol=0, atol=0)
    assert len(again.backend.forks.forks) == 2
    with pytest.raises(CheckpointError, match="saved with refit True, but this grower has False"):
        resumed(training, grower, lambda training: grown(training, planting(0, 7), evaluate=validate))


class Closing(torch.optim.SGD):
    """Computes losses by itself, as LBFGS does."""

    def step(self, closure: Callable[[], float]) -> float:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().step()
        return closure()


def test_what_could_not_act_is_refused() -> None:
    training = Training()
    options: dict[str, Any] = {"evaluate": esper.Refit(validate), "horizon": HORIZON}
    backward = r"loss=lambda inputs, labels: .*grower.isolated_backward\(loss, inputs, labels\)"
    with pytest.raises(ConfigError, match=backward):
        Grower(training.model, training.optimizer, **options)
    with pytest.raises(ConfigError, match="controller 'none' has none"):
        Grower(training.model, training.optimizer, controller="none", **options, loss=training.loss)
    closing = Closing(training.model.parameter_groups(lr=0.1))
    with pytest.raises(ConfigError, match="esper.Refit cannot step Closing"):
        Grower(training.model, closing, **options, loss=training.loss)


def on_probation(how: str = "plain", host: str = BATCHED) -> tuple[Training, Grower]:
    """Until the first fork has begun."""
    training = Training(host, how=how)
    grower = grown(training, planting(0, 1))
    while not grower.backend.forks.forks:
        training.learn(grower.isolated_backward)
        grower.step(train_loss=1.0)
    return training, grower


@pytest.mark.landing
def test_no_fork_outlives_the_end() -> None:
    grower = on_probation()[1]
    forks = [weakref.ref(fork) for fork in grower.backend.forks.forks.values()]
    assert forks
    grower.finish()
    gc.collect()
    assert all(fork() is None for fork in forks)


def test_a_fork_that_learns_nothing_is_an_error() -> None:
    training, grower = on_probation()
    before = forked(grower.backend.forks.forks["0"], training.model)
    with torch.no_grad():  # what is only measured teaches nothing
        grower.isolated_backward(training.loss(*make_data()), *make_data())
    torch.testing.assert_close(forked(grower.backend.forks.forks["0"], training.model), before, rtol=0, atol=0)
    with pytest.raises(ConfigError, match="step without a gradient for the fork without the seed in slot '0'"):
        training.learn(lambda *_: None)
    training, grower = on_probation()
    for _ in range(2):  # of a fork that has never trained, and of one that has
        with pytest.raises(ConfigError, match="has not trained since the last decision: call grower.isolated_backward"):
            grower.step(train_loss=1.0)
        training.learn(grower.isolated_backward)
        grower.step(train_loss=1.0)


def test_a_loss_that_does_not_depend_on_the_model_or_on_what_was_taken_from_it_is_refused() -> None:
    training, grower = on_probation()
    inputs, labels = make_data()
    kept = list(training.model.host.parameters())
    loss = training.loss(inputs, labels)
    grower.backend.forks._loss = lambda *_: torch.ones((), requires_grad=True) * 2
    with pytest.raises(ConfigError, match="does not depend on the model without the seed in slot '0'"):
        grower.isolated_backward(loss, inputs, labels)
    grower.backend.forks._loss = lambda x, y: training.loss(x, y) + sum(one.norm() for one in kept)
    with pytest.raises(ConfigError, match="uses parameters that were taken from the growing model earlier"):
        grower.isolated_backward(loss, inputs, labels)


def test_gradients_that_a_loop_does_not_zero_are_kept_in_forks_too() -> None:
    training, grower = on_probation()
    (fork,) = grower.backend.forks.forks.values()

    def step() -> list[Tensor]:
        inputs, labels = make_data()
        loss = training.loss(inputs, labels)
        grower.isolated_backward(loss, inputs, labels)
        loss.backward()
        grower.optimizer.step()
        return [parameter.grad.clone() for parameter in fork.learned if parameter.grad is not None]

    grower.optimizer.zero_grad()
    for group in grower.optimizer.param_groups:
        group["lr"] = 0.0
    first, second = step(), step()
    assert first, "gradients stay until the loop zeroes them"
    for once, twice in zip(first, second, strict=True):
        torch.testing.assert_close(twice, 2 * once, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("other", ["inputs", "labels", "scale", "nothing", "nothing, with dropout"])
def test_another_loss_than_that_of_the_minibatch_is_warned_of(other: str) -> None:
    training, grower = on_probation(host="dropout" if "dropout" in other else BATCHED)
    inputs, labels = make_data()
    loss = training.loss(
        inputs.roll(1, 0) if other == "inputs" else inputs, labels.roll(1) if other == "labels" else labels
    )
    with torch.no_grad():
        training.model(inputs[:9])  # another pass in between does not matter
    wrong = pytest.warns(UserWarning, match="but the grower's loss function computes")
    with warnings.catch_warnings() if "nothing" in other else wrong:
        if "nothing" in other:
            warnings.simplefilter("error")
        grower.isolated_backward(loss / 2 if other == "scale" else loss, inputs, labels)


@pytest.mark.slow
def test_a_compiled_model_has_forks_like_any_other() -> None:
    def contributions(*, compiles: bool) -> list[dict[str, float]]:
        training = Training()
        network = torch.compile(training.model, backend="eager") if compiles else training.model

        def loss(inputs: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(network(inputs), labels)

        training.loss = loss  # type: ignore[method-assign]
        grower = grown(training, planting(0, 1))
        found: list[dict[str, float]] = []
        for _ in range(DECISIONS):
            training.learn(grower.isolated_backward)
            found.append(grower.step(train_loss=1.0).contributions)
        assert len(grower.backend.forks.forks) == 2
        return found

    assert contributions(compiles=True) == contributions(compiles=False)


def test_a_step_that_the_scaler_skips_is_skipped_by_forks_too() -> None:
    training, grower = on_probation("scaled")
    fork = grower.backend.forks.forks["0"]
    before = [value.clone() for value in fork._parameters.values()]
    training.scaler.update(float("inf"))  # too much for both
    training.learn(grower.isolated_backward)
    training.scaler.update(2.0**10)
    grower.backend.forks._loss = lambda x, y: training.loss(x, y) * 1e38  # too much for the fork
    training.learn(grower.isolated_backward)
    for mine, usual in zip(fork._parameters.values(), before, strict=True):
        assert torch.equal(mine, usual)
    grower.backend.forks._loss = training.loss
    training.learn(grower.isolated_backward)
    assert all(value.isfinite().all() for value in fork._parameters.values())
    assert any(not torch.equal(mine, usual) for mine, usual in zip(fork._parameters.values(), before, strict=True))
