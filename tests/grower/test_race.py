"""A race lets each candidate train alike, the best wins, and the model becomes what the winner learned to be."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import distributed, multiprocessing, nn
from torch.nn import functional as F

import esper
from esper.errors import ConfigError, DivergedError, EsperError, SlotError, UnknownBlueprintError
from esper.grower.race import Candidate, Race
from grower.training_loop import data, growing, validate

CANDIDATES: list[Candidate] = [{}, {"0": "mlp"}, {"0": "norm", "2": "lowrank"}]
FLOPS, RANKS = 2e6, 2


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    inputs, labels = data()
    part = slice(step % 3 * 32, (step % 3 + 1) * 32)
    loss = F.cross_entropy(model(F.dropout(inputs[part], 0.1)), labels[part])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def begun() -> tuple[esper.GrowingModel, torch.optim.Optimizer]:
    model = growing()
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=0.02))
    model.link(optimizer)
    torch.manual_seed(3)
    for step in range(3):
        learn(model, optimizer, step)
    return model, optimizer


def by_hand(candidate: Candidate) -> tuple[esper.GrowingModel, torch.optim.Optimizer]:
    """What a candidate is to become, without `esper.race`."""
    model, optimizer = begun()
    generator = torch.Generator().manual_seed(0)
    for slot, blueprint in candidate.items():
        model.slots[slot].germinate(blueprint, generator, alpha=1.0)
    spending, step = esper.Spending(model, FLOPS), 0
    while spending.share < 1:
        learn(model, optimizer, step)
        step += 1
    return model, optimizer


def race(**options: Any) -> tuple[esper.GrowingModel, torch.optim.Optimizer, Race]:
    model, optimizer = begun()
    given = {"candidates": CANDIDATES, "learn": learn, "evaluate": validate, "training_flops": FLOPS, **options}
    return model, optimizer, esper.race(model, optimizer, **given)


def assert_same_optimizers(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["param_groups"] == other["param_groups"]
    torch.testing.assert_close(one["state"], other["state"], rtol=0, atol=0)


def test_the_model_becomes_what_the_best_candidate_learned_to_be() -> None:
    model, optimizer, won = race()
    expected = [by_hand(candidate) for candidate in CANDIDATES]
    losses = tuple(validate(one)[0] for one, _ in expected)
    assert won.losses == losses
    assert won.winner == losses.index(min(losses))
    assert len(set(losses)) == len(CANDIDATES)
    best, its = expected[won.winner]
    torch.testing.assert_close(model.state_dict(), best.state_dict(), rtol=0, atol=0)
    assert_same_optimizers(optimizer.state_dict(), its.state_dict())
    for one, other in ((model, optimizer), (best, its)):
        torch.manual_seed(0)
        learn(one, other, 0)
    torch.testing.assert_close(model.state_dict(), best.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("wanted", range(len(CANDIDATES)))
def test_any_may_win_and_the_model_goes_on_as_one_that_grew(wanted: int) -> None:
    def evaluate(model: esper.GrowingModel) -> float:
        return float(set(model.seeds) != set(CANDIDATES[wanted]))

    model, optimizer, won = race(evaluate=evaluate)
    assert won.winner == wanted
    assert {slot: seed.blueprint.name for slot, seed in model.seeds.items()} == CANDIDATES[wanted]
    for slot in CANDIDATES[wanted]:
        model.slots[slot].fossilize()
    grower = esper.Grower(model, optimizer, "none", evaluate=validate, classes=3)
    learn(model, optimizer, 0)
    grower.step(train_loss=1.0)
    inputs, _ = data()
    torch.testing.assert_close(model.eval().finalize()(inputs), model(inputs))


def test_the_budget_is_each_ones_own_and_counted() -> None:
    spending = esper.Spending(growing())
    steps = list[int]()

    def count(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        steps.append(step)
        learn(model, optimizer, step)

    race(learn=count, counted_in=spending)
    counts = [last + 1 for last, after in zip(steps, [*steps[1:], 0], strict=True) if after == 0]
    assert len(counts) == len(CANDIDATES)
    assert counts[0] > max(counts[1:]), "what grew makes steps dearer, and gets fewer"
    assert spending.flops > len(CANDIDATES) * FLOPS


def test_random_numbers_are_the_same_for_all_and_not_used_up() -> None:
    drawn = list[tuple[float, float]]()

    def draw(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 0:
            drawn.append((float(torch.rand(1)), 0.0))
        learn(model, optimizer, step)

    def evaluate(model: esper.GrowingModel) -> float:
        drawn[-1] = drawn[-1][0], float(torch.rand(1).sign())
        return validate(model)[0]

    model, optimizer = begun()
    before = torch.get_rng_state()
    esper.race(model, optimizer, CANDIDATES, draw, evaluate, training_flops=FLOPS)
    assert len(drawn) == len(CANDIDATES)
    assert len(set(drawn)) == 1
    assert torch.equal(before, torch.get_rng_state())


def test_values_of_seeds_follow_from_the_seed() -> None:
    def stand_still(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        model(data()[0])

    values = list[torch.Tensor]()
    for seed in (0, 0, 1):
        model, *_ = race(candidates=[{"0": "mlp"}], learn=stand_still, seed=seed)
        values.append(torch.cat([parameter.detach().flatten() for parameter in model.seeds["0"].parameters()]))
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])


def test_what_blows_up_loses() -> None:
    def evaluate(model: esper.GrowingModel) -> float:
        return math.inf if not model.seeds else math.nan if "2" in model.seeds else 7.0

    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        *_, won = race(evaluate=evaluate, candidates=[CANDIDATES[place] for place in order])
        assert order[won.winner] == 1
        assert [math.isfinite(loss) for loss in won.losses] == [place == 1 for place in order]


def test_who_trains_another_model_is_told() -> None:
    model, optimizer = begun()
    with pytest.raises(ConfigError, match="learn did not call the model that it was given"):
        esper.race(
            model, optimizer, [{}], lambda _, __, step: learn(model, optimizer, step), validate, training_flops=1e6
        )


def test_losers_are_let_go() -> None:
    alive, seen = WeakSet[nn.Module](), list[int]()

    def evaluate(model: esper.GrowingModel) -> float:
        alive.add(model)
        seen.append(len(alive))
        return float(len(seen))  # the first stays the best

    race(candidates=[{}] * 5, evaluate=evaluate)
    assert seen == [1, 2, 2, 2, 2]


def test_an_average_gets_what_the_winner_learned_and_buffers_come_along() -> None:
    model, optimizer = begun()
    model.host.register_buffer("calls", torch.zeros(()), persistent=False)
    model.host.register_forward_pre_hook(count_calls)
    average = copy.deepcopy(model)
    model.mirror(average)
    esper.race(model, optimizer, [{"0": "mlp"}], learn, validate, training_flops=FLOPS)
    for name, value in model.seeds["0"].named_parameters():
        assert torch.equal(value, average.seeds["0"].get_parameter(name))
    assert float(model.host.get_buffer("calls")) > 5


def count_calls(module: nn.Module, _: Any) -> None:
    module.get_buffer("calls").add_(1)


def test_modes_are_those_of_the_model_and_nothing_stays_behind() -> None:
    model, optimizer = begun()
    hooks = len(optimizer._optimizer_step_pre_hooks)
    model.host[1].eval()
    modes = set[tuple[bool, bool]]()

    def look_at_modes(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        modes.add((model.training, model.host[1].training))
        learn(model, optimizer, step)

    esper.race(model, optimizer, CANDIDATES, look_at_modes, validate, training_flops=FLOPS)
    assert modes == {(True, False)}
    assert len(optimizer._optimizer_step_pre_hooks) == hooks


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"candidates": []}, ConfigError, r"give a list of mappings from slots to blueprints"),
        ({"candidates": ["0"]}, ConfigError, r"give a list of mappings"),
        ({"candidates": [["0m"]]}, ConfigError, r"give a list of mappings"),
        ({"candidates": [{"0": 3}]}, ConfigError, r"give a list of mappings"),
        ({"candidates": [{}, {"7": "mlp"}]}, SlotError, "no slot '7'; this model has 0, 2"),
        ({"candidates": [{}, {"2": "norm"}]}, SlotError, "is not on offer at slot '2'"),
        ({"candidates": [{}, {"2": "mpl"}]}, UnknownBlueprintError, "'mpl'"),
        ({"learn": 3}, ConfigError, "give a function of a model, its optimizer and the number of the step"),
        ({"evaluate": lambda _: "good"}, ConfigError, "evaluate returned"),
        ({"evaluate": lambda _: math.nan}, DivergedError, "none of the candidates has a loss that is finite"),
        ({"training_flops": -1}, ConfigError, "give a number of FLOPs above 0"),
        ({"counted_in": 3.0}, ConfigError, "give an esper.Spending"),
        ({"seed": -1}, ConfigError, "whole number from 0 on"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    options: dict[str, Any], error: type[EsperError], words: str
) -> None:
    model, optimizer = begun()
    before, its = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    given = {"candidates": CANDIDATES, "learn": learn, "evaluate": validate, "training_flops": FLOPS, **options}
    with pytest.raises(error, match=words):
        esper.race(model, optimizer, **given)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert_same_optimizers(optimizer.state_dict(), its)


def test_a_slot_that_is_taken_is_refused_before_anything_trains() -> None:
    model, optimizer = begun()
    model.slots["2"].germinate("mlp", alpha=1.0)
    with pytest.raises(SlotError, match="slot '2' is taken"):
        esper.race(
            model, optimizer, [{}, {"2": "mlp"}], lambda *_: pytest.fail("trained"), validate, training_flops=FLOPS
        )


class Remembering(nn.Module):
    """Has a buffer that grows with every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen = torch.cat([self.seen, torch.ones(1)])
        return inputs


def test_buffers_that_grew_are_the_winners() -> None:
    torch.manual_seed(0)
    host = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), Remembering(), nn.Linear(8, 3))
    model = esper.attach(host, {"0": ["mlp"]}, torch.zeros(2, 4))
    optimizer = torch.optim.AdamW(model.parameter_groups(lr=0.02))
    model.link(optimizer)
    steps: list[int] = []

    def count(branch: nn.Module, its_optimizer: torch.optim.Optimizer, step: int) -> None:
        learn(branch, its_optimizer, step)
        steps.append(step)

    before = len(host[2].seen)
    esper.race(model, optimizer, [{"0": "mlp"}], count, validate, training_flops=FLOPS)
    assert len(host[2].seen) == before + len(steps) > before + 1
    learn(model, optimizer, 0)


def _race_in_a_process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", RANKS)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)

    def learn_together(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        inputs, labels = data()
        loss = F.cross_entropy(model(inputs[rank::RANKS]), labels[rank::RANKS])
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                distributed.all_reduce(parameter.grad)
                parameter.grad /= RANKS
        optimizer.step()

    def evaluate(model: esper.GrowingModel) -> float:
        assert rank == 0, "only the first process evaluates"
        return validate(model)[0]

    model, _, won = race(learn=learn_together, evaluate=evaluate)
    held = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    torch.save((won.winner, won.losses, held), f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.slow
def test_several_processes_become_the_same_winner(tmp_path: Path) -> None:
    multiprocessing.start_processes(_race_in_a_process, (str(tmp_path),), RANKS, start_method="spawn")
    (*won, one), (*other_won, other) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS))
    assert won == other_won
    torch.testing.assert_close(one, other, rtol=0, atol=0)
