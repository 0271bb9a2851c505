"""The plan of a ladder: when blocks are copied, how long each rung trains and decays, and the cost."""

import copy
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field
from torch import distributed, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from esper.config.arguments import Flops, NonNegativeFloat, PositiveInt, check_arguments
from esper.engine.budget import TRAINING_PASSES
from esper.errors import ConfigError, plural
from esper.growth.finalize import SAVING_METHODS, is_built_alike
from esper.growth.inputs import Arguments, call_host, first_tensor, fit_example
from esper.growth.model import GrowingModel
from esper.growth.summary import align_columns
from esper.ladders.towers import Towers, count_blocks, deepen_in_place, find_towers, grow_towers, plan_copies
from esper.numerics.flops import count_flops
from esper.numerics.modules import copy_with

SHARE, DECAY = 0.2, 0.2
"""Fractions of ``steps``: for training at each depth after the first, and for each decay."""
DEEPEST = 10_000
"""Largest number of blocks for targets in parameters or FLOPs."""
COMPILED = "_orig_mod"
"""Name of the original model inside a model compiled by `torch.compile`."""
Measure = Literal["depths", "parameters", "flops"]
Sizes = Annotated[Sequence[PositiveInt], Field(min_length=1)]
ADVICE = {
    "depths": "give numbers of blocks that increase, such as [1, 2, 4]",
    "parameters": "give numbers of parameters that increase, such as [100_000, 200_000]",
    "flops": "give FLOPs of a forward pass of one example that increase, such as [1e6, 2e6]",
    "blocks": "give a list of names of an nn.ModuleList or nn.Sequential, such as ['transformer.h']",
    "rates": "give a factor per size, such as [1, 1, 0.5]",
}


@check_arguments(ConfigError)
def warmup_stable_decay(
    share: NonNegativeFloat, *, warmup: NonNegativeFloat = 0.02, decay: NonNegativeFloat = 0.2
) -> float:
    """A learning-rate factor by ``share`` of the budget spent: it rises to 1, stays constant, then falls to 0.

    ```python
    grower = esper.Grower(model, optimizer, evaluate=validate, training_flops=1e15)
    scheduler = LambdaLR(optimizer, lambda _: warmup_stable_decay(grower.spending.share))
    ```

    Call ``scheduler.step()`` after ``optimizer.step()``; the first rate is 0, since nothing is spent yet. Policies
    observe the learning rate. With several processes, the share and the rate change only at decisions.

    During decay the factor is ``1 - sqrt(x)``, where x is the elapsed fraction of the decay (Hägele et al. 2024, arXiv
    2405.18392).

    Args:
        share: Share of the budget spent. Beyond 1 the factor is constant.
        warmup: Share of the budget during which the factor rises linearly.
        decay: Share of the budget at its end during which the factor falls.

    Raises:
        ConfigError: an argument is negative or not a number, or the phases overlap.
    """
    if warmup + decay > 1:
        raise ConfigError(f"warmup {warmup} and decay {decay} add up to more than 1")
    if share >= 1:
        return float(decay == 0)
    if share < warmup:
        return share / warmup
    decayed = share - (1 - decay)
    return 1.0 if decayed <= 0 else 1 - math.sqrt(min(decayed / decay, 1.0))


@dataclass(frozen=True)
class PlannedRung:
    """One size of a ladder, before it is trained."""

    depth: int
    """Number of blocks."""
    copies: Mapping[str, tuple[int, ...]]
    """Copies after each block of the previous rung, by list of blocks; none for the first rung."""
    parameters: int
    """Number of parameters."""
    forward_flops: float
    """FLOPs of a forward pass, per example."""
    steps: int
    """Number of steps at this depth before the rung branches off."""
    decay_steps: int
    """Number of steps of the branch, with learning rates that fall to zero."""
    rate: float
    """Factor of the learning rates."""
    flops: float
    """FLOPs of all training up to the end of this rung."""
    flops_alone: float
    """FLOPs of a separate training of this size alone."""


class LadderPhase(NamedTuple):
    """The phase of a ladder to which a step belongs."""

    rung: int
    """Index of the rung."""
    decays: bool
    """Whether it is the rung's branch, in which learning rates decay."""
    step: int
    """Index of the step in the phase."""
    steps: int
    """Number of steps in the phase."""


@dataclass(frozen=True, repr=False)
class LadderPlan:
    """What `esper.ladder` will do. Prints as a report."""

    towers: Towers
    """The lists of blocks that grow, in the given model."""
    rungs: tuple[PlannedRung, ...]
    """The sizes, smallest first."""
    steps: int
    """Number of steps for training one size alone, as for the first rung."""
    uncounted: str
    """Operations whose FLOPs torch cannot count."""
    pretrained: bool
    """Whether rungs are saved by ``save_pretrained``."""

    @property
    def total_steps(self) -> int:
        """Steps of the whole ladder."""
        return sum(rung.steps + rung.decay_steps for rung in self.rungs)

    @property
    def flops(self) -> float:
        """FLOPs of the whole ladder."""
        return self.rungs[-1].flops

    @property
    def flops_alone(self) -> float:
        """FLOPs of training all sizes separately."""
        return sum(rung.flops_alone for rung in self.rungs)

    def find_phase(self, step: int) -> LadderPhase:
        """The phase of a step, counted from 0; beyond the end, that of the last step."""
        begin = 0
        for index, rung in enumerate(self.rungs):
            for decays, steps in ((False, rung.steps), (True, rung.decay_steps)):
                if step < begin + steps:
                    return LadderPhase(index, decays, step - begin, steps)
                begin += steps
        last = self.rungs[-1].decay_steps
        return LadderPhase(len(self.rungs) - 1, True, last, last)

    def find_branch_step(self, rung: int) -> int:
        """The first step of a rung's branch."""
        return sum(each.steps + each.decay_steps for each in self.rungs[:rung]) + self.rungs[rung].steps

    def compute_rate(self, step: int) -> float:
        """The factor of the learning rates, which rises once, is constant, and falls to zero on each rung's branch."""
        phase = self.find_phase(step)
        if phase.decays:
            factor = warmup_stable_decay(phase.step / max(phase.steps, 1), warmup=0, decay=1)
        else:
            factor = warmup_stable_decay(phase.step / self.steps, decay=0) if phase.rung == 0 else 1.0
        return self.rungs[phase.rung].rate * factor

    def compute_flops(self, step: int) -> float:
        """FLOPs of all training before a step."""
        phase = self.find_phase(step)
        rung = self.rungs[phase.rung]
        done = phase.step + (rung.steps if phase.decays else 0)
        return rung.flops - (rung.steps + rung.decay_steps - done) * rung.flops_alone / self.steps

    def describe(self) -> dict[str, Any]:
        """The plan as JSON values."""
        return json.loads(json.dumps(asdict(self)))

    def __repr__(self) -> str:
        first, last = self.rungs[0], self.rungs[-1]
        titles = ("blocks", "copied", "parameters", "FLOPs forward", "steps", "decay", "FLOPs so far", "FLOPs alone")
        rows = [
            (
                f"{rung.depth:,}",
                _describe_copies(rung.copies),
                f"{rung.parameters:,}",
                f"{rung.forward_flops:.3g}",
                f"{rung.steps:,}",
                f"{rung.decay_steps:,}",
                f"{rung.flops:.3g}",
                f"{rung.flops_alone:.3g}",
            )
            for rung in self.rungs
        ]
        names = ", ".join(repr(tower.name) for tower in self.towers)
        ratio = self.flops / self.flops_alone
        lines = [
            f"{plural(len(self.rungs), 'size')} from one training, {first.depth:,} to "
            f"{plural(last.depth, 'block')} in {names}: {plural(self.total_steps, 'step')}.",
            align_columns([titles, *rows], numbers_from=2),
            f"All sizes together: {self.flops:.3g} FLOPs; each alone for {plural(self.steps, 'step')}: "
            f"{self.flops_alone:.3g}, so {abs(1 - ratio):.0%} {'less' if ratio <= 1 else 'more'}.",
            "Each rung is saved by save_pretrained."
            if self.pretrained
            else "Each rung is saved as model.safetensors, the state dict of the deeper model, and rung.json.",
        ]
        if self.uncounted:
            lines.append(f"FLOPs are without what torch cannot count: {self.uncounted}.")
        return "\n".join(lines)


def _describe_copies(copies: Mapping[str, Sequence[int]]) -> str:
    counts = [count for by_block in copies.values() for count in by_block]
    if not counts:
        return "none"
    if len(set(counts)) == 1:
        return "each once" if counts[0] == 1 else f"each {counts[0]} times"
    return "; ".join(
        ", ".join(f"{index}" + (f" x{count}" if count > 1 else "") for index, count in enumerate(by_block) if count)
        for by_block in copies.values()
    )


@check_arguments(ConfigError, **ADVICE)
def make_plan(
    model: nn.Module,
    example: Arguments,
    passes: float = 1.0,
    *,
    steps: PositiveInt,
    depths: Sizes | None = None,
    parameters: Sizes | None = None,
    flops: Sequence[Flops] | None = None,
    blocks: Sequence[str] | None = None,
    share: NonNegativeFloat = SHARE,
    decay: NonNegativeFloat = DECAY,
    rates: Sequence[NonNegativeFloat] | None = None,
) -> LadderPlan:
    """The plan for these sizes, given as in `ladder`; a step makes ``passes`` passes of the example input."""
    require_plain(model)
    targets = read_targets(depths, parameters, flops)
    if share <= 0 or not 0 < decay < 1:
        raise ConfigError(f"share is {share:g} and decay {decay:g}: share must be above 0, decay between 0 and 1")
    branch, later = round(steps * decay), round(steps * share)
    trunk = steps - branch
    if min(trunk, branch, later) < 1:
        raise ConfigError(
            f"{plural(steps, 'step')} with share {share:g} and decay {decay:g} leave phases of {trunk}, {later} "
            f"and {plural(branch, 'step')}: give more steps"
        )

    # A copy grows to each size, which checks that this is possible and measures its cost.
    towers = find_towers(model, example, blocks)
    _require_own_parameters(model, towers)
    examples = len(first_tensor(example))
    probe = copy_with(model, model, ConfigError)
    forward, uncounted = count_forward(probe, example)
    sizes = _find_depths(probe, towers, example, targets, forward / examples, uncounted)
    if rates is not None and (len(rates) != len(sizes) or min(rates) <= 0):
        raise ConfigError(f"rates are {list(rates)}: give a factor above 0 for each of the {len(sizes)} sizes")
    by_rung: list[tuple[Mapping[str, tuple[int, ...]], int, float]] = [({}, _count_parameters(probe), forward)]
    present = towers
    for depth in sizes[1:]:
        copies = plan_copies(present, depth)
        deepen_in_place(probe, copies)
        present, before = grow_towers(present, copies), forward
        forward, uncounted = count_forward(probe, example)
        _require_that_copies_run(towers, before, forward)
        by_rung.append((copies, _count_parameters(probe), forward))
    pretrained = any(callable(getattr(type(model), method, None)) for method in SAVING_METHODS)

    trunks = [trunk, *[later] * (len(sizes) - 1)]
    costs = [TRAINING_PASSES * passes * forward for _, _, forward in by_rung]
    spent = accumulate(cost * (long + branch) for cost, long in zip(costs, trunks, strict=True))
    return LadderPlan(
        towers,
        tuple(
            PlannedRung(
                depth=depth,
                copies=copies,
                parameters=parameters,
                forward_flops=forward / examples,
                steps=long,
                decay_steps=branch,
                rate=rate,
                flops=up_to_here,
                flops_alone=cost * steps,
            )
            for depth, (copies, parameters, forward), long, cost, up_to_here, rate in zip(
                sizes, by_rung, trunks, costs, spent, rates or [1.0] * len(sizes), strict=True
            )
        ),
        steps,
        uncounted,
        pretrained and is_built_alike(probe),
    )


def require_plain(model: nn.Module) -> None:
    """Refuse models that cannot grow in place."""
    if any(isinstance(part, GrowingModel) for part in model.modules()):
        raise ConfigError("the model has slots from esper.attach: give the plain model; a ladder grows whole blocks")
    if any(COMPILED in dict(part.named_children()) for part in model.modules()):
        raise ConfigError(
            "the model or a part of it is compiled by torch.compile, but a ladder needs the plain model: give that"
        )
    if any(isinstance(part, DataParallel | DistributedDataParallel) for part in model.modules()):
        raise ConfigError("the model is wrapped for data parallelism, but a ladder needs the plain model: give that")
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise ConfigError("a ladder cannot run in several processes, because its model grows in place: use one")
    if next(model.parameters(), None) is None:
        raise ConfigError("the model has no parameters")


def count_forward(model: nn.Module, example: Arguments) -> tuple[float, str]:
    """FLOPs of a forward pass of the example input, and the operations that torch cannot count, or ""."""
    like = next(model.parameters())
    counted = count_flops(model, lambda: call_host(model, fit_example(model, example, like)))
    return float(counted.total), counted.uncounted


def read_targets(
    depths: Sequence[int] | None, parameters: Sequence[int] | None, flops: Sequence[float] | None
) -> tuple[Measure, Sequence[int | float]]:
    """The measure in which the sizes of a ladder are given, and the sizes."""
    given: dict[Measure, Sequence[int | float] | None] = {"depths": depths, "parameters": parameters, "flops": flops}
    chosen: list[tuple[Measure, Sequence[int | float]]] = [
        (name, sizes) for name, sizes in given.items() if sizes is not None
    ]
    if len(chosen) != 1:
        raise ConfigError(
            "give the sizes in one way: depths=[1, 2, 4] (blocks), parameters=[...] (scalars of the model), or "
            "flops=[...] (of a forward pass of one example)"
        )
    measure, sizes = chosen[0]
    if not sizes or any(not 0 < before < after for before, after in pairwise(sizes)) or not sizes[0] > 0:
        raise ConfigError(f"{measure} is {list(sizes)}: give sizes that increase, such as depths=[1, 2, 4]")
    return measure, sizes


def _find_depths(
    model: nn.Module,
    towers: Towers,
    example: Arguments,
    targets: tuple[Measure, Sequence[int | float]],
    flops: float,
    uncounted: str,
) -> list[int]:
    """The depths of a ladder; for targets in parameters or FLOPs, the nearest possible depths."""
    measure, sizes = targets
    first = count_blocks(towers)
    if measure == "depths":
        depths = [int(size) for size in sizes]
    else:
        if measure == "flops" and uncounted:
            raise ConfigError(f"flops: torch cannot count {uncounted}; give depths or parameters")
        # One more round of copies shows the cost of depth.
        deeper = copy.deepcopy(model)
        deepen_in_place(deeper, plan_copies(towers, 2 * first))
        if measure == "flops":
            least, more = flops, count_forward(deeper, example)[0] / len(first_tensor(example))
        else:
            least, more = _count_parameters(model), _count_parameters(deeper)
        _require_that_copies_run(towers, least, more)
        slope = (more - least) / first
        # Several lists of blocks grow together, by whole factors.
        unit = 1 if len(towers) == 1 else first
        depths = [first + unit * round((size - least) / slope / unit) for size in sizes]
        near = ", ".join(f"{size:g} is {depth}" for size, depth in zip(sizes, depths, strict=True))
        if depths[0] != first:
            raise ConfigError(
                f"{measure} starts at {sizes[0]:g}, but the given model, the first size, has {least:g}: start with that"
            )
        if any(before >= after for before, after in pairwise(depths)):
            raise ConfigError(f"{measure}: sizes differ by less than a block ({near} blocks): give other sizes")
    if depths[0] != first or depths[-1] > DEEPEST:
        raise ConfigError(
            f"{measure} is {list(sizes)}, from {plural(depths[0], 'block')} to {depths[-1]:,}; but the given model, "
            f"the first size, has {plural(first, 'block')}: build a model with {depths[0]}, or start with {first}"
        )
    return depths


def _require_own_parameters(model: nn.Module, towers: Towers) -> None:
    blocks = {f"{tower.name}.{index}." for tower in towers for index in range(len(tower))}
    owners: dict[nn.Parameter, tuple[str, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = next((block for block in blocks if name.startswith(block)), "")
        other, first_name = owners.setdefault(parameter, (owner, name))
        if other != owner:
            raise ConfigError(
                f"{first_name!r} and {name!r} are one parameter, which copies of a block would not share: give each "
                "block parameters of its own"
            )


def _require_that_copies_run(towers: Towers, before: float, after: float) -> None:
    """Refuse copies that do not raise the cost of the model."""
    if not after > before:
        names = ", ".join(repr(tower.name) for tower in towers)
        raise ConfigError(
            f"the copies in {names} do not run, because the model does not call that list in turn: name another one in "
            "blocks"
        )


def _count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
