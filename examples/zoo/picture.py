"""A picture of a network that grows: redrawn in place on a terminal, printed with every change elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

import esper
from esper.dash.output import print_line
from esper.dash.progress import BLOCKS
from esper.growth.summary import SlotState, SlotSummary

WIDTH = 60
"""Most epochs that a curve shows; of more, every second, third, ..."""


class GrowthPicture:
    """Context manager that shows a growing model, and accuracy in comparison with the host alone.

    Args:
        console: Where it is shown. On a terminal the picture is redrawn after each epoch, and lines are about decisions
            that act; elsewhere there is a line per epoch, and a picture whenever the modules are others than before.
        model: The model, with its slots in the order of the forward pass.
    """

    def __init__(self, console: Console, model: esper.GrowingModel) -> None:
        self._console = console
        self._model = model
        self._accuracies: tuple[list[float], list[float]] = ([], [])
        self._drawn: list[tuple[SlotState, str | None]] = []
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        self.draw()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def add_epoch(self, line: str, *, acted: bool, grown: float, bare: float) -> None:
        """Show what an epoch came to, by a line and in the picture.

        Args:
            line: What happened.
            acted: Whether the decision was other than to wait.
            grown: Accuracy on validation data, in [0, 1].
            bare: The same of the host without growth.
        """
        for accuracies, accuracy in zip(self._accuracies, (grown, bare), strict=True):
            accuracies.append(accuracy)
        if self._live is None or acted:
            print_line(self._console, line)
        self.draw()

    def draw(self) -> None:
        """Draw the model as it is now."""
        slots = self._model.summary().slots
        text = "\n".join(["", *draw_network(slots, self._model.host_parameters), *draw_curves(*self._accuracies)])
        modules = [(slot.stage, slot.blueprint) for slot in slots]
        if self._live is not None:
            self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)
        elif modules != self._drawn:
            print_line(self._console, f"{text}\n")
        self._drawn = modules


def draw_network(slots: Sequence[SlotSummary], host_parameters: int) -> list[str]:
    """The host from top to bottom as lines of text, each slot with what grows in it to its right."""
    width = max(len(slot.slot) for slot in slots)
    lines = ["  input"]
    for slot in slots:
        module = f"{slot.blueprint}, {slot.parameters:,} parameters"
        worth = "" if slot.contribution is None else f", accuracy {slot.contribution:+.3f} by it"
        match slot.stage:
            case SlotState.FOSSILIZED:
                beside = f"━━ {module}: kept for good"
            case SlotState.LIVE:
                beside = f"╌╌ {module}: on probation, {slot.alpha or 0:.0%} blended in{worth}"
            case SlotState.DORMANT | SlotState.DISABLED:
                beside = "·· free"
        lines += ["    │", f"  {slot.slot:<{width}} {beside}"]
    grown = sum(slot.parameters for slot in slots)
    return [*lines, "    │", f"  {'output':<{width}} {host_parameters:,} parameters + {grown:,} grown"]


def draw_curves(grown: Sequence[float], bare: Sequence[float]) -> list[str]:
    """Two curves of accuracy by epoch, one below the other, on one scale; nothing before the first epoch."""
    if not grown:
        return []
    low, high = min(*grown, *bare), max(*grown, *bare)
    every = -(-len(grown) // WIDTH)
    lines = [""]
    for name, values in (("accuracy with growth", grown), ("without growth", bare)):
        shown = values[::-every][::-1]  # the last epoch is one of them
        heights = (round((value - low) / ((high - low) or 1) * (len(BLOCKS) - 1)) for value in shown)
        lines.append(f"  {name:>20} {''.join(BLOCKS[height] for height in heights)} {values[-1]:.3f}")
    return lines
