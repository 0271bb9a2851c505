"""A run as TensorBoard event files.

A step of TensorBoard is an iteration. What is written from a step on can be taken back: a new event file says that
everything from its ``purge_step`` on is void in those before it. So whatever may have been written without being
counted is void when a bridge is opened again, and iterations that a resumed run makes anew replace the first ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tensorboardX import SummaryWriter

from esper.errors import ConfigError, RunError
from esper.runs.bridges.bridge import Address, Logger, Opening
from esper.runs.bridges.tail import Figures


def open_logger(opening: Opening) -> Logger:
    """Write to the folder that is the destination, by default one beside the cursor."""
    address = opening.address
    if address is None:
        folder = Path(opening.destination or opening.folder / "tensorboard").absolute()
        address = Address(str(folder), opening.name)
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty: give an empty or new folder for each run")
    return TensorBoardLogger(address, opening)


class TensorBoardLogger(Logger):
    """Scalars, histograms and texts of a run."""

    def __init__(self, address: Address, opening: Opening) -> None:
        self.address = address
        self._begin(opening.after + 1)
        if opening.after < 0:
            for name, values in (("settings", opening.settings), ("run", opening.description)):
                rows = "\n".join(f"| {key} | {value} |" for key, value in values.items())
                self._writer.add_text(name, f"| name | value |\n|---|---|\n{rows}", 0)

    def forget(self, after: int) -> bool:
        self._writer.close()
        self._begin(after + 1)
        return True

    def log_iteration(self, figures: Figures) -> None:
        step, time = figures.number, figures.time
        for name, value in figures.scalars.items():
            self._writer.add_scalar(name, value, step, time)
        for name, values in figures.samples.items():
            self._writer.add_histogram(name, np.array(values), step, walltime=time)
        if figures.notes:
            self._writer.add_text("notes", _as_list(figures.notes), step, time)
        self._writer.flush()

    def log_history(self, lines: Sequence[str], iteration: int) -> None:
        # Part of the next iteration, so that it is void and told anew if that is begun again.
        self._writer.add_text("history", _as_list(lines), iteration + 1)
        self._writer.flush()

    def close(self, outcome: str | None) -> None:
        self._writer.close()

    def _begin(self, step: int) -> None:
        folder = Path(self.address.destination)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Files are read in the order of their names, which begin with the second in which they were made.
            count = len(list(folder.glob("*tfevents*")))
            self._writer = SummaryWriter(str(folder), purge_step=step, filename_suffix=f".{count:06d}")
        except OSError as error:
            raise RunError(f"cannot write to {folder} ({error.strerror}): choose another destination") from error


def _as_list(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
