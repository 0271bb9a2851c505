"""Suites of one's own whose hosts drop out or normalise: episodes do not depend on how many run side by side."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from esper.rl.episodes import Episodes
from esper.tasks.instance import Instance
from rl.short import QUICK, ShortSuite, instances, play

TOKENS, CHANNELS = ShortSuite.input_shape
ENTRIES = TOKENS * CHANNELS


def on_all_entries(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), layer, nn.Unflatten(1, (TOKENS, CHANNELS)))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "batch normalisation": lambda: on_all_entries(nn.BatchNorm1d(ENTRIES)),
    "dropout": lambda: nn.Dropout(0.2),
    "alpha dropout": lambda: nn.AlphaDropout(0.2),
    "randomised slopes": nn.RReLU,
    "spectral norm": lambda: spectral_norm(nn.Linear(CHANNELS, CHANNELS)),
    "groups of two channels": lambda: on_all_entries(nn.GroupNorm(ENTRIES // 2, ENTRIES)),
}


class Prepared(nn.Module):
    """A host of the token suite behind another layer."""

    def __init__(self, layer: nn.Module, host: nn.Module) -> None:
        super().__init__()
        self.layer, self.host = layer, host

    def forward(self, inputs: Tensor) -> Tensor:
        return self.host(self.layer(inputs))


class PreparedSuite(ShortSuite):
    sites = tuple(f"host.{site}" for site in ShortSuite.sites)

    def __init__(self, layer: str) -> None:
        super().__init__()
        self.layer = LAYERS[layer]

    def template(self) -> nn.Module:
        return Prepared(self._make_layer(0), super().template())

    def host(self, instance: Instance) -> nn.Module:
        return Prepared(self._make_layer(instance.seed), super().host(instance))

    def _make_layer(self, seed: int) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return self.layer()


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.few(3)
def test_an_episode_is_the_same_alone_and_among_others(name: str) -> None:
    suite, chosen = PreparedSuite(name), instances(3)
    state = torch.get_rng_state()
    assert all(suite.flops(one) > 0 for one in chosen)
    together = Episodes(suite, chosen, QUICK, strategy="looped")
    results = play(together, steps=5)
    assert torch.equal(torch.get_rng_state(), state), "something drew from the global generator"
    for row, one in enumerate(chosen):
        alone = Episodes(suite, [one], QUICK, strategy="looped")
        own = play(alone, steps=5)
        np.testing.assert_array_equal([step.reward[row] for step in results], [step.reward[0] for step in own])
        assert alone.potential[0] == together.potential[row]


def test_normalisation_over_the_batch_adds_no_flops() -> None:
    one = instances(1)[0]
    assert PreparedSuite("batch normalisation").flops(one) == ShortSuite().flops(one)
