"""Every error that Esper raises on purpose, and the hint to a misspelt name.

The command line prints any of them as one sentence on stderr and exits with code 2; so a message names what was wrong,
where, and what to do about it.
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
    """Base of all errors that Esper raises on purpose. Its text is one printable line, whatever it quotes."""

    def __str__(self) -> str:
        text = escape_unprintable(super().__str__())
        # A message may quote a file of any length.
        if len(text) > LONGEST_MESSAGE:
            half = LONGEST_MESSAGE // 2
            text = f"{text[:half]} ... {text[-half:]}"
        return text


class IllegalActionError(EsperError):
    """An action that the lifecycle's rules forbid in the seed's present state."""


class UnknownBlueprintError(EsperError):
    """A blueprint name that is not registered."""


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
    """A process that cannot go on because of another process of its group."""


class DivergedError(EsperError):
    """Training that keeps diverging although it was rolled back."""


class ExportError(EsperError):
    """A model that cannot be finalized or exported, or whose export computes something else."""


class LookError(EsperError):
    """A loss or data with which expansion scores cannot be measured."""


def escape_unprintable(text: str) -> str:
    """A text as one line that cannot control a terminal: unprintable characters are written as escapes."""
    if text.isprintable():
        return text
    return "".join(mark if mark.isprintable() else mark.encode("unicode_escape").decode("ascii") for mark in text)


def did_you_mean(
    name: str, candidates: Iterable[str], *, spell: Callable[[str], str] = repr, limit: int = 3, separator: str = ";"
) -> str:
    """``; did you mean 'a' or 'b'?`` with the candidates nearest to ``name``; empty if none is near.

    At most ``limit`` names are suggested, each written by ``spell``. The hint starts with ``separator``.
    """
    near = difflib.get_close_matches(name, [candidate for candidate in candidates if candidate], n=limit)
    return f"{separator} did you mean {' or '.join(map(spell, near))}?" if near else ""


def plural(number: float, noun: str, nouns: str = "") -> str:
    """A number with its noun, in the plural unless it is one: ``1 run``, ``2,000 runs``, ``0 families``.

    ``nouns`` is the plural, if that is not the noun with an s. Numbers are rounded to integers.
    """
    amount = f"{number:,.0f}"
    return f"{amount} {noun if amount == '1' else nouns or noun + 's'}"
