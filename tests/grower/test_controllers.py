"""Rules that go by a horizon grow something within it, however short it is, and leave nothing unfinished."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import esper
from esper.control.rules import Never
from esper.engine.engine import GrowthConfig
from esper.errors import ConfigError
from esper.grower.config import HORIZON
from esper.lifecycle.actions import Op
from esper.lifecycle.rules import Isolation, Rules
from esper.lifecycle.table import Stage

RULES = ("heuristic", "periodic", "all_at_start", "all_at_plateau", "random")
SHORTEST = 3


def begun(controller: str, horizon: int | None, **options: Any) -> esper.Grower:
    torch.manual_seed(0)
    host = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    model = esper.attach(host, ["0", "2"], torch.zeros(2, 4))
    optimizer = torch.optim.SGD(model.parameter_groups(lr=0.0))
    measured = iter(range(10**6))

    # A loss that falls with every call: there is always something to gain, and every seed is worth its place.
    def evaluate(_: nn.Module) -> tuple[float, float]:
        return 1 / (1 + next(measured)), 0.5

    # Of the seeds of randomness, 3 is the first with which `random` plants at once.
    return esper.Grower(
        model, optimizer, controller=controller, **{"evaluate": evaluate, "horizon": horizon, "seed": 3, **options}
    )


def grown(grower: esper.Grower, decisions: int) -> list[int]:
    """Train for so many decisions; those at which something germinated, from 1."""
    germinated: list[int] = []
    for _ in range(decisions):
        decision = grower.step(train_loss=1.0)
        germinated += [decision.number for change in decision.changes if change.after is Stage.GERMINATED]
    return germinated


@pytest.mark.parametrize("controller", RULES)
@pytest.mark.parametrize("horizon", range(1, 13))
def test_something_grows_and_is_finished_or_a_sentence_says_what_is_needed(controller: str, horizon: int):
    if horizon < SHORTEST:
        with pytest.raises(
            ConfigError, match=f"{horizon} decisions? is too few for anything to grow.*plan at least {SHORTEST}"
        ):
            begun(controller, horizon)
        return
    grower = begun(controller, horizon)
    assert grown(grower, horizon)
    ending = grower.finish()
    seeds = grower.model.seeds
    assert all(seed.fossilized and seed.alpha > 0 for seed in seeds.values())
    if controller != "random":
        assert seeds
        assert all(change.after is Stage.FOSSILIZED or change.before is Stage.GERMINATED for change in ending.changes)


@pytest.mark.parametrize("after", [0, 4, 100])
def test_all_slots_are_planted_once_nothing_has_improved_for_two_decisions_or_half_is_over(after: int):
    losses = [0.5 * 0.9 ** max(step - 1, 0) for step in range(after + 2)]  # the first decision has two
    grower = begun("all_at_plateau", 20, evaluate=lambda _: (losses.pop(0) if len(losses) > 1 else losses[0], 0.5))
    first = min(after + 3, 11)
    assert grown(grower, 20) == [first, first + 1]
    assert all(seed.fossilized for seed in grower.model.seeds.values())


@pytest.mark.parametrize(
    "names", [("block_copy", "block_zero"), ("block_zero", "block_copy"), ("norm", "block_zero", "block_copy")]
)
def test_everything_at_once_is_the_dearest_and_of_equals_the_first_that_was_named(names: tuple[str, ...]):
    torch.manual_seed(0)
    host = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, batch_first=True), nn.Linear(8, 3))
    model = esper.attach(host, {"0": list(names)}, torch.zeros(2, 4, 8))
    optimizer = torch.optim.SGD(model.parameter_groups(lr=0.0))
    grower = esper.Grower(model, optimizer, controller="all_at_start", evaluate=iter_down(0.9), horizon=12)
    grown(grower, 1)
    planted = [seed.blueprint.name for seed in model.seeds.values()]
    assert planted == [next(one for one in names if one.startswith("block"))]


@pytest.mark.parametrize("slots", range(1, 7))
def test_what_waits_for_a_plateau_plants_early_enough_for_all_its_slots(slots: int):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(slots)]
    model = esper.attach(nn.Sequential(*layers), [str(at) for at in range(slots)], torch.zeros(2, 4))
    optimizer = torch.optim.SGD(model.parameter_groups(lr=0.0))
    grower = esper.Grower(model, optimizer, controller="all_at_plateau", evaluate=iter_down(0.9), horizon=12)
    assert len(grown(grower, 12)) == slots
    assert all(seed.alpha == 1 for seed in model.seeds.values())


@pytest.mark.landing
def test_what_waits_for_a_plateau_waits_without_end_where_nobody_said_how_long_growth_is():
    assert not grown(begun("all_at_plateau", None, evaluate=iter_down(0.95)), 2 * HORIZON)


def test_growth_that_ends_before_the_plateau_is_long_enough_is_refused():
    with pytest.raises(ConfigError, match="growth.plateau 2 ends growth before controller 'all_at_plateau'"):
        begun("all_at_plateau", 20, growth=GrowthConfig(plateau=2))
    begun("all_at_plateau", 20, growth=GrowthConfig(plateau=3))


def iter_down(factor: float) -> Callable[[nn.Module], tuple[float, float]]:
    """A loss that falls by that factor with every call."""
    losses = (0.5 * factor**step for step in range(10**6))
    return lambda _: (next(losses), 0.5)


def test_nothing_grows_at_any_horizon_where_that_is_asked_for():
    grower = begun("none", 1)
    assert not grown(grower, 1)
    assert str(grower.finish()) == "Finished. No module was tried."


@pytest.mark.parametrize("controller", ["heuristic", "periodic"])
@pytest.mark.parametrize("tempo", [3, 5, 8])
@pytest.mark.parametrize("horizon", [20, 40, 100])
def test_where_there_is_time_every_seed_is_judged_after_its_probation(controller: str, tempo: int, horizon: int):
    grower = begun(controller, horizon, rules=Rules(tempos=(tempo,)))
    assert grown(grower, horizon)
    assert not grower.network.table.live.any()
    assert not grower.finish().changes


@pytest.mark.landing
@pytest.mark.parametrize("controller", ["heuristic", "periodic"])
def test_without_a_horizon_planting_goes_on(controller: str):
    """Each seed is pruned after its probation, so that there is always a place; with a horizon, that ends."""
    germinated = {horizon: grown(begun(controller, horizon, rent=1.0), 3 * HORIZON) for horizon in (None, HORIZON)}
    assert max(germinated[HORIZON]) <= 0.6 * HORIZON
    assert max(germinated[None]) > 2.8 * HORIZON
    assert max(later - sooner for sooner, later in zip(germinated[None], germinated[None][1:], strict=False)) < 20


@pytest.mark.parametrize("controller", RULES)
def test_isolation_is_refused(controller: str) -> None:
    with pytest.raises(ConfigError, match="isolation shadow, only `esper train` does: give rules"):
        begun(controller, 20, rules=Rules(isolation=Isolation.SHADOW, operations=[*Rules().operations, Op.ADVANCE]))


class Silent(Never):
    """Forgets to return its actions."""

    def act(self, observation: Any, masks: Any, state: Any) -> Any:
        return None


def test_a_controller_that_returns_nothing_is_named():
    grower = begun(Silent(), 20)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"'none' returned None from act: return the pair \(actions, state\)"):
        grower.step(train_loss=1.0)
