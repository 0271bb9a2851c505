"""What several commands take."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from esper.errors import ConfigError

RUNS = Path("runs")
"""Where runs go by default."""
LARGEST_SEED = 2**31 - 1


def new_run_path(chosen: Path | None) -> Path:
    """The directory that was chosen for a run, or one under `RUNS` named by the time."""
    return chosen or RUNS / datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")


def require_seed(seed: int) -> None:
    """Refuse what no source of randomness takes, as settings do.

    Raises:
        ConfigError: it is below 0 or beyond 31 bits.
    """
    if not 0 <= seed <= LARGEST_SEED:
        raise ConfigError(f"--seed {seed}: it must be 0 to {LARGEST_SEED}")
