"""The last updates' metrics as a checkpoint keeps them: a resumed run tells trends as one that never stopped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter, ValidationError

from esper.errors import CheckpointError
from esper.rl.diagnostics import HISTORY, UpdateHistory

_KEY = "updates"
_HISTORY = TypeAdapter(UpdateHistory)


def to_state(history: UpdateHistory) -> dict[str, Any]:
    """JSON values."""
    return {_KEY: [asdict(update) for update in history]}


def from_state(state: Mapping[str, Any]) -> UpdateHistory:
    """What `to_state` was given; nothing, if the state is of a time before there was a history.

    Raises:
        CheckpointError: it is none.
    """
    try:
        return _HISTORY.validate_python(state.get(_KEY, ()))[-HISTORY:]
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise CheckpointError(
            f"the checkpoint's metrics of updates are of another version ({place}: {first['msg']}): "
            "use the Esper that wrote it"
        ) from error
