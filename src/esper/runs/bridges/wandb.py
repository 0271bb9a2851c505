"""A run at Weights & Biases, also offline.

A step of W&B is an iteration. Steps only go up there: what stands cannot be taken back or replaced, and online a step
that the run has already is ignored. So iterations that a resumed run makes anew are not written again. Offline, each
opening leaves a folder of its own with the same run in it; ``wandb sync`` uploads them one after the other. Nobody can
tell there whether an iteration that was handed over in the very moment of a kill had arrived: then it may stand in two
folders, alike.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import wandb

from esper import __version__
from esper.errors import ConfigError
from esper.runs.bridges.bridge import Address, Logger, Opening
from esper.runs.bridges.tail import Figures

PROJECT = "esper"


def open_logger(opening: Opening) -> Logger:
    """Go on with a run in the project that is the destination, ``project`` or ``entity/project``; online if W&B is."""
    address = opening.address or Address(opening.destination or PROJECT, secrets.token_hex(4))
    entity, _, project = address.destination.rpartition("/")
    nothing_of_this_process = wandb.Settings(
        console="off",
        disable_git=True,
        quiet=True,
        save_code=False,
        x_disable_meta=True,
        x_disable_stats=True,
        x_save_requirements=False,
    )
    try:
        run = wandb.init(
            entity=entity or None,
            project=project,
            id=address.run,
            name=opening.name,
            resume="allow",
            dir=opening.folder,
            config={**opening.settings, "run": dict(opening.description), "esper_version": __version__},
            settings=nothing_of_this_process,
        )
    except wandb.Error as error:
        raise ConfigError(f"W&B cannot be reached ({error}): log in, or set WANDB_MODE=offline") from error
    return WandBLogger(address, run)


class WandBLogger(Logger):
    """A row of figures per iteration, and the run's history in the summary."""

    def __init__(self, address: Address, run: wandb.Run) -> None:
        self.address = address
        self._run = run

    def log_iteration(self, figures: Figures) -> None:
        samples = {name: wandb.Histogram(values) for name, values in figures.samples.items()}
        notes = {"notes": "\n".join(figures.notes)} if figures.notes else {}
        self._run.log({**figures.scalars, **samples, **notes}, step=figures.number, commit=True)

    def log_history(self, lines: Sequence[str], iteration: int) -> None:
        self._run.summary["history"] = "\n".join(lines)

    def close(self, outcome: str | None) -> None:
        self._run.finish(exit_code=1 if outcome == "failed" else 0)
