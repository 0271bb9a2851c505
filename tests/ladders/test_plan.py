"""What a ladder will do and cost, known before it trains."""

import threading
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import esper
from esper.errors import ConfigError, SlotError
from esper.ladders.ladder import plan_ladder
from esper.ladders.plan import LadderPlan
from ladders.small import DEPTHS, STEPS, Decoder, learn, tokens

UNUSABLE = (torch.rand(2, 6), {"nothing": tokens(2)}, (1,))


def plan(model: nn.Module | None = None, **options: Any) -> LadderPlan:
    settings = {"depths": DEPTHS, "steps": STEPS, "example_input": tokens(8)} | options
    return plan_ladder(Decoder() if model is None else model, **settings)


def test_a_plan_prints_every_size_and_what_all_of_them_cost_alone() -> None:
    found = plan()
    assert found.total_steps == 16 + 4 + 2 * (4 + 4)
    page = str(found)
    assert "3 sizes from one training, 1 to 4 blocks in 'blocks': 36 steps." in page
    assert f"{found.flops:.3g} FLOPs; each alone for 20 steps: {found.flops_alone:.3g}" in page
    assert [line.split()[0] for line in page.splitlines()[2:5]] == ["1", "2", "4"]


def test_costs_are_three_forward_passes_a_step() -> None:
    found = plan()
    forward = [rung.forward_flops for rung in found.rungs]
    assert forward[2] - forward[1] == 2 * (forward[1] - forward[0]) > 0
    assert [rung.flops_alone for rung in found.rungs] == [3 * 8 * STEPS * each for each in forward]
    spent = 0.0
    for rung, steps in zip(found.rungs, (20, 8, 8), strict=True):
        spent += 3 * 8 * steps * rung.forward_flops
        assert rung.flops == pytest.approx(spent)
    assert found.compute_flops(found.total_steps) == pytest.approx(found.flops)
    assert found.compute_flops(20) == pytest.approx(found.rungs[0].flops)
    assert found.compute_flops(0) == pytest.approx(0)
    assert "so 0% less." in str(plan(depths=[1]))

    def learn_twice(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
        for part in batch.split(4):
            learn(model, optimizer, part)

    assert plan(example_input=None, train_step=learn_twice, data=[tokens(8)]).flops == found.flops


def test_every_step_has_a_phase_and_rates_fall_to_zero_on_each_branch() -> None:
    found = plan(steps=100, share=0.3, decay=0.1, rates=[1, 0.5, 2])
    phases = [found.find_phase(step) for step in range(found.total_steps)]
    assert [phase.rung for phase in phases] == [0] * 100 + [1] * 40 + [2] * 40
    assert sum(phase.decays for phase in phases) == 30
    rates = [found.compute_rate(step) for step in range(found.total_steps)]
    assert rates[0] == 0  # of the warm-up
    assert rates[1] == 0.5
    assert rates[5] == rates[89] == 1
    assert rates[100] == 0.5
    assert rates[140] == rates[170] == 2
    assert all(before > after for before, after in pairwise(rates[170:180]))
    assert found.compute_rate(found.total_steps) == 0
    assert [found.find_branch_step(rung) for rung in range(3)] == [90, 130, 170]


@pytest.mark.parametrize("decay", [0.1, 0.3, 0.5])
@pytest.mark.parametrize("steps", [5, 7, 15, 25])
def test_the_first_rung_has_as_many_steps_as_were_asked_for(steps: int, decay: float) -> None:
    try:
        found = plan(steps=steps, decay=decay)
    except ConfigError:  # a phase without steps
        assert steps * decay <= 0.5
        return
    assert found.rungs[0].steps + found.rungs[0].decay_steps == steps
    assert found.rungs[0].flops == pytest.approx(found.rungs[0].flops_alone)


def test_arguments_that_a_model_does_not_name_are_refused() -> None:
    class Unnamed(Decoder):
        def forward(self, *inputs: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return scale * super().forward(*inputs)

    def learn_scaled(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
        model(batch, scale=2.0).sum().backward()

    with pytest.raises(ConfigError, match="Unnamed.forward does not name the positional ones: give example_input"):
        plan(Unnamed(), example_input=None, train_step=learn_scaled, data=[tokens(8)])


@pytest.mark.parametrize("measure", ["parameters", "flops"])
def test_sizes_may_be_given_in_another_unit(measure: str) -> None:
    rungs = plan().rungs
    sizes = [rung.parameters if measure == "parameters" else rung.forward_flops for rung in rungs]
    sizes[1] = int(sizes[1] * 1.05)
    found = plan(depths=None, **{measure: sizes})
    assert [rung.depth for rung in found.rungs] == list(DEPTHS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depths": None}, "in one way"),
        ({"parameters": [1, 2]}, "in one way"),
        ({"depths": [1, 1, 2]}, "increase"),
        ({"depths": [2, 1]}, "increase"),
        ({"depths": []}, "depths is"),
        ({"depths": [0, 1]}, "depths is"),
        ({"depths": "124"}, "depths is"),
        ({"depths": [2, 4]}, "the first size, has 1 block: build a model with 2"),
        ({"depths": [1, 10**9]}, "has 1 block"),
        ({"depths": None, "parameters": [5, 10]}, "parameters starts at 5, but the given model"),
        ({"depths": None, "parameters": [743, 750]}, "differ by less than a block"),
        ({"steps": 2}, "give more steps"),
        ({"steps": 0}, "steps is 0"),
        ({"share": 0}, "share"),
        ({"decay": 1.0}, "decay"),
        ({"rates": [1, 2]}, "for each of the 3 sizes"),
        ({"rates": [1, 0, 1]}, "above 0"),
        ({"blocks": ["nothing"]}, "'nothing'"),
        ({"example_input": None}, "give example_input"),
        ({"example_input": None, "train_step": lambda model, optimizer: None}, "does not call the whole model"),
        ({"example_input": None, "train_step": learn, "data": iter([tokens()])}, "cannot be repeated"),
    ],
)
def test_what_cannot_be_done_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(**options)


def test_models_that_a_ladder_cannot_grow_are_refused() -> None:
    class First(Decoder):
        def forward(self, indices: torch.Tensor) -> torch.Tensor:
            return self.head(self.blocks[0](self.embed(indices)))

    partly, sharing, locked = Decoder(), Decoder(2), Decoder()
    partly.head = torch.compile(partly.head, backend="eager")
    sharing.blocks[1].register_parameter("common", next(sharing.blocks[0].parameters()))
    locked.blocks[0].lock = threading.Lock()
    growing = esper.attach(Decoder(), {"blocks.0": ["block_copy"]}, tokens(2))
    for model, message, options in (
        (First(), "do not run", {}),
        (growing, "slots", {}),
        (torch.compile(Decoder(), backend="eager"), "compiled by torch.compile", {}),
        (partly, "compiled by torch.compile", {}),
        (nn.DataParallel(Decoder()), "data parallelism", {}),
        (sharing, "are one parameter", {"depths": [2, 4]}),
        (locked, "cannot be copied", {}),
        *((Decoder(), "cannot run on the example input|has no", {"example_input": one}) for one in UNUSABLE),
    ):
        with pytest.raises((ConfigError, SlotError), match=message):
            plan(model, **options)


def test_copies_that_do_not_run_are_refused_for_any_measure() -> None:
    class Gated(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.gates = nn.Parameter(torch.ones(1))

        def forward(self, indices: torch.Tensor) -> torch.Tensor:
            hidden = self.embed(indices)
            for gate, block in zip(self.gates, self.blocks, strict=False):
                hidden = gate * block(hidden)
            return self.head(hidden)

    for sizes in ({"depths": [1, 2]}, {"depths": None, "flops": [1e4, 2e4]}):
        with pytest.raises(ConfigError, match="do not run"):
            plan(Gated(), **sizes)


def test_planning_changes_neither_the_model_nor_random_numbers() -> None:
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    plan(model, example_input=None, train_step=learn, data=[tokens(8)], optimizer=optimizer)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer.state
