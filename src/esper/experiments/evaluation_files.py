"""Read what an evaluation left in its run directory."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from esper.errors import RunError
from esper.files import read_bounded

MOST_BYTES = 256 * 2**20

T = TypeVar("T")


def read_json(path: Path, kind: TypeAdapter[T]) -> T:
    """The contents of a JSON file as values of ``kind``, whose validators keep out what could not be reported.

    Raises:
        RunError: the file is missing, or holds something else.
    """
    advice = f"`esper evaluate {path.parent}`"
    try:
        return kind.validate_json(read_bounded(path, MOST_BYTES))
    except OSError as error:
        raise RunError(f"cannot read {path} ({error.strerror}): make it with {advice}") from error
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise RunError(f"{path} is damaged ({reason}): make it anew with {advice}") from error
