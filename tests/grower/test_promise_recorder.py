"""What a grower hears of training is what looking at the model finds, and nothing else is heard."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import esper
from esper import Grower, GrowingModel, GrowthConfig
from esper.control.rules import LookRule, LookSettings
from esper.errors import ConfigError
from esper.grower.backend import ModelSpec
from esper.grower.config import choose_controller
from esper.growth.blueprints import registry
from esper.growth.look import Look
from esper.growth.promise import PromiseSettings
from factories import HELD, RINGS, WIDTH, Loop, make_data, make_growing, make_host, validate
from growth.blueprint_cases import Branching

EXAMPLES = 40
PROMISE = PromiseSettings(every=2, first=1, examples=EXAMPLES)
GROWTH = GrowthConfig(promise=PROMISE)


def each_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def look(model: GrowingModel, inputs: Tensor, labels: Tensor) -> Look:
    return model.look(each_loss, [(inputs, labels)], draws=1, examples=len(inputs))


def grower_of(model: GrowingModel, rate: float = 0.0, **options: Any) -> tuple[Grower, torch.optim.Optimizer]:
    """By default what is trained stands still, so that the newest minibatches are all of one model."""
    optimizer = torch.optim.SGD(model.parameter_groups(lr=rate))
    told = {"evaluate": validate, "horizon": 20, "growth": GROWTH, **options}
    return Grower(model, optimizer, controller="look", **told), optimizer


def promises(grower: Grower) -> dict[tuple[str, str], tuple[float, float]]:
    """Those that controllers see."""
    record = grower.engine.promises
    assert record is not None
    return {
        (slot, name): (record.fitted[0, place, index], record.held_out[0, place, index])
        for place, slot in enumerate(grower.model.slots)
        for index, name in enumerate(grower.network.blueprints)
        if np.isfinite(record.fitted[0, place, index])
    }


def require_equal(grower: Grower, looked: Look) -> None:
    found = promises(grower)
    assert len(found) == len(looked.rows)
    for row in looked.rows:
        assert found[row.slot, row.blueprint] == pytest.approx((row.promise, row.promise_held_out), abs=2e-3)


def plainly(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, labels: Tensor) -> None:
    for half in (slice(0, 48), slice(48, 64), slice(64, 96)):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[half]), labels[half]).backward()
        optimizer.step()


def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, labels: Tensor) -> None:
    optimizer.zero_grad()
    for part in zip(inputs.split(24), labels.split(24), strict=True):
        (F.cross_entropy(model(part[0]), part[1]) / 4).backward()
    optimizer.step()


def scaled(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, labels: Tensor) -> None:
    optimizer.zero_grad()
    SCALER.scale(F.cross_entropy(model(inputs), labels)).backward()
    SCALER.step(optimizer)
    SCALER.update()


def between_evaluations(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, labels: Tensor) -> None:
    plainly(model, optimizer, inputs, labels)
    model(inputs[:3])  # nobody differentiates it
    validate(model)


SCALER = torch.amp.GradScaler("cpu", init_scale=256.0)
LAST = [*range(48, 56), *range(64, 96)]
NEWEST = {scaled: [*range(EXAMPLES)], accumulated: [*range(48, 64), *range(72, 96)]}


@pytest.mark.parametrize("loop", [plainly, accumulated, scaled, between_evaluations], ids=lambda loop: loop.__name__)
def test_what_is_heard_is_what_looking_finds(loop: Callable[..., None]) -> None:
    model, (inputs, labels) = make_growing(), make_data()
    grower, optimizer = grower_of(model, scaler=SCALER if loop is scaled else None)
    loop(model, optimizer, inputs, labels)
    grower.step(train_loss=1.0)
    # The newest minibatch whole, and of the one before as many as are missing.
    newest = NEWEST.get(loop, LAST)
    assert len(newest) == EXAMPLES
    require_equal(grower, look(model, inputs[newest], labels[newest]))


def test_what_comes_after_may_work_in_place_and_what_comes_before_may_be_frozen() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, RINGS))
    net[0].requires_grad_(False)
    model = esper.attach(net, {"0": ["mlp", "norm", "lowrank"]}, torch.zeros(2, 4))
    (inputs, labels), (grower, optimizer) = make_data(), grower_of(model)
    plainly(model, optimizer, inputs, labels)
    grower.step(train_loss=1.0)
    require_equal(grower, look(model, inputs[LAST], labels[LAST]))


@pytest.mark.parametrize("given", [False, True], ids=["heard", "given"])
def test_slots_that_are_taken_are_not_measured(given: bool) -> None:
    model, (inputs, labels) = make_growing(), make_data()
    eager = LookRule(LookSettings(promise=PROMISE, threshold=-1.0, early=0.0, probation=100), 20)
    optimizer = torch.optim.SGD(model.parameter_groups(lr=0.01))
    grower = Grower(model, optimizer, controller=eager, evaluate=validate, horizon=20)
    for _ in range(3):
        plainly(model, optimizer, inputs, labels)
        grower.step(train_loss=1.0, look=look(model, inputs, labels) if given and grower.promises_due else None)
    (taken,) = model.seeds
    found = {slot for slot, _ in promises(grower)}
    assert found == set(model.slots) - {taken}
    assert not grower.promises_due


def test_where_no_free_slot_is_enabled_it_is_not_due_forever() -> None:
    model, (inputs, labels) = make_growing(), make_data()
    for slot in model.slots.values():
        slot.enabled = False
    optimizer = torch.optim.SGD(model.parameter_groups(lr=0.01))
    grower = Grower(
        model, optimizer, controller=LookRule(LookSettings(promise=PROMISE), 20), evaluate=validate, horizon=20
    )
    for _ in range(PROMISE.first):
        plainly(model, optimizer, inputs, labels)
        grower.step(train_loss=1.0)
    assert not grower.promises_due


def test_passes_on_the_side_and_what_learns_apart_are_not_heard() -> None:
    inputs, labels = make_data()
    heard: list[dict[str, Any]] = []
    often = GrowthConfig(promise=PromiseSettings(every=1, first=1, examples=10_000))
    for aside in (False, True):
        model = make_growing()

        def loss(some: Tensor, others: Tensor, model: GrowingModel = model) -> Tensor:
            return F.cross_entropy(model(some), others)

        options: Any = {"rules": HELD, "loss": loss, "rate": 0.05, "growth": often}
        grower, optimizer = grower_of(model, evaluate=esper.Refit(validate), **options)
        for decision in range(8):
            if decision:
                grower.step(train_loss=1.0)
            total = loss(inputs, labels)
            grower.isolated_backward(total, inputs, labels)
            optimizer.zero_grad()
            total.backward()
            if aside:
                look(model, inputs[:20], labels[:20])
            optimizer.step()
        assert grower.backend.forks.forks
        kept = grower.state_dict()["memory"]["promises"]
        assert [len(minibatches) for minibatches in kept.values()] == [1, 1]
        heard.append(kept)
    torch.testing.assert_close(heard[0], heard[1], rtol=0, atol=0)


def test_it_listens_only_before_decisions_at_which_it_is_due() -> None:
    loop = Loop("look", growth=GrowthConfig(promise=PromiseSettings(every=3, first=2, examples=8)))
    listening = []
    for _ in range(7):
        listening.append(all(slot.feature_hook is not None for slot in loop.model.slots.values()))
        loop.epoch()
    assert listening == [False, True, False, False, True, False, False]


def test_no_more_is_kept_than_it_takes() -> None:
    model, (inputs, labels) = make_growing(), make_data()
    grower, optimizer = grower_of(model)
    for _ in range(5):
        plainly(model, optimizer, inputs, labels)
    kept = grower.state_dict()["memory"]["promises"]
    for minibatches in kept.values():
        assert [len(wishes) for _, wishes, _ in minibatches] == [16, 32]


def test_nothing_is_kept_of_a_minibatch_that_blew_up() -> None:
    model, (inputs, labels) = make_growing(), make_data()
    grower, optimizer = grower_of(model, growth=GrowthConfig(promise=PROMISE, governor=None))
    plainly(model, optimizer, inputs, labels)
    bad = F.cross_entropy(model(inputs[:16]), labels[:16]) * float("inf")
    bad.backward()
    grower.step(train_loss=1.0)
    require_equal(grower, look(model, inputs[64:96], labels[64:96]))


def test_copies_and_pickles_do_not_listen() -> None:
    model = make_growing()
    grower_of(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(slot.feature_hook is None for slot in other.slots.values())
    assert all(slot.feature_hook is not None for slot in model.slots.values())


@pytest.mark.parametrize("first", [1, 2], ids=["of the first epoch", "of one that begins anew"])
def test_it_goes_on_from_the_midst(first: int) -> None:
    inputs, labels = make_data()
    outcomes = []
    growth = GrowthConfig(promise=PROMISE.model_copy(update={"first": first}))
    for cut in (False, True):
        model = make_growing()
        grower, optimizer = grower_of(model, rate=0.05, growth=growth)
        plainly(model, optimizer, inputs, labels)
        if first == 2:
            grower.step(train_loss=1.0)
        if cut:
            state, values = grower.state_dict(), copy.deepcopy(model.state_dict())
            model = make_growing()
            grower, optimizer = grower_of(model, rate=0.05, growth=growth)
            model.load_state_dict(values)
            grower.load_state_dict(state)
        if first == 2:
            plainly(model, optimizer, inputs, labels)
        grower.step(train_loss=1.0)
        outcomes.append(promises(grower))
    assert outcomes[0]
    assert outcomes[0] == outcomes[1]


def test_a_grower_that_was_never_trained_is_told_of_no_promises() -> None:
    grower, _ = grower_of(make_growing())
    grower.step(train_loss=1.0)
    assert not promises(grower)


def test_a_blueprint_that_cannot_be_measured_is_named_and_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._registry, Branching.name, Branching)
    model = esper.attach(make_host(), {"0": ["mlp", "branching"]}, torch.zeros(2, 4))
    grower, optimizer = grower_of(model)
    plainly(model, optimizer, *make_data())
    with pytest.warns(UserWarning, match="branching"):
        grower.step(train_loss=1.0)
    assert set(promises(grower)) == {("0", "mlp")}


def test_what_nobody_goes_by_is_refused() -> None:
    model = make_growing()
    with pytest.raises(ConfigError, match=r"growth\.promise"):
        Loop("heuristic", growth=GROWTH)
    with pytest.raises(ConfigError, match="shown"):
        Loop("look", growth=GrowthConfig(promise=PromiseSettings(shown="fitted")))
    with pytest.raises(ConfigError, match="look"):
        Loop("heuristic", model).grower.step(train_loss=1.0, look=look(model, *make_data()))
    other = esper.attach(make_host(), {"4": ["mlp"]}, torch.zeros(2, 4))
    with pytest.raises(ConfigError, match="which this model lacks"):
        grower_of(model)[0].step(train_loss=1.0, look=look(other, *make_data()))


def test_the_rule_finds_the_bottleneck_that_was_built() -> None:
    """One channel in the middle: what goes past it is kept, and a module that has only this channel is not."""
    torch.manual_seed(1)
    inputs = torch.randn(512, 6)
    labels = (inputs @ torch.randn(6, 4)).argmax(1)
    narrow = nn.Linear(32, 1), nn.Tanh(), nn.Linear(1, 32)
    net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), *narrow, nn.ReLU(), nn.Linear(32, 4))
    model = esper.attach(net, {"0": ["mlp"], "2": ["mlp"], "4": ["input_skip", "mlp"]}, inputs[:2])
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=1e-2))
    grower = Grower(model, optimizer, evaluate=lambda net: validate_on(net, inputs, labels), horizon=15, classes=4)
    for _ in range(15):
        for part in zip(inputs.split(64), labels.split(64), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(part[0]), part[1]).backward()
            optimizer.step()
        grower.step(train_loss=1.0)
    assert isinstance(grower.controller, LookRule)
    grower.finish()
    kept = {name: seed.blueprint.name for name, seed in model.seeds.items()}
    assert kept["4"] == "input_skip"
    assert "2" not in kept


@torch.no_grad()
def validate_on(net: nn.Module, inputs: Tensor, labels: Tensor) -> tuple[float, float]:
    logits = net(inputs)
    return float(F.cross_entropy(logits, labels)), float((logits.argmax(1) == labels).float().mean())


@pytest.mark.parametrize("horizon", [3, 4, 5, 6, 9, 12, 15, 20, 30, 100, None])
def test_however_short_a_growth_it_is_looked_at_while_seeds_may_be_planted(horizon: int | None) -> None:
    model = make_growing()
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=1e-2))
    spec = ModelSpec(model, optimizer)
    controller, timing = choose_controller(
        "look", horizon, None, spec.costs.parameters.blueprints[0], spec.compatible[0]
    )
    assert isinstance(controller, LookRule)
    assert controller.promise is not None
    usual = LookSettings()
    _, stop = timing.fit_probation(usual.probation, usual.stop_after, 1)
    may_plant = [one for one in range(1, timing.horizon + 1) if timing.compute_progress(one) <= stop + 1e-6]
    looks = [one for one in may_plant if controller.promise.is_due(np.array([one]))[0]]
    assert len(looks) >= min(3, len(may_plant) - 1, 1 + len(may_plant) // 2)
    assert looks
    assert controller.promise.every <= usual.promise.every


def test_one_that_goes_on_with_other_plans_listens_by_these() -> None:
    loop = Loop("look", horizon=20, growth=GrowthConfig(promise=PromiseSettings(first=9)))
    for _ in range(3):
        loop.epoch()
    assert not loop.model.seeds
    often = GrowthConfig(promise=PromiseSettings(every=1, first=1, examples=16))
    longer = Loop("look", horizon=60, growth=often)
    longer.grower.load_state_dict(loop.saved()["grower"])
    assert longer.grower.promises_due
    longer.epoch()
    assert promises(longer.grower)


def test_losses_scaled_near_the_end_of_half_precision_are_heard() -> None:
    model, (inputs, labels) = make_growing(), make_data()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17)
    grower, optimizer = grower_of(model, scaler=scaler)
    largest: list[Tensor] = []
    with torch.autocast("cpu", torch.float16):
        hidden = model(inputs.repeat(20, 1))
        hidden.register_hook(lambda gradient: largest.append(gradient.abs().max()))
        loss = F.cross_entropy(hidden, labels.repeat(20))
    scaler.scale(loss).backward()
    assert len(labels) * 20 * largest[0] > torch.finfo(torch.float16).max > largest[0]
    scaler.step(optimizer)
    scaler.update()
    grower.step(train_loss=1.0)
    assert {slot for slot, _ in promises(grower)} == set(model.slots)


def test_several_losses_of_one_forward_pass_are_one_wish() -> None:
    model, (inputs, labels) = make_growing(), make_data()
    grower, optimizer = grower_of(model)
    logits = model(inputs[:EXAMPLES])
    F.cross_entropy(logits, labels[:EXAMPLES]).backward(retain_graph=True)
    logits.square().mean().backward()
    optimizer.step()
    grower.step(train_loss=1.0)

    def once(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits = model(batch[0])
        return F.cross_entropy(logits, batch[1], reduction="none") + logits.square().mean(1)

    require_equal(grower, model.look(once, [(inputs[:EXAMPLES], labels[:EXAMPLES])], draws=1, examples=EXAMPLES))


def test_evaluations_that_differentiate_are_not_heard() -> None:
    def adversarially(net: nn.Module) -> tuple[float, float]:
        some, theirs = make_data(64, seed=1)
        with torch.enable_grad():
            F.cross_entropy(net(some.requires_grad_()), theirs).backward()
        return validate(net)

    model, (inputs, labels) = make_growing(), make_data()
    grower, optimizer = grower_of(model, evaluate=adversarially)
    plainly(model, optimizer, inputs, labels)
    grower.step(train_loss=1.0)
    require_equal(grower, look(model, inputs[LAST], labels[LAST]))


def test_a_part_that_is_called_alone_is_heard_without_the_network_s_input() -> None:
    model, (inputs, labels) = esper.attach(make_host(), {"0": ["mlp", "input_skip"]}, torch.zeros(2, 4)), make_data()
    grower, optimizer = grower_of(model)
    hidden = model.host[0](inputs)
    F.cross_entropy(model.host[4](F.relu(model.host[2](F.relu(hidden)))), labels).backward()
    optimizer.step()
    with pytest.warns(UserWarning, match="input_skip"):
        grower.step(train_loss=1.0)
    assert set(promises(grower)) == {("0", "mlp")}


def test_a_look_that_could_not_be_taken_is_taken_next_time() -> None:
    model, (inputs, labels) = make_growing(), make_data()
    grower, optimizer = grower_of(model, growth=GrowthConfig(promise=PROMISE, governor=None))
    (F.cross_entropy(model(inputs), labels) * float("inf")).backward()
    optimizer.zero_grad()
    optimizer.step()
    with pytest.warns(UserWarning, match="no gradients were recorded") as found:
        grower.step(train_loss=1.0)
    assert {warning.filename for warning in found} == {__file__}, "warnings point to the loop"
    assert grower.promises_due
    assert grower.engine.promises is not None
    assert np.isinf(grower.engine.promises.age[0])
    plainly(model, optimizer, inputs, labels)
    grower.step(train_loss=1.0)
    assert promises(grower)


def test_nobody_listens_after_the_end_nor_where_another_grower_takes_over() -> None:
    loop = Loop("look", growth=GROWTH)
    assert all(slot.feature_hook for slot in loop.model.slots.values())
    loop.grower.finish()
    assert not any(slot.feature_hook for slot in loop.model.slots.values())
    other = Loop("look", growth=GROWTH)
    Loop("heuristic", other.model)
    assert not any(slot.feature_hook for slot in other.model.slots.values())
