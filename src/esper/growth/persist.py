"""Keep a growing model in a folder: tensors as safetensors, what grew where as JSON.

Loading runs nothing from the files. The JSON file is replaced last and says by their hash which tensors are its own, so
the folder holds the old model or the new one at any moment. Nothing else that a file says is used as a path.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field
from safetensors.torch import save as encode
from torch import Tensor, nn

from esper.config.arguments import FilePath, check_arguments
from esper.config.settings import Settings
from esper.errors import CheckpointError, EsperError, RunError, SlotError
from esper.files import TEMPORARY_SUFFIX, write_atomically
from esper.growth.frozen import hash_frozen
from esper.growth.hooks import require_attached
from esper.growth.model import MODEL_ADVICE, GrowingModel
from esper.growth.probe import Arguments, PlainModule
from esper.growth.seed import Seed
from esper.growth.site import Layout, Site
from esper.growth.slot import Slot
from esper.lifecycle.actions import Blend
from esper.serialization.state_files import Count, Manifest, StateFormat, copy_to_cpu, describe_tensors

TOPOLOGY_FILE = "model.json"
_HOST = "host."
"""Begins the state-dict keys of the host."""
_TENSORS_FILES = "tensors-*.safetensors"


@check_arguments(CheckpointError, model=MODEL_ADVICE, folder="give the path of a folder")
def save(model: GrowingModel, folder: FilePath) -> None:
    """Write host, slots and seeds into ``folder``, which is made if need be; a model saved there before is replaced.

    What is frozen is not written, only its SHA-256: `load` wants it as it was.

    Optimizers are saved as usual, by their ``state_dict``.

    Args:
        model: Attached, with whatever has grown in it.
        folder: Where `load` finds it again.

    Raises:
        CheckpointError: the model cannot be saved; what was there before is untouched.
        SlotError: a slot is not called any more, or the host is sharded; as above.
    """
    require_attached(model)
    folder = Path(folder)
    data = encode(copy_to_cpu(_tensors(model)))
    saved = Topology.of(model, data)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = _tensors_path(folder, saved.tensors_sha256)
        write_atomically(path, data)
        write_atomically(folder / TOPOLOGY_FILE, saved.encode())
        for other in (*folder.glob(_TENSORS_FILES), *folder.glob(f".{_TENSORS_FILES}{TEMPORARY_SUFFIX}")):
            if other != path:
                other.unlink(missing_ok=True)
    except (OSError, RunError) as error:
        raise CheckpointError(f"the model is not saved: {error}") from error


@check_arguments(CheckpointError, folder="give the path of a folder")
def load(folder: FilePath, host: PlainModule, example_input: Arguments) -> GrowingModel:
    """A model that computes, and goes on learning, as the one that `save` wrote.

    To go on with its optimizer, load the model, make the optimizer from its `parameter_groups`, and then load the
    optimizer's own state: the groups hold by now whatever had grown.

    Args:
        folder: Written by `save`.
        host: Built as the saved one was, with any values but for frozen parts, which must have those of then; it gets
            slots and the saved values.
        example_input: As for `attach`, of the same shape as then.

    Raises:
        CheckpointError: the folder holds no saved model, or a damaged one, or that of another host; ``host`` then has
            no slots and its own values.
    """
    source = Path(folder) / TOPOLOGY_FILE
    saved = _FORMAT.read_manifest(source)
    tensors = _FORMAT.read_tensors(_tensors_path(Path(folder), saved.tensors_sha256), saved)
    if hash_frozen(host, saved.frozen) != saved.frozen_sha256:
        raise CheckpointError(
            f"{source} tells of a host that was frozen, with other values than this one's: give the host the values "
            "that it had when what grew on it was saved"
        )
    try:
        model = _build(saved, host, example_input)
    except EsperError as error:
        raise CheckpointError(f"{source} describes a model that cannot be built here: {error}") from error
    try:
        _check_tensors(source, tensors, _tensors(model))
    except CheckpointError:
        model.release()
        raise
    model.load_state_dict(tensors, strict=False)  # checked above; what is frozen stays
    return model


def _build(saved: Topology, host: nn.Module, example_input: Arguments) -> GrowingModel:
    """A model with the slots and seeds of the saved one, and initial values."""
    offers = {one.name: one.blueprints for one in saved.slots}
    model = GrowingModel(host, offers, example_input, causal=saved.causal, apart=saved.apart, frozen=saved.frozen)
    try:
        for one in saved.slots:
            slot = model.slots[one.name]
            _check_site(one, SavedSite.of(slot.site))
            if one.seed is not None:
                one.seed.plant(slot)
            slot.enabled = one.enabled
    except EsperError:
        model.release()
        raise
    return model


def _tensors(model: GrowingModel) -> dict[str, Tensor]:
    """Whatever `load` restores, by state-dict key: of a frozen part nothing."""
    state: Mapping[str, object] = {
        name: value
        for name, value in model.state_dict().items()
        if not (name.startswith(_HOST) and model.frozen.holds(name.removeprefix(_HOST)))
    }
    other = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if other:
        raise CheckpointError(f"the model's state has {other[0]!r}, which is no tensor: only tensors can be saved")
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _check_site(slot: SavedSlot, site: SavedSite) -> None:
    if site != slot.site:
        raise CheckpointError(
            f"slot {slot.name!r} saw {slot.site.layout} {slot.site.extent} of width {slot.site.width} when it was "
            f"saved, and sees {site.layout} {site.extent} of width {site.width} now: build the host and give the "
            "example input as then"
        )


def _check_tensors(source: Path, saved: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    strange = sorted(saved.keys() ^ expected.keys())
    if strange:
        whose = "the saved model" if strange[0] in saved else "the model built here"
        raise CheckpointError(f"only {whose} has {strange[0]!r}: build the host as it was when {source} was saved")
    for name, tensor in expected.items():
        found = saved[name]
        if found.shape != tensor.shape or found.dtype != tensor.dtype:
            raise CheckpointError(
                f"{name!r} is {found.dtype} {tuple(found.shape)} in the saved model, and {tensor.dtype} "
                f"{tuple(tensor.shape)} here: build the host as it was when {source} was saved"
            )


def _tensors_path(folder: Path, sha256: str) -> Path:
    return folder / f"tensors-{sha256[:16]}.safetensors"


_Sizes = Annotated[tuple[Count, ...], Field(max_length=8)]
_Name = Annotated[str, Field(max_length=1000)]


class SavedSite(Settings):
    """A `Site`."""

    layout: Layout
    width: Count
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
    estranged: Literal[False] = False
    """Files have it since version 1: an isolation that is gone, in which a seed did not count, made it true."""
    contribution: float | None
    fixed: tuple[_Name, ...] | None = None
    """Parameters that do not learn; None: as in a fresh one."""

    @classmethod
    def of(cls, seed: Seed) -> SavedSeed:
        """The record of ``seed``."""
        return cls.model_validate(
            {
                "blueprint": seed.blueprint.name,
                "blend": seed.blend.name.lower(),
                "fossilized": seed.fossilized,
                "contribution": seed.contribution,
                "fixed": seed.fixed,
            }
        )

    def plant(self, slot: Slot) -> None:
        """Let such a seed live in ``slot``, with initial values that are to be replaced.

        Raises:
            UnknownBlueprintError: nobody registered the blueprint.
            SlotError: the blueprint does not fit there, or has no such parameter.
        """
        seed = slot.germinate(self.blueprint, torch.Generator().manual_seed(0), blend=Blend[self.blend.upper()])
        seed.fossilized, seed.contribution = self.fossilized, self.contribution
        if self.fixed is not None:
            strange = sorted(set(self.fixed) - dict(seed.named_parameters()).keys())
            if strange:
                raise SlotError(f"the seed in slot {slot.name!r} has no parameter {strange[0]!r}")
            seed.fix(self.fixed)


class SavedSlot(Settings):
    """A slot, and the seed that lives there, if one does."""

    name: _Name
    site: SavedSite
    blueprints: tuple[_Name, ...]
    enabled: bool
    seed: SavedSeed | None


class Topology(Manifest):
    """What the JSON file says. Version 1 knew nothing of positions that stay apart, 2 of frozen parts, 3 of
    parameters that do not learn."""

    format: Literal["esper-model"] = "esper-model"
    version: Literal[1, 2, 3, 4] = 4
    slots: tuple[SavedSlot, ...]
    frozen: tuple[Annotated[str, Field(max_length=1000)], ...] = ()
    frozen_sha256: str = ""

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
        frozen = model.frozen.names
        digest = hash_frozen(model.host, frozen)
        return cls(slots=slots, frozen=frozen, frozen_sha256=digest, **describe_tensors(tensors))

    @property
    def causal(self) -> bool:
        """Whether any slot may not look ahead."""
        return any(slot.site.causal for slot in self.slots)

    @property
    def apart(self) -> bool:
        """Whether positions stay apart at any slot."""
        return any(slot.site.apart for slot in self.slots)


_FORMAT = StateFormat(
    name="esper-model",
    versions=(1, 2, 3, 4),
    manifest=Topology,
    what="saved model's",
    damaged_advice=": take another copy of the saved model",
    missing_advice=": give a folder written by esper.save",
    foreign_advice="does not describe a growing model: give a folder written by esper.save",
)
