"""One learning problem: which data, which host, how it is trained, and what growth costs there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from esper.errors import TaskError


@dataclass(frozen=True)
class Instance:
    """Everything that tells one episode's problem from another's; a suite turns it into a host and data.

    Equal instances give equal hosts and equal data, in any process.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    suite: str
    family: str
    variant: str
    """The hidden setting inside the family; no controller is told it."""
    seed: int
    """Seeds the host's first weights and every part of the data."""
    widths: tuple[int, ...]
    """Live channels at each site of the host."""
    learning_rate: float
    train_size: int
    """Training examples."""
    rent: float
    """Price of growth: score = accuracy - rent * log1p(added parameters / host parameters)."""
    label_noise: float = 0.0
    """Fraction of the training labels that are redrawn uniformly; validation and test labels are always clean."""
    drift_step: int | None = None
    """Decision step from which the data are those of phase 1; None: the data never change."""
    linear: bool = False
    """Whether the host's activation is the identity instead of ReLU."""

    @property
    def name(self) -> str:
        """Readable and unique within a suite's draws: ``family/variant/seed``."""
        return f"{self.family}/{self.variant}/{self.seed}"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, inverse of :meth:`from_json`."""
        return {**asdict(self), "widths": list(self.widths)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Instance:
        """The instance a record of :meth:`to_json` describes; raises TaskError naming the first field that is wrong."""
        try:
            return _RECORDS.validate_python(dict(record))
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            raise TaskError(f"not the record of an instance: field '{field}': {first['msg']}") from error


_RECORDS = TypeAdapter(Instance)
