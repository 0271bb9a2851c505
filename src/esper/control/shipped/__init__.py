"""Policies that are shipped with Esper: run directories of `esper train` with weights, settings and a card."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from esper.errors import ConfigError, did_you_mean
from esper.runs.run_directory import RunDirectory

ESPER = "esper"
"""Name of the shipped policy; `esper/CARD.md` beside this file describes it."""


def open_policy(name: str, other_names: Sequence[str] = ()) -> RunDirectory:
    """The run directory of a policy: of a shipped one by its name, or of a run by its path.

    ``other_names``: further names that the caller accepts, for the message.

    Raises:
        ConfigError: there is no such policy.
        RunError: the directory is not a run of `esper train`.
    """
    if name == ESPER:
        return RunDirectory(Path(__file__).parent / ESPER)
    names = tuple(dict.fromkeys((*other_names, ESPER)))
    if not Path(name).is_dir():
        own = ", or FILE.py:NAME of a controller of your own" if other_names else ""
        raise ConfigError(
            f"no controller {name!r}{did_you_mean(name, names)}: give one of {', '.join(names)}, "
            f"or the directory of a run of `esper train`{own}"
        )
    return RunDirectory.open_training_run(Path(name))
