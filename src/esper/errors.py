"""The errors that Esper raises on purpose, each of which says what was wrong, where, and what to do about it."""

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
    """Base class of all errors that Esper raises on purpose. The text is one printable line, whatever it quotes."""

    def __str__(self) -> str:
        text = escape_unprintable(super().__str__())
        # A message may quote a file of any length, so the middle of a long one is left out.
        if len(text) > LONGEST_MESSAGE:
            half = LONGEST_MESSAGE // 2
            text = f"{text[:half]} ... {text[-half:]}"
        return text


class IllegalActionError(EsperError):
    """An action that the rules of the lifecycle forbid in the seed's current state."""


class UnknownBlueprintError(EsperError):
    """A blueprint name that is not registered."""


class SlotError(EsperError):
    """A growth slot that cannot be attached to the given model or probed on it."""


class ConfigError(EsperError):
    """A configuration file, key or value that cannot be used."""


class CheckpointError(EsperError):
    """A checkpoint that is missing, damaged, of another program or of an unexpected shape."""


class RunError(EsperError):
    """A run directory or run store that is missing, damaged, of another program or in use."""


class TaskError(EsperError):
    """A suite, instance or data set that does not exist or cannot be built."""


class DistributedError(EsperError):
    """A process that cannot continue because another process of its group failed or differs."""


class DivergedError(EsperError):
    """Training that keeps diverging even after rollbacks."""


class ExportError(EsperError):
    """A model that cannot be finalized or exported, or whose exported form computes different outputs."""


class LookError(EsperError):
    """A loss or data set on which promises cannot be measured."""


def escape_unprintable(text: str) -> str:
    """The text as one line with escapes for unprintable characters, so that it cannot control a terminal."""
    if text.isprintable():
        return text
    return "".join(mark if mark.isprintable() else mark.encode("unicode_escape").decode("ascii") for mark in text)


def did_you_mean(
    name: str, candidates: Iterable[str], *, spell: Callable[[str], str] = repr, limit: int = 3, separator: str = ";"
) -> str:
    """``; did you mean 'a' or 'b'?`` with the candidates closest to ``name``; empty if none is close."""
    near = difflib.get_close_matches(name, [candidate for candidate in candidates if candidate], n=limit)
    return f"{separator} did you mean {' or '.join(map(spell, near))}?" if near else ""


def plural(number: float, noun: str, nouns: str = "") -> str:
    """A rounded number with its noun, in the plural (by default with an s) unless it is one: ``2,000 runs``."""
    amount = f"{number:,.0f}"
    return f"{amount} {noun if amount == '1' else nouns or noun + 's'}"
