"""Does promise foretell what planting brings? On the token suite, where every candidate can be tried.

    python benchmarks/promise.py [--instances 112] [--seed 1] [--split heldout|transfer]
    python benchmarks/promise.py --stages 1 3 8 14 20 --instances 56      # by the decision at which it is planted

Every candidate (a blueprint in a slot) is put into every instance's network from the first step on, and what the
network then has on test data is its *score*. Beside that, bare networks are looked at before their fourth decision, and
for each the candidate that promises most is picked: no controller, nothing learned from other instances. With
``--stages`` every candidate is planted after so many decisions instead, kept as the gates allow, and compared with what
was promised just then. It computes in one thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Literal

import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr

from esper.control.rules import Planting, Schedule
from esper.lifecycle.actions import Blend, make_wait_actions
from esper.lifecycle.rules import Rules
from esper.numerics.devices import CPU
from esper.population.evaluation import evaluate_committed
from esper.population.learning import Batch, stack_data
from esper.population.parameters import SeedKind
from esper.population.population import Fossils
from esper.population.promise import PromiseMeter
from esper.rl.episodes import Episodes
from esper.tasks.instance import Data, Instance
from esper.tasks.registry import get_suite
from esper.train.evaluation import CohortPart, CohortTask, EvaluationConfig, evaluate_cohort
from esper.train.workers import prepare_process

SUITE = get_suite("tokens")
AT_ONCE = 64
"""Networks side by side; changes no result."""
LOOKED_BEFORE = 3
"""Decisions that come before the look."""
EXAMPLES = (64, 256)
TABLE_WIDTH = 150
PLACES = list(product(range(len(SUITE.sites)), range(len(SUITE.blueprints))))
Floats = NDArray[np.float64]


def sample(count: int, seed: int, split: Literal["heldout", "transfer"]) -> list[Instance]:
    """Instances of all families and variants in turn."""
    families = SUITE.families if split == "heldout" else SUITE.transfer_families
    rng = np.random.default_rng(seed)
    drawn: list[Instance] = []
    for number in range(count):
        family, lap = families[number % len(families)], number // len(families)
        variants = SUITE.variants(family)
        drawn.append(SUITE.draw(family, variants[lap % len(variants)], 10_000 * seed + number, rng))
    return drawn


def parts(instances: Sequence[Instance]) -> Iterator[list[Instance]]:
    """As many as are computed at once."""
    return (list(instances[start : start + AT_ONCE]) for start in range(0, len(instances), AT_ONCE))


def score_with(instances: Sequence[Instance], fossils: Fossils) -> Floats:
    """Test accuracy ``[E]`` at the end of networks that had these seeds from the start."""
    found: list[Floats] = []
    for some in parts(instances):
        episodes = Episodes(SUITE, some, Rules(), fossils=[fossils] * len(some))
        for _ in range(SUITE.steps):
            episodes.step(make_wait_actions(episodes.size))
        phases = [int(one.drift_step is not None) for one in some]
        test = [SUITE.data(one, "test", phase) for one, phase in zip(some, phases, strict=True)]
        found.append(evaluate_committed(episodes.population, stack_data(test, torch.device(CPU))).accuracy)
    return np.concatenate(found)


def score_planted(instances: Sequence[Instance], stage: int, place: tuple[int, int]) -> Floats:
    """Test score ``[E]`` at the end of networks in which this was planted after so many decisions."""
    controller = Schedule([Planting(stage, *place)], SUITE.steps)
    found: list[Floats] = []
    for some in parts(instances):
        played = evaluate_cohort(CohortTask(EvaluationConfig(SUITE.name, Rules()), [CohortPart(controller, some)]))
        found.append(np.array([record.test_accuracy for record in played[0].records]))
    return np.concatenate(found)


def promised(instances: Sequence[Instance], stage: int = LOOKED_BEFORE) -> dict[str, Floats]:
    """What is promised to bare networks ``[E, S, K]`` after so many decisions, by the way of measuring."""
    found: dict[str, list[Floats]] = {}
    for some in parts(instances):
        episodes = Episodes(SUITE, some, Rules())
        for _ in range(stage):
            episodes.step(make_wait_actions(episodes.size))
        data = stack_data([_first(one, max(EXAMPLES)) for one in some], torch.device(CPU))
        everywhere = np.ones((len(some), len(SUITE.sites)), np.bool_)
        for count in EXAMPLES:
            batch = Batch(data.inputs[:, :count], data.labels[:, :count])
            measured = PromiseMeter(episodes.population).measure(batch, everywhere)
            found.setdefault(f"promise, {count} examples", []).append(measured.fitted)
            found.setdefault(f"held-out promise, {count} examples", []).append(measured.held_out)
    return {name: np.concatenate(values) for name, values in found.items()}


def _first(instance: Instance, count: int) -> Data:
    """Training examples; again from the first where there are fewer."""
    data = SUITE.data(instance, "train")
    index = torch.arange(count) % len(data)
    return Data(data.inputs[index], data.labels[index])


def compare(scores: Floats, bare: Floats, promises: Mapping[str, Floats]) -> Table:
    """What every way of picking comes to: ``scores [E, S, K]`` of all candidates, ``bare [E]`` without any."""
    flat, rows = scores.reshape(len(scores), -1), np.arange(len(scores))
    table = Table("picked by", "score", "rank correlation with the gain")
    table.add_row("nothing grown", f"{bare.mean():.3f}", "")
    table.add_row("a random candidate", f"{flat.mean():.3f}", "")
    table.add_row("the best one for all, in hindsight", f"{flat.mean(0).max():.3f}", "")
    for name, values in promises.items():
        each = values.reshape(len(values), -1)
        ranks = [spearmanr(own, other, nan_policy="omit").statistic for own, other in zip(flat, each, strict=True)]
        picked = flat[rows, np.nan_to_num(each, nan=-np.inf).argmax(1)]
        table.add_row(name, f"{picked.mean():.3f} ± {_error(picked - bare):.3f}", f"{np.nanmean(ranks):.2f}")
    table.add_row("the best one for each, in hindsight", f"{flat.max(1).mean():.3f}", "")
    return table


def compare_stages(instances: Sequence[Instance], bare: Floats, stages: Sequence[int]) -> Table:
    """Rank correlation of promise (256 examples) with the gain of planting: over candidates, and by blueprint."""
    table = Table("planted after", "over candidates", "best by promise", "random", *SUITE.blueprints)
    slots, kinds = len(SUITE.sites), len(SUITE.blueprints)
    for stage in stages:
        scores = np.stack([score_planted(instances, stage, place) for place in PLACES], 1)
        gains = (scores - bare[:, None]).reshape(len(instances), slots, kinds)
        told = promised(instances, stage)[f"promise, {max(EXAMPLES)} examples"]
        flat, each = gains.reshape(len(gains), -1), np.nan_to_num(told.reshape(len(told), -1))
        ranks = [_rank(one, other) for one, other in zip(each, flat, strict=True)]
        by_kind = [_rank(told[:, :, kind].ravel(), gains[:, :, kind].ravel()) for kind in range(kinds)]
        picked = flat[np.arange(len(flat)), each.argmax(1)].mean()
        own = [f"{np.nanmean(ranks):.2f} ± {_error(np.array(ranks)):.2f}", f"{picked:+.3f}", f"{flat.mean():+.3f}"]
        table.add_row(str(stage), *own, *(f"{rank:.2f}" for rank in by_kind))
    return table


def _rank(promises: Floats, gains: Floats) -> float:
    return float(spearmanr(promises, gains).statistic)


def _error(values: Floats) -> float:
    """Standard error of the mean."""
    return float(values.std(ddof=1) / np.sqrt(len(values)))


def main(
    instances: int = 112,
    seed: int = 1,
    split: Literal["heldout", "transfer"] = "heldout",
    stages: tuple[int, ...] = (),
) -> None:
    """Print the table; the error is that of the gain over nothing grown, or of the mean correlation."""
    prepare_process()
    drawn = sample(instances, seed, split)
    if stages:
        Console(width=TABLE_WIDTH).print(compare_stages(drawn, score_with(drawn, ()), stages))
        return
    scores = np.stack([score_with(drawn, (SeedKind(*place, Blend.ADD),)) for place in PLACES], 1)
    shaped = scores.reshape(len(drawn), len(SUITE.sites), len(SUITE.blueprints))
    Console().print(compare(shaped, score_with(drawn, ()), promised(drawn)))


if __name__ == "__main__":
    tyro.cli(main)
