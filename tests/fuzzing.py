"""Mutations of valid files, and a watch over what reading them does."""

import codecs
import os
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Python imports codecs on first use, which is no harm.
for name in ("utf_8_sig", "utf_16", "utf_16_le", "utf_16_be", "utf_32", "utf_32_le", "utf_32_be", "unicode_escape"):
    codecs.lookup(name)

MOST_CALLS = 1_000_000
"""Of functions that one input may lead to. Calls, and not seconds: those also tell what else the machine did."""


class Mutator:
    """Draws damaged copies of valid inputs: flips, cuts, splices, copies, swaps, and tokens that readers stumble on."""

    def __init__(self, corpus: Sequence[bytes], tokens: Sequence[bytes], seed: int) -> None:
        self.random = random.Random(seed)
        self._corpus = list(corpus)
        self._tokens = list(tokens)

    def draw(self) -> bytes:
        return self.mutated(self.random.choice(self._corpus))

    def mutated(self, data: bytes) -> bytes:
        """One to three changes; now and then none."""
        for _ in range(self.random.choice((0, 1, 1, 1, 1, 2, 2, 3))):
            change = self.random.choice(
                (self._flip, self._truncate, self._splice, self._duplicate, self._swap, self._insert, self._overwrite)
            )
            data = change(data)
        return data

    def _flip(self, data: bytes) -> bytes:
        if not data:
            return data
        place = self.random.randrange(len(data))
        return data[:place] + bytes([data[place] ^ 1 << self.random.randrange(8)]) + data[place + 1 :]

    def _truncate(self, data: bytes) -> bytes:
        return data[: self.random.randint(0, len(data))]

    def _splice(self, data: bytes) -> bytes:
        other = self.random.choice(self._corpus)
        return data[: self.random.randint(0, len(data))] + other[self.random.randint(0, len(other)) :]

    def _duplicate(self, data: bytes) -> bytes:
        start, end = self._chunk(data)
        return data[:end] + data[start:end] * self.random.choice((1, 1, 1, 9)) + data[end:]

    def _swap(self, data: bytes) -> bytes:
        start, middle = self._chunk(data)
        end = self.random.randint(middle, min(middle + 64, len(data)))
        return data[:start] + data[middle:end] + data[start:middle] + data[end:]

    def _insert(self, data: bytes) -> bytes:
        place = self.random.randint(0, len(data))
        return data[:place] + self.random.choice(self._tokens) + data[place:]

    def _overwrite(self, data: bytes) -> bytes:
        start, end = self._chunk(data)
        return data[:start] + self.random.choice(self._tokens) + data[end:]

    def _chunk(self, data: bytes) -> tuple[int, int]:
        start = self.random.randint(0, len(data))
        return start, self.random.randint(start, min(start + 64, len(data)))


class _Auditor:
    """Python cannot remove an audit hook, so there is one, which listens only while a watch is on."""

    RUNNING = frozenset({"exec", "os.exec", "os.posix_spawn", "os.system", "pickle.find_class", "subprocess.Popen"})

    def __init__(self) -> None:
        self.folder: str | None = None
        self.offences: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        opened = event == "open" and isinstance(arguments[0], str | bytes | os.PathLike)
        if event in self.RUNNING or (opened and not os.fsdecode(arguments[0]).startswith(self.folder)):
            self.offences.append(f"{event} {arguments}"[:200])


_auditor = _Auditor()


@contextmanager
def harmless(folder: Path) -> Iterator[None]:
    """What happens inside runs no code from outside, opens no file outside ``folder`` and is no endless work."""
    _auditor.offences.clear()
    _auditor.folder = str(folder)
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    others = sys.getprofile()
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(others)
        _auditor.folder = None
    assert not _auditor.offences, _auditor.offences
    assert calls < MOST_CALLS


def assert_legible(error: Exception) -> None:
    """A message is one line that a terminal can show."""
    assert str(error).isprintable()
    assert 0 < len(str(error)) < 3000
