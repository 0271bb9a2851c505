"""Threads call a model while another switches its growth: each pass is that of one network, with its own input."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import esper
from esper.errors import SlotError
from esper.growth import passes
from esper.growth.model import GrowingModel
from esper.growth.seed import Seed
from esper.growth.side_pass import side_pass
from esper.lifecycle.rules import Isolation
from growth.growing import plant, random
from growth.hosts import Host, every_host, outputs, stir

WIDTH, LAYERS = 6, 4
SHORT = 0.2
"""Seconds in which a switch that does not wait would be over."""


def make_chain() -> tuple[GrowingModel, Tensor]:
    """Linear layers with a seed behind each but the last."""
    torch.manual_seed(0)
    host = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    inputs = random(3, WIDTH)
    model = esper.attach(host, {str(place): ["mlp"] for place in range(LAYERS - 1)}, inputs, freeze_host=True).eval()
    for name in model.slots:
        plant(model, name, "mlp")
    return model, inputs


def make_encoder() -> tuple[GrowingModel, Tensor]:
    """Two of torch's encoder layers, which take another path where they have no hooks."""
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", batch_first=True) for _ in range(2)]
    inputs = random(2, 3, 8)
    host = nn.Sequential(nn.Linear(8, 8), *layers)
    model = esper.attach(host, {"1": ["mlp"], "2": ["mlp"]}, inputs, freeze_host=True).eval()
    for name in model.slots:
        plant(model, name, "mlp")
    return model, inputs


def list_seeds(model: GrowingModel) -> list[Seed]:
    return list(model.seeds.values())


@contextmanager
def isolated_side_pass(model: GrowingModel) -> Generator[None]:
    with side_pass(model, list_seeds(model)):
        yield


@contextmanager
def pruned(model: GrowingModel) -> Generator[None]:
    slot = model.slots.values()[-1]
    seed = slot.seed
    slot.prune()
    yield
    assert seed is not None
    slot.plant(seed)


@contextmanager
def weighted(model: GrowingModel) -> Generator[None]:
    slot = model.slots.values()[-1]
    slot.set_alpha(0.0)
    yield
    slot.set_alpha(0.7)


SWITCHES: dict[str, Callable[[GrowingModel], AbstractContextManager[Any]]] = {
    "without growth": lambda model: model.without_growth(),
    "without one slot": lambda model: model.slots.values()[-1].disabled(),
    "a variant for a contribution": lambda model: model.slots.values()[-1].temporary_alpha(0.0),
    "a pass on the side": isolated_side_pass,
    "pruned": pruned,
    "another weight": weighted,
}
"""All ways in which a model becomes another one for a while."""


def same(first: Tensor, second: Tensor) -> bool:
    """Equal but for rounding: torch may share the work of another thread among more cores."""
    return torch.allclose(first, second, atol=1e-5)


def compute(network: nn.Module, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return network(inputs)


class Pause:
    """A forward hook at which the first pass of another thread than this one stops, until it may go on."""

    def __init__(self, module: nn.Module) -> None:
        self._watched = threading.current_thread()
        self.reached, self.go_on = threading.Event(), threading.Event()
        self._handle = module.register_forward_hook(self)

    def __call__(self, *_: Any) -> None:
        if threading.current_thread() is not self._watched and not self.reached.is_set():
            self.reached.set()
            assert self.go_on.wait(60)
            self._handle.remove()


def switch_within_a_pass(
    call: Callable[[], Tensor], at: nn.Module, switch: Callable[[], AbstractContextManager[Any]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs of a pass in which another thread begins a switch, of the next one, and of one after the switch."""
    pause, entered, leave = Pause(at), threading.Event(), threading.Event()

    def hold() -> None:
        with switch():
            entered.set()
            assert leave.wait(60)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(call)
        assert pause.reached.wait(60)
        held = pool.submit(hold)
        entered.wait(SHORT)
        pause.go_on.set()
        during = first.result(60)
        assert entered.wait(60)
        within = call()
        leave.set()
        held.result(60)
    return during, within, call()


@pytest.mark.parametrize("make", [make_chain, make_encoder])
@pytest.mark.parametrize("way", SWITCHES)
def test_a_pass_that_is_under_way_ends_with_the_growth_with_which_it_began(
    way: str, make: Callable[[], tuple[GrowingModel, Tensor]]
) -> None:
    model, inputs = make()
    grown = compute(model, inputs)
    with SWITCHES[way](model):
        switched = compute(model, inputs)
    assert not same(grown, switched)
    during, within, after = switch_within_a_pass(
        lambda: compute(model, inputs), model.host.get_submodule("1"), lambda: SWITCHES[way](model)
    )
    assert same(during, grown)
    assert same(within, switched)
    assert same(after, grown)


@every_host
def test_a_pass_of_any_host_is_with_growth_or_without(host: Host) -> None:
    model = host.attached().eval()
    for name in host.slots:
        stir(model, name, model.slots[name].blueprints[0])

    def call() -> Tensor:
        with torch.no_grad():
            return outputs(model, host.arguments())

    grown = call()
    with model.without_growth():
        bare = call()
    assert not same(grown, bare)
    during, within, after = switch_within_a_pass(call, model.host.get_submodule(host.slots[0]), model.without_growth)
    assert same(during, grown)
    assert same(within, bare)
    assert same(after, grown)


def test_a_pass_of_the_host_itself_is_one_of_the_model() -> None:
    model, inputs = make_chain()
    during, _, _ = switch_within_a_pass(
        lambda: compute(model.host, inputs), model.host.get_submodule("1"), model.without_growth
    )
    assert same(during, compute(model, inputs))


@pytest.mark.parametrize("way", SWITCHES)
def test_threads_that_call_while_growth_comes_and_goes_get_one_model_or_the_other(way: str) -> None:
    model, inputs = make_chain()
    grown = compute(model, inputs)
    with SWITCHES[way](model):
        switched = compute(model, inputs)
    ended = threading.Event()

    def call() -> list[Tensor]:
        computed = list[Tensor]()
        while not ended.is_set():
            computed.append(compute(model, inputs))
        return computed

    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(call) for _ in range(2)]
        start = time.monotonic()
        while time.monotonic() - start < 2 * SHORT:
            with SWITCHES[way](model):
                assert same(compute(model, inputs), switched)
        ended.set()
        computed = [output for one in calls for output in one.result(60)]
    assert computed
    assert all(same(output, grown) or same(output, switched) for output in computed)
    assert same(compute(model, inputs), grown)


def test_threads_to_which_a_batch_is_scattered_find_growth_out_of_sight() -> None:
    model, inputs = make_chain()
    with model.without_growth():
        bare = compute(model, inputs)
    with model.without_growth(), ThreadPoolExecutor(3) as pool:
        parts = list(pool.map(lambda part: compute(model, part), inputs.split(1)))
    assert torch.allclose(torch.cat(parts), bare, atol=1e-6)
    assert not torch.allclose(compute(model, inputs), bare, atol=1e-3)


def test_a_seed_reads_the_input_of_its_own_pass() -> None:
    torch.manual_seed(0)
    host, inputs, others = (
        nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(2)]),
        random(3, WIDTH),
        random(3, WIDTH),
    )
    model = esper.attach(host, {"1": ["input_skip"]}, inputs).eval()
    plant(model, "1", "input_skip")
    others = others * 5
    expected = compute(model, inputs)
    pause = Pause(model.host.get_submodule("0"))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(compute, model, inputs)
        assert pause.reached.wait(60)
        compute(model, others)
        pause.go_on.set()
        assert same(first.result(60), expected)


def test_growth_may_be_switched_off_within_a_pass_of_the_same_thread() -> None:
    model, inputs = make_chain()
    bare = list[Tensor]()

    def compare(*_: Any) -> None:
        handle.remove()
        with model.without_growth():
            bare.append(compute(model, inputs))

    handle = model.host.get_submodule("1").register_forward_hook(compare)
    grown = compute(model, inputs)
    assert same(compute(model, inputs), grown)
    with model.without_growth():
        assert same(bare[0], compute(model, inputs))


def test_two_passes_that_both_switch_growth_off_do_not_wait_for_each_other() -> None:
    model, inputs = make_chain()
    both = threading.Barrier(2, timeout=60)

    def switch(*_: Any) -> None:
        both.wait()
        with model.without_growth():
            pass

    model.host.get_submodule("1").register_forward_hook(switch)
    with ThreadPoolExecutor(2) as pool:
        for one in [pool.submit(compute, model, inputs) for _ in range(2)]:
            one.result(60)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("part", ["model", "host"])
def test_a_pass_ends_by_an_error_too(part: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "PATIENCE", 5.0)
    model, inputs = make_chain()
    network = model if part == "model" else model.host

    def fail(*_: Any) -> None:
        raise error

    handle = model.host.get_submodule("1").register_forward_hook(fail)
    with pytest.raises(error):
        compute(network, inputs)
    handle.remove()
    if part == "host" and error is KeyboardInterrupt:  # of which torch tells no hook: the next pass of the thread ends
        compute(network, inputs)

    def switch() -> Tensor:
        with model.without_growth():
            return compute(model, inputs)

    with ThreadPoolExecutor(1) as pool:
        start = time.monotonic()
        pool.submit(switch).result(60)
        assert time.monotonic() - start < passes.PATIENCE


def test_a_pass_that_does_not_end_is_an_error_and_no_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "PATIENCE", SHORT)
    model, inputs = make_chain()
    grown = compute(model, inputs)
    pause = Pause(model.host.get_submodule("1"))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(compute, model, inputs)
        assert pause.reached.wait(60)
        with pytest.raises(SlotError, match="another thread has not ended"), model.without_growth():
            pass
        assert not model.hidden
        pause.go_on.set()
        assert same(first.result(60), grown)
    with model.without_growth():
        assert not same(compute(model, inputs), grown)


@pytest.mark.parametrize("isolation", Isolation)
def test_copies_have_no_passes_under_way(isolation: Isolation) -> None:
    model, inputs = make_chain()
    list_seeds(model)[0].isolation = isolation
    made = list[GrowingModel]()
    handle = model.host.get_submodule("1").register_forward_hook(lambda *_: made.append(copy.deepcopy(model)))
    compute(model, inputs)
    handle.remove()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(made[0].slots.values()[-1].prune).result(60)


@pytest.mark.landing
@pytest.mark.parametrize("whole", [False, True])
def test_compiled_passes_leave_none_under_way(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of hosts with a break between graphs, too."""
    monkeypatch.setattr(passes, "PATIENCE", SHORT)
    torch.compiler.reset()
    model, inputs = make_chain()
    with model.without_growth():
        bare = compute(model, inputs)
    if not whole:
        model.host.get_submodule("1").register_forward_hook(lambda *_: torch._dynamo.graph_break())
    compiled = torch.compile(model, backend="eager")
    grown = compute(model, inputs)
    for _ in range(3):
        assert torch.allclose(compute(compiled, inputs), grown, atol=1e-5)

    def switch() -> Tensor:
        with model.without_growth():
            return compute(model, inputs)

    with ThreadPoolExecutor(1) as pool:
        assert torch.allclose(pool.submit(switch).result(60), bare, atol=1e-5)
