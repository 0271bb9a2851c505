"""`esper bench attach`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from esper.commands.seeds import require_seed
from esper.devices import usable_device
from esper.errors import ConfigError
from esper.grower.overhead import PLACES, Overhead, OverheadResult, OverheadTask, measure_overhead
from esper.growth.probe import FEWEST_EXAMPLES
from esper.ui.output import console_beside, print_json, say


def command(
    repeats: int = 400,
    steps: int = 1,
    batch_size: int = 16,
    device: str = "cpu",
    seed: int = 0,
    json: bool = False,
) -> None:
    """Measure what dormant slots add to the time of a small ResNet's training step, and what a grower adds.

    Args:
        repeats: Turns of each side; figures are medians over them.
        steps: Training steps in a turn.
        batch_size: Images of 32 x 32 pixels in a step.
        device: Where everything runs, as torch names it.
        seed: Draws the images.
        json: Print a machine-readable last line.
    """
    require_seed(seed)
    _check(repeats, steps, batch_size, device)
    console = console_beside(json)
    say(console, f"a small ResNet with slots behind {', '.join(PLACES)}, beside the same without, in turns ...")
    found = measure_overhead(OverheadTask(repeats, steps, batch_size, device, seed))
    say(console, f"\ntraining step without slots  {found.step_seconds * 1e3:.2f} ms")
    say(console, f"dormant slots                {_shown(found.slots)}")
    say(console, f"dormant slots and a grower   {_shown(found.grower)}")
    if json:
        print_json(_record(found, device))


def _check(repeats: int, steps: int, batch_size: int, device: str) -> None:
    if min(repeats, steps) < 1 or batch_size < FEWEST_EXAMPLES:
        raise ConfigError(f"repeats and steps must be at least 1, the batch size at least {FEWEST_EXAMPLES}")
    usable_device(device)


def _shown(overhead: Overhead) -> str:
    return f"{overhead.median:+.2%} (half of the turns between {overhead.lower:+.2%} and {overhead.upper:+.2%})"


def _record(found: OverheadResult, device: str) -> dict[str, Any]:
    return {
        "overhead": found.slots.median,
        "slots": asdict(found.slots),
        "grower": asdict(found.grower),
        "step_seconds": found.step_seconds,
        "device": device,
    }
