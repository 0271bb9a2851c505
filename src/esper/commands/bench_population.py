"""`esper bench population`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console

from esper.commands.seeds import require_seed
from esper.devices import usable_device
from esper.errors import ConfigError
from esper.experiments.bench_population import BenchResult, BenchTask, bench_population
from esper.experiments.workers import LocalWorkers
from esper.tasks.registry import get_suite
from esper.training.population import StrategyChoice
from esper.ui.output import console_beside, print_json, say

_PROCESSES = 2
"""More than one, so that the measuring is done in a worker, as training is, and not in this process."""


def command(
    suites: tuple[str, ...] = ("tokens", "digits", "mnist1d_conv"),
    environments: tuple[int, ...] = (1, 4, 16, 64),
    repeats: int = 5,
    strategy: StrategyChoice = "stacked",
    device: str = "cpu",
    seed: int = 0,
    json: bool = False,
) -> None:
    """Measure how fast populations train, beside a plain loop over separate modules that does the same work.

    Args:
        suites: Suites whose populations are measured; the ratio is reported for the first.
        environments: Sizes of the populations.
        repeats: Turns that each side has; figures are medians over them.
        strategy: How the population is run; auto takes whichever is faster.
        device: Where everything runs, as torch names it.
        seed: Draws instances and actions.
        json: Print a machine-readable last line.
    """
    require_seed(seed)
    _check(suites, environments, repeats, device)
    console = console_beside(json)
    results: list[BenchResult] = []
    with LocalWorkers(_PROCESSES) as workers:
        for suite in suites:
            say(console, _header(suite, strategy, device))
            for count in environments:
                task = BenchTask(suite, count, repeats, strategy, device, seed)
                results += workers.map(bench_population, [task])
                say(console, _row(results[-1]))
    _explain(console)
    if json:
        print_json(_record(results, strategy, device))


def _check(suites: tuple[str, ...], environments: tuple[int, ...], repeats: int, device: str) -> None:
    if not suites or not environments or min(environments) < 1 or repeats < 1:
        raise ConfigError("name at least one suite and one size, and let sizes and repeats be at least 1")
    for suite in suites:
        get_suite(suite)
    usable_device(device)


def _header(suite: str, strategy: StrategyChoice, device: str) -> str:
    columns = ("networks", "run", "population/s", "loop/s", "ratio", "environment/s")
    title = f"\n{suite} ({strategy}, {device}): environment steps per second"
    return f"{title}\n{'  '.join(name.rjust(13) for name in columns)}  where the population's time goes"


def _row(result: BenchResult) -> str:
    figures = (
        f"{result.environments}",
        result.strategy,
        f"{result.population:.0f}",
        f"{result.loop:.0f}",
        f"{result.ratio:.1f}",
        f"{result.environment:.0f}",
    )
    shares = ", ".join(f"{part} {share:.0%}" for part, share in result.shares.items())
    return f"{'  '.join(figure.rjust(13) for figure in figures)}  {shares}"


def _explain(console: Console) -> None:
    say(
        console,
        "\npopulation: decisions, minibatches and evaluation with counterfactuals; loop: the same by separate modules "
        "with torch.optim;\nenvironment: the population's steps with data, observations, masks and rewards. "
        "One thread on the CPU.",
    )


def _record(results: list[BenchResult], strategy: StrategyChoice, device: str) -> dict[str, Any]:
    first = results[0].suite
    return {
        "ratio": {str(one.environments): one.ratio for one in results if one.suite == first},
        "results": [asdict(one) for one in results],
        "strategy": strategy,
        "device": device,
    }
