"""Names for the array types of this room."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Bools: TypeAlias = NDArray[np.bool_]
Int8s: TypeAlias = NDArray[np.int8]
Int16s: TypeAlias = NDArray[np.int16]
Int64s: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float32]
Places: TypeAlias = tuple[NDArray[np.intp], ...]
"""Index of some slots in an ``[E, S]`` array: their environments and their slots."""
Rows: TypeAlias = slice | NDArray[np.integer] | Bools
"""A selection of environments."""
