"""A grower goes on where it was saved, bit for bit."""

import copy
import math
from collections.abc import Callable
from dataclasses import fields
from inspect import signature
from typing import Any

import numpy as np
import pytest
import torch

import esper
from esper.control.controller import Controller
from esper.control.learned import LearnedController
from esper.control.policy import Policy, PolicySettings
from esper.control.rules import Replay, Schedule
from esper.engine.engine import GrowthConfig
from esper.engine.governor import GovernorSettings
from esper.engine.gradients import GradientHealthSettings
from esper.engine.observation import list_features
from esper.errors import CheckpointError, ConfigError, EsperError, SlotError
from esper.grower import Grower, GrowerConfig
from esper.grower.evaluation import Criterion
from esper.grower.scores import Score
from esper.growth.persist import KEY, GrowthInStateDict, describe_structure, plant_structure
from esper.lifecycle.actions import Blend, Op
from esper.serialization import from_plain, pack_state, to_plain, unpack_state
from factories import (
    HELD,
    SLOTS,
    Loop,
    make_data,
    make_growing,
    make_host,
    packed,
    remembered,
    validate,
    validate_examples,
)

DECISIONS = 8
SPEC = list_features(promise=False).spec


def _policy(*, greedy: bool) -> Controller:
    return LearnedController(
        Policy(SPEC, PolicySettings(advice=None, hidden=16), torch.Generator().manual_seed(3)), greedy=greedy
    )


def _controller(name: str) -> str | Controller:
    return {"greedy": _policy(greedy=True), "policy": _policy(greedy=False)}.get(name, name)


def _told(decision: int) -> Any:
    """The ninth loss is not finite, so that the governor returns to a snapshot from before the checkpoint or after."""
    return lambda loss: math.nan if decision == DECISIONS else loss


EVALUATORS: dict[str, Callable[[], Any]] = {
    "values of examples": lambda: validate_examples,
    "validation": lambda: esper.Validation("classification", [make_data(64, seed=1)]),
}


@pytest.mark.parametrize("evaluator", EVALUATORS)
@pytest.mark.parametrize("name", ["look", "heuristic"])
def test_any_measurement_can_be_saved(name: str, evaluator: str):
    whole = Loop(_controller(name), evaluate=EVALUATORS[evaluator]())
    for _ in range(DECISIONS):
        whole.epoch()
    half = Loop.resume(whole.saved(), _controller(name), evaluate=EVALUATORS[evaluator]())
    for _ in range(DECISIONS):
        assert str(half.epoch()) == str(whole.epoch())
    assert torch.equal(packed(half.saved()["grower"]), packed(whole.saved()["grower"]))


@pytest.mark.landing
@pytest.mark.parametrize(
    "name", ["look", "heuristic", "random", "periodic", "all_at_start", "all_at_plateau", "greedy", "policy"]
)
def test_a_resumed_run_equals_one_that_was_never_cut(name: str):
    whole = Loop(_controller(name))
    decisions = [whole.epoch(_told(number)) for number in range(DECISIONS)]
    saved = copy.deepcopy(whole.saved())
    decisions += [whole.epoch(_told(number)) for number in range(DECISIONS, 2 * DECISIONS)]

    half = Loop.resume(saved, _controller(name))
    again = [half.epoch(_told(number)) for number in range(DECISIONS, 2 * DECISIONS)]

    assert list(map(str, again)) == list(map(str, decisions[DECISIONS:]))
    assert [decision.contributions for decision in again] == [d.contributions for d in decisions[DECISIONS:]]
    mine, theirs = half.saved(), whole.saved()
    assert torch.equal(packed(mine["grower"]), packed(theirs["grower"]))
    torch.testing.assert_close(mine["model"], theirs["model"], rtol=0, atol=0)
    torch.testing.assert_close(mine["optimizer"]["state"], theirs["optimizer"]["state"], rtol=0, atol=0)
    assert any(decision.rollback for decision in again)


def test_the_means_of_gradient_health_go_on_to_the_last_bit():
    """With bounds about the usual ratio, so that shares are no whole numbers."""
    loop, ratios = Loop("all_at_start"), list[float]()
    for _ in range(DECISIONS):
        loop.epoch()
        ratios += loop.grower.engine.history.training.health.ratio.flatten().tolist()
    usual = float(np.nanmedian(ratios))
    health = GradientHealthSettings(vanished_ratio=0.99 * usual, exploded_ratio=1.01 * usual, decay=0.7)
    options = {"growth": GrowthConfig(gradient_health=health)}

    whole = Loop("all_at_start", **options)
    for _ in range(DECISIONS // 2):
        whole.epoch()
    half = Loop.resume(whole.saved(), "all_at_start", **options)
    shares = list[float]()
    for _ in range(DECISIONS // 2):
        whole.epoch()
        half.epoch()
        measurements = whole.grower.network.measurements
        for name, figure in vars(measurements).items():
            np.testing.assert_array_equal(getattr(half.grower.network.measurements, name), figure, err_msg=name)
        shares += [*measurements.vanished_share.flatten(), *measurements.exploded_share.flatten()]
    assert any(0 < share < 1 for share in shares), "the test means to see some"


def test_a_snapshot_from_before_the_checkpoint_is_restored():
    loop = Loop("none")
    loop.epoch()
    loop.inputs = loop.inputs * 100  # the loss jumps: no snapshot is taken of what follows
    for _ in range(3):
        loop.epoch(lambda _: 1.0)
    for _ in range(2):
        loop.epoch(lambda _: 1e6)
    resumed = Loop.resume(loop.saved(), "none")
    for one in (loop, resumed):
        with torch.no_grad():
            next(one.model.parameters()).fill_(math.nan)
    expected, found = loop.epoch(), resumed.epoch()
    assert expected.rollback is not None
    assert found.rollback is not None
    assert found.rollback.loss_restored == expected.rollback.loss_restored
    pairs = zip(resumed.model.parameters(), loop.model.parameters(), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


def test_a_model_without_the_seeds_is_refused():
    loop = Loop("all_at_start")
    for _ in range(3):
        loop.epoch()
    with pytest.raises(CheckpointError, match="slot '0' holds no seed, but held a live mlp .* restore the model first"):
        Loop("all_at_start").grower.load_state_dict(loop.grower.state_dict())


def test_other_slots_are_refused():
    state = Loop("heuristic").grower.state_dict()
    fewer = esper.attach(make_host(), {"0": SLOTS["0"]}, torch.zeros(2, 4))
    with pytest.raises(CheckpointError, match="saved with slots"):
        Loop("heuristic", fewer).grower.load_state_dict(state)


IDLE = Schedule([], 10, "idle")
"""Plants nothing, as nothing is planned."""
SETS: dict[str, Any] = {"objective": "target"}
SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "controller": ({}, {"controller": "random"}),
    "metric": ({}, {"metric": "loss"}),
    "higher_is_better": (
        {"metric": "f1", "higher_is_better": True},
        {"metric": "f1", "higher_is_better": False},
    ),
    "objective": (SETS, {**SETS, "objective": "source"}),
    "constraints": ({**SETS, "constraints": {"source": 0.1}}, {**SETS, "constraints": {"source": 0.2}}),
    "classes": ({}, {"classes": 4}),
    "seed": ({}, {"seed": 1}),
    "refit": ({"controller": IDLE}, {"controller": IDLE, "refit": True, "loss": torch.sum}),
}
"""Arguments to which what a grower remembers belongs: how it was told, and how otherwise."""
OTHER: dict[str, tuple[dict[str, Any], Callable[[Grower], Any]]] = {
    "horizon": ({"horizon": 50}, lambda grower: (grower.config.horizon, grower._timing.horizon)),
    "rules": ({"rules": HELD}, lambda grower: grower.config.rules),
    "growth": (
        {"growth": GrowthConfig(plateau=3, counterfactual_every=2, governor=GovernorSettings(max_rollbacks=1))},
        lambda grower: (grower.config.growth, grower.engine.governor.settings),
    ),
    "rent": ({"rent": 0.5}, lambda grower: grower.config.rent),
    "rent_on": ({"rent_on": "flops"}, lambda grower: grower.network.charge.hosts.tolist()),
    "train_size": ({"train_size": 7}, lambda grower: grower.config.train_size),
    "training_flops": ({"training_flops": 1e12}, lambda grower: grower.spending.limited),
    "seconds": ({"seconds": 1e6}, lambda grower: grower.spending.limited),
}
"""Arguments that may be others from the next decision on, and where that shows."""
RESTORED = {"model", "optimizer"}
"""By their owner, from states of their own."""
UNKNOWN = {"evaluate", "loss", "scaler", "run", "verbose", "callbacks"}
"""Functions and means of the loop, of which a state says nothing; callbacks have states of their own."""


def told(**options: Any) -> Grower:
    model = make_growing()
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=1e-2))
    evaluate: Any = (lambda _: {"loss": 0.5, "f1": 0.5}) if options.get("metric") == "f1" else validate
    if "objective" in options:
        evaluate = lambda model: {name: Score(*validate(model)) for name in ("target", "source")}  # noqa: E731
    if "metric" in options:
        evaluate = esper.Metric(evaluate, options.pop("metric"), options.pop("higher_is_better", None))
    if "objective" in options:
        evaluate = esper.Constrained(evaluate, options.pop("objective"), options.pop("constraints", None))
    evaluate = esper.Refit(evaluate) if options.pop("refit", False) else evaluate
    return Grower(model, optimizer, evaluate, **{"controller": "none", "horizon": 20, **options})


def test_of_every_argument_it_is_known_whether_it_must_be_the_same() -> None:
    kinds = [set(SAME), set(OTHER), RESTORED, UNKNOWN]
    assert sum(map(len, kinds)) == len(set().union(*kinds))
    criterion = {field.name for field in fields(Criterion)}
    assert set().union(*kinds) == {
        *(set(signature(Grower).parameters) - {"config", "fields"}),
        *GrowerConfig.model_fields,
        *criterion,
    }


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("decided", [False, True])
def test_what_must_be_the_same_is_refused_otherwise(name: str, decided: bool) -> None:
    usual, other = SAME[name]
    grower = told(**usual)
    if decided:
        grower.step(train_loss=1.0)
    state = copy.deepcopy(grower.state_dict())
    told(**usual).load_state_dict(state)
    with pytest.raises(CheckpointError, match=f"saved with {name} .*, but this grower has {other[name]!r}"):
        told(**other).load_state_dict(state)


@pytest.mark.parametrize("name", OTHER)
def test_what_may_be_another_is_as_it_was_told_last(name: str) -> None:
    other, seen = OTHER[name]
    grower = told()
    grower.step(train_loss=1.0)
    again = told(**other)
    again.load_state_dict(copy.deepcopy(grower.state_dict()))
    assert seen(again) == seen(told(**other)) != seen(grower)
    assert again.step(train_loss=1.0).number == 2


@pytest.mark.parametrize("part", ["version", "seed", "seeds", "memory", "forks", "callbacks"])
def test_a_state_that_lacks_a_part_is_refused(part: str) -> None:
    state = told().state_dict()
    del state[part]
    with pytest.raises(CheckpointError, match=f"the grower's state .*{part}"):
        told().load_state_dict(state)


def test_a_governor_of_another_window_is_refused():
    state = Loop("none").grower.state_dict()
    with pytest.raises(CheckpointError, match="losses is torch.float64"):
        Loop("none", growth=GrowthConfig(governor=GovernorSettings(window=5))).grower.load_state_dict(state)
    with pytest.raises(CheckpointError, match="governor"):
        Loop("none", growth=GrowthConfig(governor=None)).grower.load_state_dict(state)


def test_a_state_that_cannot_be_saved_is_named():
    class Odd(Replay):
        def start(self, seeds: Any) -> Any:
            return (0, [{1, 2}])

    loop = Loop(Odd({0: np.zeros((1, 8), np.int64)}))
    with pytest.raises(CheckpointError, match="holds a set"):
        loop.grower.state_dict()


@pytest.mark.parametrize("part", [np.float64(1.0), np.int64(1), Op.WAIT])
def test_what_torch_would_not_read_again_is_not_saved(part: Any):
    with pytest.raises(CheckpointError, match=f"holds a {type(part).__name__}"):
        to_plain({"part": part})


def test_a_state_of_every_make_comes_back():
    state = {1: (2, [3.5, None]), "b": {"c": np.arange(3)}, "d": torch.ones(2)}
    like = {1: (0, [0.0, None]), "b": {"c": np.zeros(3, np.int64)}, "d": torch.zeros(2)}
    found = from_plain(like, unpack_state(pack_state(to_plain(state))), "a state")
    assert found.keys() == state.keys()
    assert found[1] == state[1]
    assert found["b"]["c"].tolist() == [0, 1, 2]
    assert torch.equal(found["d"], state["d"])
    with pytest.raises(CheckpointError, match="a state has 1, b, d in the saved state, but 1, b here"):
        from_plain({1: 0, "b": 0}, to_plain(state), "a state")


def test_seeds_that_a_grower_does_not_know_of_are_refused_at_the_next_step():
    loop = Loop("none")
    loop.model.slots["2"].germinate("mlp")
    with pytest.raises(ConfigError, match="slot '2' has a seed that the grower did not plant"):
        loop.epoch()


def test_fossils_from_before_are_known():
    model = make_growing()
    model.slots["2"].germinate("lowrank", alpha=1.0)
    model.slots["2"].fossilize()
    loop = Loop("all_at_start", model)
    for _ in range(4):
        decision = loop.epoch()
    assert "2" in decision.contributions
    assert describe_structure(model)["2"] == {"blueprint": "lowrank", "blend": 0, "fossilized": True}
    assert "0" in model.seeds


def test_a_state_dict_carries_growth_into_a_model_that_has_none():
    loop = Loop("all_at_start")
    GrowthInStateDict(loop.model).add_part("grower", loop.grower)
    for _ in range(DECISIONS):
        loop.epoch()
    saved = {name: tensor.clone() for name, tensor in loop.model.state_dict().items()}

    other = Loop("all_at_start", make_growing(seed=5))
    late = GrowthInStateDict(other.model)
    other.model.load_state_dict(saved)
    late.add_part("grower", other.grower)

    assert describe_structure(other.model) == describe_structure(loop.model) != {}
    assert other.grower.decisions == DECISIONS
    assert torch.equal(packed(other.grower.state_dict()), packed(loop.grower.state_dict()))
    inputs = loop.inputs
    assert torch.equal(other.model.eval()(inputs), loop.model.eval()(inputs))


def test_loading_prunes_what_grew_since():
    loop = Loop("none")
    GrowthInStateDict(loop.model)
    bare = loop.model.state_dict()
    loop.model.slots["0"].germinate("mlp")
    loop.model.load_state_dict(bare)
    assert not loop.model.seeds
    assert all(len(group["params"]) == 0 for group in loop.optimizer.param_groups[1:])


def test_tensors_with_two_names_are_saved_once_and_a_transposed_view_is_no_second_name():
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    net[1].weight = net[0].weight
    net[0].register_buffer("turned", net[0].weight.detach().T)
    model = esper.attach(net, {"0": "auto"}, torch.zeros(2, 4))
    usual = set(model.state_dict())
    GrowthInStateDict(model)
    saved = model.state_dict()
    assert usual - set(saved) == {"host.1.weight"}
    assert set(saved) - usual == {KEY}
    model.load_state_dict(saved)


def test_what_cannot_be_planted_again_leaves_a_disabled_slot_disabled():
    model = make_growing()
    model.slots["0"].enabled = False
    with pytest.raises(SlotError, match="is not available in slot"):
        plant_structure(model, {"0": {"blueprint": "lowrank", "blend": 0, "fossilized": False}})
    assert not model.slots["0"].enabled


UNPLANTABLE: dict[str, tuple[dict[str, Any], str]] = {
    "not on offer": (
        {"2": {"blueprint": "conv3x3", "blend": 0, "fossilized": False}},
        "does not support|not available",
    ),
    "unknown": ({"2": {"blueprint": "no such", "blend": 0, "fossilized": False}}, "unknown blueprint"),
    "no such slot": ({"9": {"blueprint": "mlp", "blend": 0, "fossilized": False}}, "attach the same slots"),
}


@pytest.mark.parametrize("case", UNPLANTABLE)
def test_a_structure_that_cannot_be_planted_changes_nothing(case: str):
    extra, sentence = UNPLANTABLE[case]
    loop = Loop("all_at_start")
    for _ in range(2):
        loop.epoch()
    seeds, before = loop.model.seeds, loop.saved()
    planted = {"0": {"blueprint": "mlp", "blend": int(Blend.GATE), "fossilized": False}, **extra}
    with pytest.raises(EsperError, match=sentence):
        plant_structure(loop.model, planted)
    assert loop.model.seeds == seeds
    after = loop.saved()
    assert all(torch.equal(after["model"][name], tensor) for name, tensor in before["model"].items())
    assert str(after["optimizer"]) == str(before["optimizer"])


DAMAGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "of another controller": lambda state: state.update(controller="none"),
    "of another slot": lambda state: state["seeds"].clear(),
    "without the last part": lambda state: state["memory"].pop("spending"),
    "with another part": lambda state: state["memory"].update(learning={}),
    "with a part of another type": lambda state: state["memory"].update(scores=3),
}


@pytest.mark.parametrize("within", ["the grower", "a state dict"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_grower_that_cannot_be_loaded_is_as_before(damage: str, within: str):
    source, loop = Loop("all_at_start"), Loop("all_at_start", make_growing(seed=5))
    for each, epochs in ((source, 3), (loop, 2)):
        for _ in range(epochs):
            each.epoch()
    state = source.grower.state_dict()
    DAMAGES[damage](state)
    before, memory, seeds = loop.saved(), remembered(loop.grower), loop.model.seeds
    if within == "the grower":
        with pytest.raises(EsperError):
            loop.grower.load_state_dict(state)
    else:
        GrowthInStateDict(loop.model).add_part("grower", loop.grower)
        carried = source.model.state_dict()
        packed_state = {"seeds": describe_structure(source.model), "twins": {}, "parts": {"grower": state}}
        with pytest.raises(EsperError):
            loop.model.load_state_dict({**carried, KEY: pack_state(packed_state)})
    assert loop.model.seeds == seeds
    after = loop.model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before["model"].items())
    assert torch.equal(remembered(loop.grower), memory)


def test_copies_of_the_model_leave_the_grower_behind():
    loop = Loop("all_at_start")
    GrowthInStateDict(loop.model).add_part("grower", loop.grower)
    loop.epoch()
    twin = copy.deepcopy(loop.model)
    state = unpack_state(twin.state_dict()[KEY])
    assert state["seeds"] == describe_structure(loop.model)
    assert state["parts"] == {}


@pytest.mark.parametrize("damage", [lambda data: data[:-3], lambda data: data[:4], lambda data: data * 0])
def test_damaged_packed_state_is_refused(damage: Any):
    with pytest.raises(CheckpointError, match="damaged"):
        unpack_state(damage(pack_state({"a": [torch.zeros(3)]})))
