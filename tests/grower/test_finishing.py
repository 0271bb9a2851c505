"""However growth ends, the plain model computes what the growing one does, and says what it did otherwise."""

from __future__ import annotations

import copy
import math
import pickle
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import esper
from esper import Grower, GrowingModel
from esper.errors import ConfigError, RunError, SlotError
from esper.grower.decision import Ending
from esper.lifecycle.table import Stage
from esper.lifecycle.transitions import Cause
from factories import SLOTS, Loop, make_data, make_host, validate
from grower.divergence import WAYS, Training
from open_rules import open_rules

CONTROLLERS = ("heuristic", "periodic", "all_at_start", "random", "none")


def same(model: GrowingModel, **options: Any) -> bool:
    """Whether the plain model computes what the growing one does, with nothing to warn of."""
    inputs, _ = make_data()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = model.finalize(**options)
    return torch.allclose(plain(inputs), model(inputs), atol=1e-6)


@pytest.mark.parametrize("controller", CONTROLLERS)
@pytest.mark.parametrize("stopped", [1, 2, 3, 4, 6, 9])
@pytest.mark.few(2)
def test_an_early_stop_loses_nothing_that_earns(controller: str, stopped: int):
    """Without a call of finish: what counts and does no harm stays; with one, nothing is left to say."""
    loop = Loop(controller, rules=open_rules(), seed=1)
    for _ in range(stopped):
        loop.epoch()
    live = [name for name, seed in loop.model.seeds.items() if not seed.fossilized]
    harmful = [name for name in live if (loop.model.seeds[name].contribution or 0) < 0]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        plain = loop.model.finalize()
    assert len(said) == bool(live)
    assert all(f"'{name}'" in str(said[0].message) for name in live)
    if not harmful:
        assert validate(plain) == pytest.approx(validate(loop.model))
    loop.grower.finish()
    assert not loop.grower.network.table.live.any()
    assert same(loop.model)


class Owned:
    """A model whose seeds are worth what a test says, as a measure tells that knows."""

    def __init__(self, worth: Callable[[Mapping[str, bool]], float], *slots: str, rent: float = 0.0) -> None:
        layers = [layer for _ in slots for layer in (nn.Linear(4, 4), nn.ReLU())]
        self.model = esper.attach(nn.Sequential(*layers), {name: ["lowrank"] for name in slots}, torch.zeros(2, 4))
        self.calls = 0
        self.worth = worth
        optimizer = torch.optim.SGD(self.model.parameter_groups(lr=0.0))
        self.grower = Grower(
            self.model, optimizer, controller="all_at_start", evaluate=self.evaluate, classes=2, horizon=20, rent=rent
        )

    def evaluate(self, model: GrowingModel) -> tuple[float, float]:
        self.calls += 1
        worth = self.worth({name: float(seed.alpha) > 0 for name, seed in model.seeds.items()})
        return (math.nan if math.isnan(worth) else 1.0), worth

    def grown(self, decisions: int) -> Owned:
        for _ in range(decisions):
            self.grower.step(train_loss=1.0)
        self.calls = 0
        return self


def fates(ending: Ending) -> list[tuple[str, Stage]]:
    assert all(change.cause is Cause.FINISH for change in ending.changes)
    return [(change.slot, change.after) for change in ending.changes]


def test_what_does_not_count_goes_unmeasured():
    owned = Owned(lambda on: 0.5 + 0.1 * sum(on.values()), "0", "2").grown(2)
    ending = owned.grower.finish()
    assert fates(ending) == [("2", Stage.PRUNED), ("0", Stage.FOSSILIZED)]
    assert ending.contributions == pytest.approx({"0": 0.1})
    assert owned.calls == 2
    assert str(ending).splitlines() == [
        "Finished. 2 modules tried, 1 kept.",
        "kept lowrank in 0 at decision 2 by finish: contribution +0.1, rent 0, minimum 0 "
        "(planted at decision 1, 8 parameters)",
        "pruned lowrank in 2 at decision 2 by finish: had no effect yet (planted at decision 2, 8 parameters)",
    ]
    assert float(owned.model.seeds["0"].alpha) == pytest.approx(1 / 3)


def test_seeds_that_lean_on_each_other_are_judged_one_by_one():
    """Either of two is enough: without a second look both would go. A third does harm only beside the first."""

    def worth(on: Mapping[str, bool]) -> float:
        either = on.get("0", False) or on.get("2", False)
        return 0.5 + 0.2 * either - 0.01 * on.get("0", False) - 0.05 * (on.get("4", False) and on.get("0", False))

    ending = Owned(worth, "0", "2", "4").grown(6).grower.finish()
    assert fates(ending) == [("0", Stage.PRUNED), ("2", Stage.FOSSILIZED), ("4", Stage.FOSSILIZED)]
    assert ending.contributions == pytest.approx({"0": -0.06, "2": 0.2, "4": 0.0})


@pytest.mark.parametrize(("gain", "kept"), [(0.03, False), (0.5, True)])
def test_seeds_must_be_worth_their_rent(gain: float, kept: bool):
    ending = Owned(lambda on: 0.2 + gain * sum(on.values()), "0", rent=0.5).grown(3).grower.finish()
    assert fates(ending) == [("0", Stage.FOSSILIZED if kept else Stage.PRUNED)]
    rating = ending.changes[0].rating
    assert rating is not None
    assert rating == ending.tried[0].rating
    assert rating.contribution == pytest.approx(gain)
    assert 0 < rating.price == rating.threshold
    assert kept == (rating.contribution >= rating.threshold)


def test_what_cannot_be_measured_goes():
    owned = Owned(lambda _: 0.5, "0").grown(3)
    owned.worth = lambda on: math.nan if any(on.values()) else 0.5
    assert fates(owned.grower.finish()) == [("0", Stage.PRUNED)]


def test_slots_that_are_called_no_more_are_refused_at_the_end_too():
    owned = Owned(lambda _: 0.5, "0").grown(3)
    owned.model.release()
    with pytest.raises(SlotError, match="is no longer called"):
        owned.grower.finish()


def test_nothing_is_kept_on_a_network_that_broke_after_the_last_decision():
    loop = Loop("all_at_start", rules=open_rules(), seed=1)
    for _ in range(5):
        loop.epoch()
    weight = next(loop.model.host.parameters())
    with torch.no_grad():
        weight.fill_(math.nan)
    ending = loop.grower.finish()
    assert weight.isfinite().all()
    assert all(change.after is Stage.PRUNED for change in ending.changes)
    assert not loop.grower.network.table.live.any()


def test_a_closed_run_is_told_before_anything_changes(tmp_path: Path):
    loop = Loop("all_at_start", rules=open_rules(), seed=1, run=tmp_path / "run")
    for _ in range(4):
        loop.epoch()
    loop.grower.close()
    with pytest.raises(RunError, match="closed"):
        loop.grower.finish()
    assert loop.grower.network.table.live.any()


def test_a_second_call_changes_and_measures_nothing():
    owned = Owned(lambda on: 0.5 + 0.1 * sum(on.values()), "0", "2").grown(4)
    assert owned.grower.finish().changes
    owned.calls = 0
    table = owned.grower.network.table
    again = owned.grower.finish()
    assert not again.changes
    assert not again.contributions
    assert [module.kept for module in again.tried] == [True, True]
    assert owned.grower.network.table is not None
    assert all((vars(owned.grower.network.table)[name] == value).all() for name, value in vars(table).items())
    assert owned.calls == 0


def test_training_may_go_on_also_from_a_state_that_was_saved():
    whole = Loop("heuristic", rules=open_rules())
    for _ in range(3):
        whole.epoch()
    assert whole.grower.finish().changes
    half = Loop.resume(whole.saved(), "heuristic", rules=open_rules())
    for _ in range(6):
        assert half.epoch() == whole.epoch()
    for mine, theirs in zip(half.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_what_a_resumed_grower_knows_finalize_knows():
    whole = Loop("all_at_start")
    for _ in range(3):
        whole.epoch()
    half = Loop.resume(whole.saved(), "all_at_start")
    known = {name: seed.contribution for name, seed in whole.model.seeds.items()}
    assert {name: seed.contribution for name, seed in half.model.seeds.items()} == known
    assert any(value is not None for value in known.values())


def test_a_rollback_after_the_end_keeps_what_was_kept():
    loop = Loop("all_at_start")
    for _ in range(3):
        loop.epoch()
    loop.grower.finish()
    kept = {name for name, seed in loop.model.seeds.items() if seed.fossilized}
    alphas = {name: float(loop.model.seeds[name].alpha) for name in kept}
    assert kept
    loop.epoch()
    decision = loop.epoch(lambda _: float("nan"))
    assert decision.rollback is not None
    assert {name: float(loop.model.seeds[name].alpha) for name in kept} == alphas


@pytest.mark.parametrize("controller", ["heuristic", "periodic", "all_at_start"])
def test_nothing_is_kept_on_a_network_that_gives_one_answer_to_everything(controller: str):
    training = Training(controller=controller)
    WAYS["dead from the start"].spoil(training)  # type: ignore[misc]
    for _ in range(6):
        training.grower.step(train_loss=training.epoch())
    assert training.model.seeds
    ending = training.grower.finish()
    assert ending.contributions
    assert all(change.after is Stage.PRUNED for change in ending.changes)
    worth = [module for module in ending.tried if module.by == "finish" and (module.rating.contribution or -1) >= 0]
    assert all("the module does not lower the loss" in str(module) for module in worth)


@pytest.mark.parametrize(("added", "after"), [(1.0, Stage.FOSSILIZED), (0.0, Stage.PRUNED), (-1.0, Stage.PRUNED)])
@pytest.mark.parametrize("by_example", [True, False])
def test_a_module_stays_that_lowers_the_loss_of_a_network_that_gives_one_answer_to_everything(
    added: float, after: Stage, by_example: bool
):
    inputs = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    targets = inputs.sum(1, keepdim=True).relu()
    torch.manual_seed(0)
    model = esper.attach(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1)), {"2": ["mlp"]}, inputs[:2])
    optimizer = torch.optim.SGD(model.parameter_groups(lr=0.01))

    def evaluate(model: nn.Module) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            losses = (model(inputs) - targets).square().squeeze(1)
        return {"loss": losses if by_example else losses.mean()}

    grower = Grower(model, optimizer, evaluate, controller="look", horizon=30)
    while not (grower.network.table.stage == Stage.HOLDING).any():
        loss = (model(inputs) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        grower.step(train_loss=loss)
    # The network dies: it answers 0, and the module adds to that. 1 is nearer to the targets, -1 is farther.
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    *_, bias = model.seeds["2"].parameters()
    nn.init.constant_(bias, added)
    (change,) = grower.finish().changes
    assert change.after is after


def test_an_old_optimizer_that_steps_for_the_finished_copy_is_named_once() -> None:
    loop = Loop("all_at_start")
    for _ in range(3):
        loop.epoch()
    loop.grower.finish()
    loop.model.finalize()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop.epoch()  # the growing model may train on
        loop.grower.finish()
        plain = loop.model.finalize()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3):
            loop.optimizer.zero_grad()
            F.cross_entropy(plain(loop.inputs), loop.labels).backward()
            loop.optimizer.step()
    assert len(found) == 1
    assert re.search(r"after finalize\(\) returned a copy: .* a new optimizer", str(found[0].message))


@pytest.mark.parametrize("what", ["attach", "step", "finish", "finalize", "load"])
def test_nothing_that_must_train_is_made_in_inference_mode(what: str, tmp_path: Path) -> None:
    with torch.inference_mode(what == "attach"):
        host = make_host()
    if what == "attach":
        with pytest.raises(SlotError, match="made under torch.inference_mode and cannot be trained"):
            esper.attach(host, SLOTS, torch.zeros(2, 4))
        return
    with torch.inference_mode():
        model = esper.attach(host, SLOTS, torch.zeros(2, 4))
        optimizer = torch.optim.AdamW(model.parameter_groups(lr=1e-2))
        grower = esper.Grower(model, optimizer, controller="all_at_start", evaluate=validate, horizon=20)
    inputs, labels = make_data(48)
    for _ in range(4):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        with torch.inference_mode(what == "step"):
            grower.step(train_loss=1.0)
    with torch.inference_mode(what == "finish"):
        grower.finish()
    if what == "load":
        esper.save(model, tmp_path)
        again = make_host()
        with torch.inference_mode():
            model = esper.load(tmp_path, again, torch.zeros(2, 4))
        assert model.seeds
    with torch.inference_mode(what == "finalize"):
        plain = model.finalize()
    F.cross_entropy(plain(inputs), labels).backward()
    assert all(parameter.grad is not None for parameter in plain.parameters())


def test_a_parameter_that_was_replaced_in_training_is_named() -> None:
    loop = Loop("none")
    loop.epoch()
    loop.model.host[0].weight = nn.Parameter(torch.randn_like(loop.model.host[0].weight))
    with pytest.warns(UserWarning, match=r"1 trainable parameters belong to no group .*: host\.0\.weight|0\.weight"):
        loop.epoch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop.epoch()


def test_each_optimizer_that_lacks_parameters_is_named() -> None:
    model, (inputs, labels) = esper.attach(make_host(), SLOTS, torch.zeros(2, 4)), make_data(48)
    for _ in range(2):
        optimizer = torch.optim.SGD(model.parameter_groups(lr=1e-2)[1:])
        model.link(optimizer)
        F.cross_entropy(model(inputs), labels).backward()
        for _ in range(10):
            optimizer.step()
        with pytest.warns(UserWarning, match="trainable parameters belong to no group of the optimizer"):
            optimizer.step()


def test_parameters_that_another_optimizer_trains_are_not_named() -> None:
    model, (inputs, labels) = esper.attach(make_host(), SLOTS, torch.zeros(2, 4)), make_data(48)
    optimizer = torch.optim.SGD(model.parameter_groups(lr=1e-2)[1:])
    model.link(optimizer)
    other = torch.optim.SGD(model.host.parameters(), lr=1e-2)
    F.cross_entropy(model(inputs), labels).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(12):
            optimizer.step()
            other.step()


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_grower_is_not_copied(copied: Callable[[Any], Any]) -> None:
    with pytest.raises(ConfigError, match="cannot be pickled or copied: save its state_dict"):
        copied(Loop("none").grower)
