"""Which seeds commands take."""

from __future__ import annotations

from esper.errors import ConfigError

MOST = 2**31 - 1


def require_seed(seed: int) -> None:
    """Refuse what no source of randomness takes, as settings do.

    Raises:
        ConfigError: it is below 0 or beyond 31 bits.
    """
    if not 0 <= seed <= MOST:
        raise ConfigError(f"--seed {seed}: it must be 0 to {MOST}")
