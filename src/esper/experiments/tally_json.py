"""A tally as JSON values, and back, exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from esper.experiments.seed_gradients import SeedGradients
from esper.experiments.tallies import Rollback, StageChange, Tally
from esper.tasks.instance import Instance
from esper.tasks.suite import Suite

_RECORDS: Mapping[str, type[Any]] = {kind.__name__: kind for kind in (StageChange, Rollback, SeedGradients)}
"""Dataclasses of plain values that a tally may list."""


def tally_to_json(tally: Tally) -> dict[str, Any]:
    """All that was counted; not the suite and the instances, which whoever reads it back has to know."""
    return {name: _encoded(value) for name, value in _counted(tally).items()}


def tally_from_json(record: Mapping[str, Any], suite: Suite, instances: Sequence[Instance]) -> Tally:
    """Inverse of :func:`tally_to_json`.

    Raises:
        ValueError: what was counted then is not what is counted now.
    """
    tally = Tally(suite, instances)
    if record.keys() != _counted(tally).keys():
        raise ValueError(f"not the record of a tally: {sorted(record)}")
    vars(tally).update({name: _decoded(value) for name, value in record.items()})
    return tally


def _counted(tally: Tally) -> dict[str, Any]:
    return {name: value for name, value in vars(tally).items() if name != "instances" and not name.startswith("_")}


def _encoded(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        array = cast("NDArray[Any]", value)
        return {"dtype": array.dtype.str, "array": array.tolist()}
    if isinstance(value, list):
        return [_encoded(one) for one in cast("list[Any]", value)]
    kind = type(value).__name__
    return {"kind": kind, "fields": asdict(value)} if kind in _RECORDS else value


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(one) for one in cast("list[Any]", value)]
    match value:
        case {"dtype": dtype, "array": array}:
            return np.array(array, np.dtype(dtype))
        case {"kind": kind, "fields": fields}:
            return _RECORDS[kind](**{name: _frozen(one) for name, one in fields.items()})
        case _:
            return value


def _frozen(value: Any) -> Any:
    """JSON has no tuples, and records, being immutable, no lists."""
    return tuple(cast("list[Any]", value)) if isinstance(value, list) else value
