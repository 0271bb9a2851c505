"""Figures of shared passes are those of separate ones to the bit; where they might not be, passes are separate."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import esper
from esper.grower import shared_forward
from esper.grower.shared_forward import MIN_SHARED_VARIANTS, SharedForwardEvaluator
from esper.growth.model import GrowingModel
from growth.hosts import Host, every_host, outputs, stir

MINIBATCHES = 3
WIDTH = 6

Measure = Callable[[GrowingModel], Any]


def separately(model: GrowingModel, evaluate: Measure, changes: Mapping[str, float]) -> tuple[Any, dict[str, Any]]:
    """What shared passes must equal."""
    usual, others = evaluate(model), {}
    for name, weight in changes.items():
        with model.slots[name].seed.temporary_alpha(weight):
            others[name] = evaluate(model)
    return usual, others


class Counter:
    """How often a module is computed."""

    def __init__(self, module: nn.Module) -> None:
        self.calls = 0
        self._forward = module.forward
        vars(module)["forward"] = self

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        self.calls += 1
        return self._forward(*arguments, **keywords)


def stirred(host: Host) -> GrowingModel:
    """A seed that has something to say in every slot."""
    model = host.attached()
    for slot in host.slots:
        stir(model, slot, model.slots[slot].blueprints[0])
    return model


def first_leaf(model: GrowingModel) -> nn.Module:
    """The submodule without submodules that is called first."""
    called: list[nn.Module] = []
    leaves = [module for module in model.host.modules() if not list(module.children())]
    handles = [leaf.register_forward_hook(lambda module, *_: called.append(module)) for leaf in leaves]
    with torch.no_grad():
        model.eval()
        outputs(model, PROBED[0]())
    for handle in handles:
        handle.remove()
    return called[0]


PROBED: list[Any] = []


@every_host
def test_what_lies_before_a_seed_is_computed_once_and_figures_are_the_same(host: Host) -> None:
    model = stirred(host)
    changes = dict.fromkeys(host.slots, 0.0) | {host.slots[-1]: 1.0}
    PROBED[:] = [host.arguments]
    counter = Counter(first_leaf(model))

    @torch.no_grad()
    def evaluate(model: GrowingModel) -> list[Tensor]:
        model.eval()
        return [outputs(model, host.arguments()) * number for number in range(1, 1 + MINIBATCHES)]

    expected = separately(model, evaluate, changes)
    assert any(not torch.equal(expected[0][0], other[0]) for other in expected[1].values())
    passes = SharedForwardEvaluator(model)
    for proofs in (1 + len(changes), 0):
        counter.calls = 0
        usual, others = passes.measure(evaluate, changes)
        assert passes.fallback_reason is None
        assert counter.calls == MINIBATCHES + proofs
        for one, other in zip((usual, *others.values()), (expected[0], *expected[1].values()), strict=True):
            assert all(map(torch.equal, one, other))


class Net(nn.Module):
    """Two places for slots, in a block and behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))
        self.again = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def features(self, inputs: Tensor) -> Tensor:
        hidden = self.embed(inputs)
        return self.again(self.again(hidden + self.block(hidden)))

    def forward(self, inputs: Tensor) -> Any:
        return self.head(self.last(self.features(inputs)).relu())


class Pathless(Net):
    """Adds in place to what a submodule returned."""

    def features(self, inputs: Tensor) -> Tensor:
        hidden = self.embed(inputs)
        hidden += 1
        return hidden + self.block(hidden)


class Counting(Net):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Any:
        self.calls += 1
        return super().forward(inputs)


class Remembering(Net):
    """What it returned last takes part in what it returns next."""

    memory = 0.0

    def forward(self, inputs: Tensor) -> Any:
        found = super().forward(inputs + self.memory)
        self.memory = found.mean()
        return found


class Straying(Net):
    """Calls a submodule once more every other time."""

    calls = 0

    def features(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % 2:
            self.embed(inputs)
        return super().features(inputs)


class Random(Net):
    def forward(self, inputs: Tensor) -> Any:
        return F.dropout(super().forward(inputs), 0.5)


class Greedy(Net):
    """Changes its input."""

    def forward(self, inputs: Tensor) -> Any:
        return super().forward(inputs.mul_(0.5))


class Exiting(Net):
    """Returns what a submodule returned."""

    def forward(self, inputs: Tensor) -> Any:
        early = self.embed(inputs)
        return self.head(self.last(early + self.block(early))), early


class Listing(Net):
    """A submodule returns something of which nobody knows what it is."""

    def forward(self, inputs: Tensor) -> Any:
        return iter([super().forward(inputs)])


@dataclass
class Answer:
    logits: Tensor
    scale: float = 2.0


class Answering(Net):
    def forward(self, inputs: Tensor, *, twice: bool = False) -> Any:
        logits = super().forward(inputs)
        return Answer(logits) if twice else {"logits": logits}


def data() -> list[Tensor]:
    return list(torch.randn(MINIBATCHES, 5, 4, generator=torch.Generator().manual_seed(3)))


def each(model: GrowingModel, minibatches: list[Tensor], forward: Callable[[Tensor], Any] | None = None) -> list[Any]:
    model.eval()
    with torch.no_grad():
        return [(model if forward is None else forward)(minibatch) for minibatch in minibatches]


def plainly(model: GrowingModel) -> list[Any]:
    return each(model, data())


def with_gradients(model: GrowingModel) -> list[Any]:
    model.eval()
    return [model(minibatch).detach() for minibatch in data()]


def in_training_mode(model: GrowingModel) -> list[Any]:
    model.train()
    with torch.no_grad():
        return [model(minibatch) for minibatch in data()]


def of_the_host(model: GrowingModel) -> list[Any]:
    return each(model, data(), model.host)


def of_a_submodule_too(model: GrowingModel) -> list[Any]:
    return [each(model, data()), each(model, data(), model.host.features)]


def hooked(model: GrowingModel) -> list[Any]:
    seen: list[Tensor] = []
    handle = model.host.embed.register_forward_hook(lambda *called: seen.append(called[2]))
    found = each(model, data())
    handle.remove()
    return [*found, torch.tensor(len(seen))]


def twice(model: GrowingModel) -> list[Any]:
    return each(model, [part for minibatch in data() for part in (minibatch, minibatch.flip(0))])


def changed_in_place(model: GrowingModel) -> list[Any]:
    buffer, found = torch.zeros(5, 4), list[Any]()
    for minibatch in data():
        found += [logits.mul_(2) for logits in each(model, [buffer.copy_(minibatch)])]
    return found


def halved(model: GrowingModel) -> list[Any]:
    found, other = each(model, data()), copy.deepcopy(model)
    with torch.no_grad():
        other.host.embed.weight.mul_(0.5)
    return [*found, *each(other, data())]


def compiled(model: GrowingModel) -> list[Any]:
    return each(model, data(), torch.compile(model, backend="eager"))


def compiled_in_part(model: GrowingModel) -> list[Any]:
    model.host.block.compile(backend="eager")
    return each(model, data())


def remembering(model: GrowingModel) -> list[Any]:
    model.host.memory = 0.0
    return each(model, data())


def of_both_kinds(model: GrowingModel) -> list[Any]:
    found = each(model, data(), lambda one: model(inputs=one)["logits"])
    return found + [answer.logits * answer.scale for answer in each(model, data(), lambda one: model(one, twice=True))]


CASES: dict[str, tuple[Callable[[], nn.Module], Measure, str | None]] = {
    "plain": (Net, plainly, None),
    "grad": (Net, with_gradients, "torch.no_grad"),
    "train": (Net, in_training_mode, "eval mode"),
    "host": (Net, of_the_host, None),
    "submodule": (Net, of_a_submodule_too, None),
    "hooks": (Net, hooked, "forward hooks"),
    "several calls": (Net, twice, None),
    "in place outside": (Net, changed_in_place, None),
    "copies": (Net, halved, "copied"),
    "compiled": (Net, compiled, "compiled"),
    "compiled in part": (Net, compiled_in_part, "compiled"),
    "in place inside": (Pathless, plainly, "do not follow"),
    "buffers": (Counting, plainly, "buffers"),
    "memory": (Remembering, remembering, "do not follow"),
    "other calls": (Straying, plainly, "calls other submodules"),
    "inputs": (Greedy, plainly, "changes its inputs"),
    "exits": (Exiting, plainly, "returned before"),
    "keywords": (Answering, of_both_kinds, None),
}


def grown(kind: Callable[[], nn.Module]) -> GrowingModel:
    torch.manual_seed(0)
    model = esper.attach(kind(), ["block.0", "last"], torch.randn(2, 4))
    for name in model.slots:
        stir(model, name, "mlp")
    return model


@pytest.mark.landing
@pytest.mark.parametrize("name", CASES)
def test_figures_are_those_of_separate_passes_whatever_the_measure_does(name: str) -> None:
    torch.compiler.reset()
    kind, evaluate, why = CASES[name]
    changes = {"block.0": 0.0, "last": 1.0}
    model, other = grown(kind), grown(kind)
    expected = separately(model, evaluate, changes)
    passes = SharedForwardEvaluator(other)
    for _ in range(2):
        found = passes.measure(evaluate, changes)
        torch.testing.assert_close(flat(found), flat(expected), rtol=0, atol=0)
    assert (passes.fallback_reason is None) == (why is None), passes.fallback_reason
    assert why is None or why in str(passes.fallback_reason)
    assert all("forward" not in vars(module) for module in other.modules()), "nothing stays behind"


def flat(found: tuple[Any, dict[str, Any]]) -> list[Tensor]:
    leaves = list[Tensor]()

    def collect(value: Any) -> None:
        if isinstance(value, Tensor):
            leaves.append(value)
        else:
            for part in value.values() if isinstance(value, Mapping) else value:
                collect(part)

    collect(found)
    return leaves


def test_randomness_makes_passes_separate() -> None:
    passes = SharedForwardEvaluator(grown(Random))
    passes.measure(plainly, {"last": 0.0})
    assert "do not follow" in str(passes.fallback_reason)


def test_what_nobody_can_compare_makes_passes_separate() -> None:
    passes = SharedForwardEvaluator(grown(Listing))
    passes.measure(lambda model: [list(one) for one in plainly(model)], {"last": 0.0})
    assert "returns a list_iterator" in str(passes.fallback_reason)


def test_other_inputs_in_later_calls_are_computed() -> None:
    """A measure that goes through its data in another order every time, and gives the same all the same."""
    model, turn = grown(Net), 0

    def evaluate(model: GrowingModel) -> list[Tensor]:
        nonlocal turn
        turn += 1
        order = [(number + turn) % MINIBATCHES for number in range(MINIBATCHES)]
        found = dict(zip(order, each(model, [data()[number] for number in order]), strict=True))
        return [found[number] for number in range(MINIBATCHES)]

    changes = {"block.0": 0.0, "last": 1.0}
    expected = separately(model, evaluate, changes)
    torch.testing.assert_close(
        flat(SharedForwardEvaluator(model).measure(evaluate, changes)), flat(expected), rtol=0, atol=0
    )


def test_not_too_much_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model, changes = grown(Net), {"block.0": 0.0, "last": 1.0}
    monkeypatch.setattr(shared_forward, "MAX_KEPT_BYTES", 300)
    passes = SharedForwardEvaluator(model)
    found = passes.measure(plainly, changes)
    torch.testing.assert_close(flat(found), flat(separately(model, plainly, changes)), rtol=0, atol=0)
    assert "have to be kept" in str(passes.fallback_reason)


def test_a_known_figure_spares_a_pass_unless_sharing_spares_more() -> None:
    model = grown(Net)
    assert len(model.slots) < MIN_SHARED_VARIANTS
    counter = Counter(model.host.embed)
    known = plainly(model)
    counter.calls = 0
    usual, _ = SharedForwardEvaluator(model).measure(plainly, {"last": 0.0}, known)
    assert usual is known
    assert counter.calls == MINIBATCHES


def test_another_set_of_seeds_is_tried_anew() -> None:
    model, changes = grown(Net), {"last": 0.0}
    passes, counter = SharedForwardEvaluator(model), Counter(model.host.embed)
    calls: list[int] = []
    for _ in range(2):
        passes.measure(plainly, changes)
        calls.append(counter.calls)
    model.slots["block.0"].remove()
    passes.measure(plainly, changes)
    calls.append(counter.calls)
    assert calls == [MINIBATCHES + 2, 2 * MINIBATCHES + 2, 3 * MINIBATCHES + 4]
