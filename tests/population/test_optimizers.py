"""Row-wise optimizers equal their torch.optim namesakes on every row, whenever the row began to learn."""

import pytest
import torch
from torch import Tensor, nn

from esper.population.learning import clip_by_network, optimizer_step
from esper.population.parameters import FlatParameters, ParameterLayout, StackedParameters
from esper.population.population import MOMENT_NAMES
from esper.tasks.suite import OptimizerSettings
from reference_population import make_optimizer

MODULE = nn.Linear(3, 2)
SHAPE = ParameterLayout.from_module(MODULE)
RATES = torch.tensor([0.1, 0.03, 0.2, 0.01, 0.05], dtype=torch.float64)
STARTS = (0, 0, 2, 5, 11)
STEPS = 12

OPTIMIZERS = {
    "adamw": OptimizerSettings(name="adamw", betas=(0.9, 0.98)),
    "adamw-decay": OptimizerSettings(name="adamw", betas=(0.8, 0.95), weight_decay=0.1),
    "sgd": OptimizerSettings(name="sgd", momentum=0.0),
    "sgd-momentum": OptimizerSettings(name="sgd", momentum=0.9),
    "sgd-momentum-decay": OptimizerSettings(name="sgd", momentum=0.9, weight_decay=0.1),
}


def block(
    settings: OptimizerSettings, values: Tensor, rates: Tensor, owners: Tensor | None = None
) -> StackedParameters:
    empty = StackedParameters.empty(MODULE, MOMENT_NAMES[settings.name], torch.float64, torch.device("cpu"))
    return empty.make_rows(values, {}, rates, torch.arange(len(values)) if owners is None else owners)


def alone(values: Tensor, rate: float, settings: OptimizerSettings) -> tuple[Tensor, torch.optim.Optimizer]:
    parameter = values.clone().requires_grad_()
    return parameter, make_optimizer([parameter], rate, settings)


@pytest.mark.parametrize("settings", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_every_row_equals_torch_optim(settings: OptimizerSettings) -> None:
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(len(RATES), SHAPE.size, generator=generator, dtype=torch.float64)
    pool = FlatParameters.from_blocks([block(settings, first, RATES)])
    expected = [alone(values, float(rate), settings) for values, rate in zip(first, RATES, strict=True)]
    for step in range(STEPS):
        started = torch.tensor([step >= start for start in STARTS])
        gradient = torch.randn(first.shape, generator=generator, dtype=torch.float64) * started.unsqueeze(1)
        optimizer_step(pool, gradient.flatten(), started, settings)
        for row, (parameter, optimizer) in enumerate(expected):
            if started[row]:
                parameter.grad = gradient[row].clone()
                optimizer.step()
        wanted = torch.stack([parameter.detach() for parameter, _ in expected])
        torch.testing.assert_close(pool.blocks[0].values.detach(), wanted, rtol=1e-12, atol=1e-12)
    assert pool.blocks[0].steps.tolist() == [STEPS - start for start in STARTS]


@pytest.mark.parametrize("settings", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_rows_that_have_not_started_stay_as_they_are(settings: OptimizerSettings) -> None:
    first = torch.randn(2, SHAPE.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    pool = FlatParameters.from_blocks([block(settings, first, RATES[:2])])
    optimizer_step(pool, torch.zeros_like(first).flatten(), torch.tensor([False, False]), settings)
    rows = pool.blocks[0]
    assert torch.equal(rows.values.detach(), first)
    assert rows.steps.tolist() == [0, 0]
    assert all(not moment.any() for moment in rows.moments.values())


def test_clipping_is_by_network_over_all_its_rows() -> None:
    settings = OPTIMIZERS["sgd"]
    generator = torch.Generator().manual_seed(0)
    owners = [torch.tensor([0, 1, 2]), torch.tensor([2, 0])]  # network 1 owns one row, the others two
    scales = [torch.tensor([5.0, 0.01, 1.0]), torch.tensor([3.0, 0.1])]
    gradients = [
        torch.randn(len(scale), SHAPE.size, generator=generator, dtype=torch.float64) * scale[:, None]
        for scale in scales
    ]
    blocks = [
        block(settings, torch.zeros_like(gradient), RATES[: len(own)], own)
        for gradient, own in zip(gradients, owners, strict=True)
    ]
    joined = torch.cat([gradient.flatten() for gradient in gradients])
    flat_gradient = clip_by_network(FlatParameters.from_blocks(blocks), joined, clip_norm=1.0)
    parts = flat_gradient.split([gradient.numel() for gradient in gradients])
    clipped = [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]
    for network in range(3):
        places = [(i, int(row)) for i, own in enumerate(owners) for row in (own == network).nonzero().flatten()]
        parameters = [nn.Parameter(torch.zeros(SHAPE.size, dtype=torch.float64)) for _ in places]
        for parameter, (which, row) in zip(parameters, places, strict=True):
            parameter.grad = gradients[which][row].clone()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for parameter, (which, row) in zip(parameters, places, strict=True):
            torch.testing.assert_close(clipped[which][row], parameter.grad, rtol=1e-12, atol=1e-12)
    assert torch.equal(clipped[0][1], gradients[0][1]), "what is within the norm is not scaled"
