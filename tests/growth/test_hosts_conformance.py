"""What holds for every network that grows: it stays itself, learns, and survives what people do to networks."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from esper.errors import SlotError
from esper.growth.hooks import find_features
from esper.growth.model import GrowingModel
from factories import Host, every_causal_host, every_host, loss, outputs, plant

Copy = Callable[[GrowingModel], GrowingModel]


def by_pickle(model: GrowingModel) -> GrowingModel:
    return pickle.loads(pickle.dumps(model))


def by_state_dict(model: GrowingModel, host: Host) -> GrowingModel:
    """A network that grew the same way and was given the numbers."""
    other = host.grown_by_hand()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(model.state_dict())
    return other


def train(model: GrowingModel, optimizer: torch.optim.Optimizer, host: Host, steps: int = 3) -> list[float]:
    losses: list[float] = []
    for _ in range(steps):
        optimizer.zero_grad()
        returned = loss(model, host.arguments())
        returned.backward()
        optimizer.step()
        losses.append(returned.item())
    return losses


def gradients(model: nn.Module) -> list[Tensor]:
    return [torch.zeros(()) if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]


@every_host
def test_places_stand_for_their_slots_and_the_host_is_left_as_it_is(host: Host) -> None:
    plain, model = host.network(), host.attached()
    assert tuple(model.slots) == host.slots
    assert all(slot.site.causal is host.causal for slot in model.slots.values())
    assert model.outputs == 5
    assert model.host.state_dict().keys() == plain.state_dict().keys()


@every_host
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("gradient", [True, False], ids=["grad", "no_grad"])
def test_dormant_slots_change_no_bit(host: Host, training: bool, gradient: bool) -> None:
    plain, model = host.network().train(training), host.attached().train(training)
    with torch.set_grad_enabled(gradient):
        returned, expected = outputs(model, host.arguments()), outputs(plain, host.arguments())
    if host.fused and not training and not gradient:
        torch.testing.assert_close(returned, expected)
    else:
        assert torch.equal(returned, expected)
    for one, other in zip(plain.buffers(), model.host.buffers(), strict=True):
        assert torch.equal(one, other)


@every_host
def test_a_seed_s_life_by_hand(host: Host) -> None:
    model = host.attached()
    model.eval()
    before = outputs(model, host.arguments())
    optimizer = torch.optim.SGD(model.parameter_groups(lr=0.05))
    model.link(optimizer)
    slot = model.slots[host.slots[0]]
    slot.germinate(host.blueprint, torch.Generator().manual_seed(2))
    torch.testing.assert_close(outputs(model, host.arguments()), before)
    slot.set_alpha(1.0)
    torch.testing.assert_close(outputs(model, host.arguments()), before)
    model.train()
    losses = train(model, optimizer, host, steps=5)
    assert losses[-1] < losses[0]
    assert any(parameter.any() for parameter in slot.seed.parameters() if parameter.grad is not None)
    assert not torch.allclose(ablated(model, host), outputs(model.eval(), host.arguments()))
    slot.prune()
    assert sum(map(len, (group["params"] for group in optimizer.param_groups))) == len(list(model.parameters()))
    plant(model, host.slots[0], host.blueprint)
    slot.fossilize()
    assert slot.seed.fossilized
    with pytest.raises(SlotError, match="permanent part"):
        slot.prune()


def ablated(model: GrowingModel, host: Host) -> Tensor:
    """Outputs in eval mode of a copy whose first slot's seed was taken out."""
    other = copy.deepcopy(model).eval()
    other.slots[host.slots[0]].remove()
    return outputs(other, host.arguments())


@every_host
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "state_dict"])
def test_copies_are_equal_and_apart(host: Host, way: str) -> None:
    model = host.grown_by_hand()
    train(model, torch.optim.SGD(model.parameters(), lr=0.01), host, steps=1)
    copies: dict[str, Copy] = {
        "deepcopy": copy.deepcopy,
        "pickle": by_pickle,
        "state_dict": lambda one: by_state_dict(one, host),
    }
    other = copies[way](model)
    model.eval()
    other.eval()
    expected = outputs(model, host.arguments())
    assert torch.equal(outputs(other, host.arguments()), expected)
    other.slots[host.slots[0]].prune()
    assert not torch.allclose(outputs(other, host.arguments()), expected)
    assert torch.equal(outputs(model, host.arguments()), expected)


@every_host
def test_autocast_keeps_the_types_that_the_host_makes(host: Host) -> None:
    plain, model = host.network(), host.grown_by_hand()
    seen: list[torch.dtype] = []
    for network in (plain, model.host):
        for name in host.slots:
            network.get_submodule(name).register_forward_hook(
                lambda *called: seen.append(find_features(called[2]).dtype)
            )
    with torch.autocast("cpu", torch.bfloat16):
        try:
            outputs(plain, host.arguments())
        except RuntimeError as error:
            if "primitive" not in str(error):
                raise
            pytest.skip(f"oneDNN has no bfloat16 for {host.name} on this processor")
        returned = loss(model, host.arguments())
    returned.backward()
    assert seen[len(host.slots) :] == seen[: len(host.slots)]
    assert all(torch.isfinite(gradient).all() for gradient in gradients(model))
    exact = loss(host.grown_by_hand(), host.arguments())
    torch.testing.assert_close(returned, exact, rtol=0.1, atol=0.1)


@every_host
def test_gradient_checkpoints_change_no_gradient(host: Host) -> None:
    plain, model = host.grown_by_hand(), host.grown_by_hand()
    loss(plain, host.arguments()).backward()

    class Checkpointed(nn.Module):
        def forward(self, *arguments, **keywords):
            return checkpoint(model, *arguments, use_reentrant=False, **keywords)

    loss(Checkpointed(), host.arguments()).backward()
    for one, other in zip(gradients(plain), gradients(model), strict=True):
        torch.testing.assert_close(one, other)


@every_host
def test_modes_reach_the_seeds_and_seeds_do_alike_in_both(host: Host) -> None:
    model = host.grown_by_hand()
    model.eval()
    assert not any(seed.training for seed in model.seeds.values())
    with torch.no_grad():
        evaluated = outputs(model, host.arguments())
    model.slots.train()
    with torch.no_grad():
        assert torch.equal(outputs(model, host.arguments()), evaluated)
    # With gradients torch's encoder takes its plain path, without them the fused one.
    torch.testing.assert_close(outputs(model.eval(), host.arguments()), evaluated, rtol=1e-4, atol=1e-5)


@every_causal_host
def test_language_models_leak_no_later_token(host: Host) -> None:
    tried = 0
    for name in host.slots:
        for blueprint in host.attached().slots[name].blueprints:
            model = host.attached().eval()
            plant(model, name, blueprint, alpha=1.0)
            before, after = changes_by_later_tokens(model, host)
            torch.testing.assert_close(before, torch.zeros_like(before))
            assert after.abs().max() > 1e-3
            tried += 1
    assert tried >= 2 * len(host.slots), "the test means to try several blueprints in every slot"


def changes_by_later_tokens(model: GrowingModel, host: Host) -> tuple[Tensor, Tensor]:
    """What changing tokens 5 and later does to the outputs at the tokens before them, and at them."""
    arguments = host.arguments()
    text = arguments["input_ids"] if isinstance(arguments, dict) else arguments
    changed = text.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 5
    other = {**arguments, "input_ids": changed} if isinstance(arguments, dict) else changed
    with torch.no_grad():
        first, second = (outputs(model, each).view(*text.shape, -1) for each in (arguments, other))
    return (second - first)[:, :5], (second - first)[:, 5:]
