"""The JSON beside a saved model's tensors: what grew where, so that the same can be built again."""

from __future__ import annotations

import hashlib
import reprlib
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, ValidationError

from esper.errors import CheckpointError
from esper.growth.model import GrowingModel
from esper.growth.seed import Seed
from esper.growth.site import Layout, Site
from esper.growth.slot import Slot
from esper.lifecycle.actions import Blend
from esper.lifecycle.rules import Isolation
from esper.parsing import parse_json
from esper.settings import Settings

FORMAT = "esper-model"
FORMAT_VERSION = 2
_READ_VERSIONS = (1, FORMAT_VERSION)
"""The first knew nothing of positions that stay apart."""
MOST_BYTES = 8 * 2**20
"""More than this is no topology."""

_Count = Annotated[int, Field(strict=True, ge=0)]
_Sizes = Annotated[tuple[_Count, ...], Field(max_length=8)]
_Name = Annotated[str, Field(max_length=1000)]


class SavedSite(Settings):
    """A `Site`."""

    layout: Layout
    width: _Count
    extent: _Sizes
    input_shape: _Sizes
    causal: bool
    apart: bool = False

    @classmethod
    def of(cls, site: Site) -> SavedSite:
        """The record of ``site``."""
        return cls(
            layout=site.layout,
            width=site.width,
            extent=site.extent,
            input_shape=site.input_shape,
            causal=site.causal,
            apart=bool(site.apart),
        )


class SavedSeed(Settings):
    """A seed, without its tensors."""

    blueprint: _Name
    blend: Literal["add", "gate", "multiply"]
    fossilized: bool
    estranged: bool
    contribution: float | None

    @classmethod
    def of(cls, seed: Seed) -> SavedSeed:
        """The record of ``seed``."""
        return cls.model_validate(
            {
                "blueprint": seed.blueprint.name,
                "blend": seed.blend.name.lower(),
                "fossilized": seed.fossilized,
                "estranged": seed.isolation is Isolation.STRAIGHT_THROUGH,
                "contribution": seed.contribution,
            }
        )

    def plant(self, slot: Slot) -> None:
        """Let such a seed live in ``slot``, with initial values that are to be replaced.

        Raises:
            UnknownBlueprintError: nobody registered the blueprint.
            SlotError: the blueprint does not fit there.
        """
        seed = slot.germinate(self.blueprint, torch.Generator().manual_seed(0), blend=Blend[self.blend.upper()])
        seed.isolation = Isolation.STRAIGHT_THROUGH if self.estranged else Isolation.NONE
        seed.fossilized, seed.contribution = self.fossilized, self.contribution


class SavedSlot(Settings):
    """A slot, and the seed that lives there, if one does."""

    name: _Name
    site: SavedSite
    blueprints: tuple[_Name, ...]
    enabled: bool
    seed: SavedSeed | None


class Topology(Settings):
    """What the JSON file says."""

    format: Literal["esper-model"] = FORMAT
    version: Literal[1, 2] = FORMAT_VERSION
    tensors_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    tensors_bytes: _Count
    slots: tuple[SavedSlot, ...]

    @classmethod
    def of(cls, model: GrowingModel, tensors: bytes) -> Topology:
        """The topology of ``model``, whose tensors file is ``tensors``."""
        slots = tuple(
            SavedSlot(
                name=slot.name,
                site=SavedSite.of(slot.site),
                blueprints=slot.blueprints,
                enabled=slot.enabled,
                seed=None if slot.seed is None else SavedSeed.of(slot.seed),
            )
            for slot in model.slots.values()
        )
        return cls(
            tensors_sha256=hashlib.sha256(tensors).hexdigest(),
            tensors_bytes=len(tensors),
            slots=slots,
        )

    @property
    def causal(self) -> bool:
        """Whether any slot may not look ahead."""
        return any(slot.site.causal for slot in self.slots)

    @property
    def apart(self) -> bool:
        """Whether positions stay apart at any slot."""
        return any(slot.site.apart for slot in self.slots)


def decode(data: bytes, path: Path) -> Topology:
    """The topology in ``data``, read from ``path``.

    Raises:
        CheckpointError: it is damaged, foreign or of another format version.
    """
    try:
        content = parse_json(data)
    except ValueError as error:
        raise CheckpointError(f"{path} is torn or corrupt: take another copy of the saved model") from error
    _check_version(content, path)
    try:
        return Topology.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise CheckpointError(
            f"{path} is corrupt at {place} ({first['msg']}): take another copy of the saved model"
        ) from error


def _check_version(content: Any, path: Path) -> None:
    match content:
        case {"format": "esper-model", "version": int(version)}:
            if version not in _READ_VERSIONS:
                raise CheckpointError(
                    f"{path} has format version {reprlib.repr(version)}, this Esper reads {FORMAT_VERSION} and older: "
                    "use the Esper that wrote it"
                )
        case _:
            raise CheckpointError(f"{path} does not describe a growing model: give a folder written by esper.save")
