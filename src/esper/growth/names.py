"""Help with misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'a' or 'b'?`` with the known names nearest to ``name``; empty if none is near."""
    near = difflib.get_close_matches(name, [one for one in known if one], n=3)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
