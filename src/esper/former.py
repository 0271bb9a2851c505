"""Former names and arguments: how they warn, and the version in which they go."""

from __future__ import annotations

import warnings

REMOVED_IN = "0.4"
"""The version in which what is former today is gone."""


def warn_of_former(sentence: str, category: type[Warning] = DeprecationWarning, *, stacklevel: int = 2) -> None:
    """Warn of something former; ``sentence`` names it and what takes its place.

    ``category`` is a `FutureWarning` where users of commands must see it. ``stacklevel`` is as for `warnings.warn`.
    """
    warnings.warn(f"{sentence}; the former way goes in version {REMOVED_IN}", category, stacklevel=stacklevel + 1)
