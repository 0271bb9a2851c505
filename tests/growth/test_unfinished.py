"""What `finalize` does with seeds that are neither fossilized nor pruned, in all ways in which they may live."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

from esper.errors import ConfigError, SlotError
from esper.growth.attach import attach
from esper.growth.model import GrowingModel
from esper.lifecycle.actions import Blend
from factories import draw_normal, plant

SITES: dict[str, tuple[nn.Module, Tensor]] = {
    "features": (nn.Linear(4, 4), draw_normal(3, 4)),
    "tokens": (nn.Linear(4, 4), draw_normal(3, 5, 4)),
    "sequence": (nn.Conv1d(4, 4, 3, padding=1), draw_normal(3, 4, 6)),
    "image": (nn.Conv2d(4, 4, 3, padding=1), draw_normal(3, 4, 6, 6)),
}


def planted(layout: str, blend: Blend, alpha: float) -> tuple[GrowingModel, Tensor]:
    """A model with one live seed that changes the output, and inputs; blueprints take turns."""
    host, inputs = SITES[layout]
    model = attach(nn.Sequential(copy.deepcopy(host)), ["0"], inputs)
    offered = model.slots["0"].blueprints
    plant(model, "0", offered[(3 * blend + 2 * (alpha == 1)) % len(offered)], blend, alpha)
    return model.eval(), inputs


@pytest.mark.parametrize("alpha", [1 / 3, 1.0])
@pytest.mark.parametrize("blend", Blend)
@pytest.mark.parametrize("layout", SITES)
def test_live_seeds_are_folded_in_as_they_are(layout: str, blend: Blend, alpha: float):
    model, inputs = planted(layout, blend, alpha)
    expected = model(inputs)
    with pytest.warns(UserWarning, match=rf"kept \w+ in '0' \(alpha {alpha:.2f}, contribution not measured\)"):
        plain = model.finalize()
    torch.testing.assert_close(plain(inputs), expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(model.finalize(unfinished="drop")(inputs), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("alpha", "contribution", "kept"),
    [(0.5, None, True), (0.5, float("nan"), True), (0.5, 0.0, True), (0.5, -0.001, False), (0.0, 0.2, False)],
)
def test_seeds_stay_that_count_and_do_no_harm(alpha: float, contribution: float | None, kept: bool):
    model, inputs = planted("features", Blend.ADD, alpha)
    seed = model.seeds["0"]
    seed.contribution = contribution
    with pytest.warns(UserWarning, match=f"{'kept' if kept else 'dropped'} {seed.blueprint.name} in '0'") as warned:
        plain = model.finalize()
    assert len(warned) == 1
    assert warned[0].filename == __file__, "the warning points to who called finalize"
    assert torch.equal(plain(inputs), model.finalize(unfinished="drop")(inputs)) != kept


def test_a_model_with_unfinished_seeds_may_be_refused():
    model, inputs = planted("features", Blend.GATE, 0.5)
    with pytest.raises(SlotError, match=r"unfinished seeds: \w+ in '0' \(alpha 0.50.*finish\(\)"):
        model.finalize(unfinished="raise")
    with pytest.raises(ConfigError, match="unfinished is 'kept': give 'keep', 'drop' or 'raise'"):
        model.finalize(unfinished="kept")
    model.slots["0"].fossilize()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for plain in (model.finalize(), model.finalize(unfinished="drop"), model.finalize(unfinished="raise")):
            torch.testing.assert_close(plain(inputs), model(inputs), atol=1e-6, rtol=1e-6)
