"""Every error that Esper raises on purpose, and the hint to a misspelt name.

The command line turns any of them into one sentence on stderr and exit code 2; so a message says what was wrong, where,
and what to do about it.
"""

import difflib
from collections.abc import Callable, Iterable

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DistributedError",
    "DivergedError",
    "EsperError",
    "ExportError",
    "IllegalActionError",
    "LookError",
    "RunError",
    "SlotError",
    "TaskError",
    "UnknownBlueprintError",
]

LONGEST_MESSAGE = 2000


class EsperError(Exception):
    """Base of all errors that Esper raises on purpose. As text it is one printable line, whatever it quotes."""

    def __str__(self) -> str:
        text = super().__str__()
        if not text.isprintable():
            text = "".join(
                mark if mark.isprintable() else mark.encode("unicode_escape").decode("ascii") for mark in text
            )
        if len(text) > LONGEST_MESSAGE:
            half = LONGEST_MESSAGE // 2
            text = f"{text[:half]} ... {text[-half:]}"
        return text


class IllegalActionError(EsperError):
    """An action that the lifecycle's rules forbid in the seed's present state."""


class UnknownBlueprintError(EsperError):
    """A blueprint name that nobody registered."""


class SlotError(EsperError):
    """A growth slot that cannot be attached to, or probed on, the given model."""


class ConfigError(EsperError):
    """A configuration file, key or value that cannot be used."""


class CheckpointError(EsperError):
    """A checkpoint that is missing, damaged, foreign or of another shape than expected."""


class RunError(EsperError):
    """A run directory or run store that is missing, damaged, foreign or in use."""


class TaskError(EsperError):
    """A suite, instance or data set that does not exist or cannot be built."""


class DistributedError(EsperError):
    """A process whose work another one of its group has made impossible."""


class DivergedError(EsperError):
    """Training that keeps blowing up although it was rolled back."""


class ExportError(EsperError):
    """A model that cannot be made plain, exported, or told apart from its export when both are run."""


class LookError(EsperError):
    """A loss or data by which a model cannot be looked at."""


def did_you_mean(
    name: str, candidates: Iterable[str], *, spell: Callable[[str], str] = repr, limit: int = 3, separator: str = ";"
) -> str:
    """``; did you mean 'a' or 'b'?`` with the candidates nearest to ``name``; empty if none is near.

    At most ``limit`` names are suggested, each written by ``spell``. The hint starts with ``separator``.
    """
    near = difflib.get_close_matches(name, [candidate for candidate in candidates if candidate], n=limit)
    return f"{separator} did you mean {' or '.join(map(spell, near))}?" if near else ""
