"""A narrow host padded with zeros to the template's shapes is the same host, and stays so while it learns."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from esper.tasks.instance import Instance
from esper.tasks.layers import Conv1d
from esper.tasks.suite import Suite

STEPS = 20


def pad_into(template: nn.Module, narrow: nn.Module) -> dict[str, torch.Tensor]:
    """Fill the template with the narrow host and zeros; where the narrow host lives, as masks by parameter name."""
    live: dict[str, torch.Tensor] = {}
    sources = {**dict(narrow.named_parameters()), **dict(narrow.named_buffers())}
    for name, target in [*template.named_parameters(), *template.named_buffers()]:
        live[name] = torch.zeros_like(target, dtype=torch.bool)
        live[name][tuple(slice(0, size) for size in sources[name].shape)] = True
        target.data.zero_()
        target.data[live[name]] = sources[name].detach().flatten()
    return live


@pytest.mark.few(4)
def test_padded_hosts_learn_like_narrow_ones(suite: Suite, instances: list[Instance]) -> None:
    # One instance of each shape of host.
    shapes = {
        (instance.linear, *(parameter.shape for parameter in suite.host(instance).parameters())): instance
        for instance in instances
    }
    for instance in shapes.values():
        narrow, padded = suite.host(instance).double(), suite.template().double()
        live = pad_into(padded, narrow)
        data = suite.data(instance, "train")
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9) for module in (narrow, padded)]
        # Where every position has a label a few examples are as many labels.
        size, steps = (4, STEPS // 4) if suite.label_shape else (32, STEPS)
        for step in range(steps):
            rows = torch.arange(step * size, (step + 1) * size) % len(data)
            for host, optimizer in zip((narrow, padded), optimizers, strict=True):
                optimizer.zero_grad()
                logits = host(data.inputs[rows].double())
                F.cross_entropy(logits.flatten(0, -2), data.labels[rows].flatten()).backward()
                optimizer.step()
            for key, parameter in padded.named_parameters():
                assert parameter.grad is not None
                assert not parameter.grad[~live[key]].any(), f"padding of {key} has a gradient"
        inputs = suite.data(instance, "validation").inputs.double()
        torch.testing.assert_close(padded(inputs), narrow(inputs), atol=1e-10, rtol=1e-10)
        assert suite.parameters(instance) == sum(int(live[key].sum()) for key, _ in padded.named_parameters())


def test_no_host_is_wider_than_the_template(suite: Suite, instances: list[Instance]) -> None:
    limits = {key: parameter.shape for key, parameter in suite.template().named_parameters()}
    for instance in instances:
        for key, parameter in suite.host(instance).named_parameters():
            assert all(size <= limit for size, limit in zip(parameter.shape, limits[key], strict=True))


# Layers that compute stacks compute what torch's own do.


@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_a_convolution_equals_torchs_alone_and_in_a_stack(kernel: int, stride: int) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = Conv1d(3, 4, kernel, stride, generator).double()
    layer.bias.data.uniform_(generator=generator)
    signals = torch.randn(2, 5, 3, 10, generator=generator, dtype=torch.float64)
    expected = F.conv1d(signals.flatten(0, 1), layer.weight, layer.bias, stride, kernel // 2).unflatten(0, (2, 5))
    torch.testing.assert_close(layer(signals[0]), expected[0])
    weights = {name: torch.stack([own, -own]) for name, own in layer.named_parameters()}
    stacked = torch.func.functional_call(layer, weights, (signals,))
    torch.testing.assert_close(stacked, torch.stack([expected[0], -expected[1]]))
