"""Save a growing model: in a folder, with tensors as safetensors and slots and seeds as JSON, or in its state dict.

Loading runs no code from the files. The JSON file is replaced last, and has the hash of the tensors, which is also in
the name of their file: the folder always has either the old model or the new one. Nothing else in a file is a path.

Trainers such as Lightning's save nothing of a model but its state dict, which holds only tensors. So what has grown is
packed into one tensor of bytes.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from math import isclose, isfinite
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from safetensors.torch import save as encode
from torch import Tensor, nn

from esper.config.arguments import FilePath, check_arguments
from esper.config.settings import Settings
from esper.errors import CheckpointError, EsperError, RunError, SlotError
from esper.files import TEMPORARY_SUFFIX, lock_folder, write_atomically
from esper.growth.hooks import hash_frozen
from esper.growth.inputs import Arguments, PlainModule
from esper.growth.links import SLOTS_PREFIX
from esper.growth.model import MODEL_ADVICE, GrowingModel, require_attached
from esper.growth.site import Layout
from esper.growth.slot import Seed
from esper.lifecycle.actions import Blend
from esper.serialization import (
    Count,
    DamagedError,
    Manifest,
    StateFormat,
    Stateful,
    copy_to_cpu,
    describe_tensors,
    pack_state,
    unpack_state,
)

TOPOLOGY_FILE = "model.json"
_HOST = "host."
"""Prefix of the state-dict keys of the host."""
_WEIGHT = ".occupant.alpha"
"""Suffix of the keys of the seeds' weights."""
_TENSORS_FILES = "tensors-*.safetensors"


@check_arguments(CheckpointError, model=MODEL_ADVICE, folder="give the path of a folder")
def save(model: GrowingModel, folder: FilePath) -> None:
    """Save host, slots and seeds in ``folder``, which is created if necessary; a model saved there is replaced.

    If several processes save into one folder, the result is the model of one of them. For frozen parts only a SHA-256
    hash is saved: `load` needs a host with the same values. Save optimizers as usual, with their ``state_dict``.

    Args:
        model: From `attach` or `load`, with any seeds.
        folder: Folder to write.

    Raises:
        CheckpointError: the model cannot be saved; a previously saved model is untouched.
        SlotError: a slot is no longer called, or the host is sharded.
    """
    require_attached(model)
    folder = Path(folder)
    data = encode(copy_to_cpu(_collect_tensors(model)))
    seeds = {
        name: SavedSeed(
            blueprint=seed.blueprint.name,
            blend=seed.blend.name.lower(),  # pyright: ignore[reportArgumentType] (pydantic checks it)
            fossilized=seed.fossilized,
            contribution=seed.contribution if isfinite(seed.contribution or 0) else None,
            fixed=seed.fixed,
        )
        for name, seed in model.seeds.items()
    }
    slots = [
        SavedSlot(
            name=slot.name,
            hidden=slot.chain[:-1],
            site=SavedSite.model_validate(slot.site, from_attributes=True),
            blueprints=slot.blueprints,
            enabled=slot.enabled,
            seed=seeds.get(slot.name),
        )
        for slot in model.slots.values()
    ]
    saved = Topology(
        slots=tuple(slots),
        frozen=model.frozen.names,
        frozen_sha256=hash_frozen(model.host, model.frozen.names),
        host=model.host_settings,
        **describe_tensors(data),
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / saved.tensors_file
        # Several processes that save into one folder take turns, so that none removes what another has just written.
        with lock_folder(folder):
            # First the tensors, in a file of a new name, then the record that refers to it; last, remove former ones.
            write_atomically(path, data)
            write_atomically(folder / TOPOLOGY_FILE, saved.model_dump_json(indent=2))
            for old in (*folder.glob(_TENSORS_FILES), *folder.glob(f".{_TENSORS_FILES}{TEMPORARY_SUFFIX}")):
                if old != path:
                    old.unlink(missing_ok=True)
    except (OSError, RunError) as error:
        raise CheckpointError(f"the model was not saved: {error}") from error


@check_arguments(CheckpointError, folder="give the path of a folder")
def load(folder: FilePath, host: PlainModule, example_input: Arguments) -> GrowingModel:
    """Load a model that `save` wrote, to use it or continue training.

    To continue with its optimizer, load the model first, make the optimizer from its `parameter_groups`, which include
    the loaded seeds, and then load the optimizer's state.

    Args:
        folder: Folder written by `save`.
        host: A model built like the saved one, which gets slots and the saved values; frozen parts must have them.
        example_input: As for `attach`, with the same shape as when it was saved.

    Raises:
        CheckpointError: the folder has no saved model, or a damaged one, or one of a different host, even by a single
            number in its configuration or modules. ``host`` is then unchanged and has no slots.
    """
    # Read and check both files, and start again if `save` replaced them meanwhile.
    source = Path(folder) / TOPOLOGY_FILE
    saved = _FORMAT.read_manifest(source)
    while True:
        try:
            tensors = _FORMAT.read_tensors(Path(folder) / saved.tensors_file, saved)
            break
        except DamagedError:
            former, saved = saved, _FORMAT.read_manifest(source)
            if saved == former:
                raise
    if hash_frozen(host, saved.frozen) != saved.frozen_sha256:
        raise CheckpointError(
            f"{source} was saved with a frozen host of different values: load those into the host first"
        )
    # Build a model with the same slots and seeds. After an error the host has no slots again.
    with torch.inference_mode(False), ExitStack() as after_error:
        try:
            offers = {record.name: record.blueprints for record in saved.slots}
            model = GrowingModel(
                host,
                offers,
                example_input,
                causal=any(record.site.causal for record in saved.slots),
                chains=[(*record.hidden, record.name) for record in saved.slots if record.hidden],
                frozen=saved.frozen,
            )
            after_error.callback(model.release)
            for record in saved.slots:
                slot = model.slots[record.name]
                before, site = record.site, SavedSite.model_validate(slot.site, from_attributes=True)
                if site != before:
                    raise CheckpointError(
                        f"slot {record.name!r} had {before.layout} {before.extent} of width {before.width} when it was "
                        f"saved, but now has {site.layout} {site.extent} of width {site.width}: use the same host and "
                        "example input"
                    )
                if record.seed is not None:
                    # Values are loaded later; structure and fixed parameters come from the record.
                    blend, generator = Blend[record.seed.blend.upper()], torch.Generator().manual_seed(0)
                    seed = slot.plant(slot.make_seed(record.seed.blueprint, generator, blend))
                    seed.fossilized, seed.contribution = record.seed.fossilized, record.seed.contribution
                    missing = sorted(set(record.seed.fixed) - dict(seed.named_parameters()).keys())
                    if missing:
                        raise SlotError(f"the seed in slot {slot.name!r} has no parameter {missing[0]!r}")
                    seed.fix_parameters(record.seed.fixed)
                slot.enabled = record.enabled
        except EsperError as error:
            raise CheckpointError(f"{source} describes a model that cannot be built here: {error}") from error
        # Names, shapes and dtypes of the tensors must match the saved ones.
        advice = f"build the host as it was when {source} was saved (a profiler may add buffers: give it a copy)"
        expected = _collect_tensors(model)
        differing = sorted(tensors.keys() ^ expected.keys())
        if differing:
            holder = "the saved model" if differing[0] in tensors else "the model built here"
            raise CheckpointError(f"only {holder} has {differing[0]!r}: {advice}")
        for name, tensor in expected.items():
            if tensors[name].shape != tensor.shape or tensors[name].dtype != tensor.dtype:
                raise CheckpointError(
                    f"{name!r} is {tensors[name].dtype} {tuple(tensors[name].shape)} in the saved model, and "
                    f"{tensor.dtype} {tuple(tensor.shape)} here: {advice}"
                )
            # Weights of seeds must be valid for `Slot.set_alpha`.
            if name.startswith(SLOTS_PREFIX) and name.endswith(_WEIGHT) and not 0 <= float(tensors[name]) <= 1:
                raise CheckpointError(
                    f"{name!r} is {float(tensors[name]):g} in the saved model, but weights of seeds are numbers from 0 "
                    f"to 1: {source} is damaged, take another copy"
                )
        # Equal tensors are not enough: the number of heads may differ, for instance.
        for place in saved.host.keys() & model.host_settings.keys():
            before, now = saved.host[place], model.host_settings[place]
            if isinstance(before, str) or isinstance(now, str):
                equal = before == now
            else:  # another device may round buffers differently
                equal = all(isclose(*pair, rel_tol=1e-2, abs_tol=1e-12) for pair in zip(before, now, strict=False))
            if not equal:
                raise CheckpointError(
                    f"{source} was saved with a host of other settings: {place!r} was {before} and is {now} here, "
                    "which would change its output: build the same host"
                )
        after_error.pop_all()
    model.load_state_dict(tensors, strict=False)  # checked above; frozen parts are not in it
    return model


def _collect_tensors(model: GrowingModel) -> dict[str, Tensor]:
    """The state dict of a model without frozen parts, which `load` gets with the host."""
    tensors: dict[str, Any] = model.state_dict()
    for name in list(tensors):
        if name.startswith(_HOST) and model.frozen.holds(name.removeprefix(_HOST)):
            del tensors[name]
        elif not isinstance(tensors[name], Tensor):
            raise CheckpointError(f"the model's state has {name!r}, which is not a tensor: only tensors can be saved")
    return tensors


_Sizes = Annotated[tuple[Count, ...], Field(max_length=8)]
_Name = Annotated[str, Field(max_length=1000)]


class SavedSite(Settings):
    layout: Layout
    width: Count
    extent: _Sizes
    input_shape: _Sizes
    causal: bool


class SavedSeed(Settings):
    blueprint: _Name
    blend: Literal["add", "gate", "multiply"]
    fossilized: bool
    contribution: Annotated[float, Field(allow_inf_nan=False)] | None
    fixed: tuple[_Name, ...]
    """Names of parameters that do not learn."""


class SavedSlot(Settings):
    name: _Name
    hidden: tuple[_Name, ...]
    """Names of the layer that computes hidden units and of the modules between it and the slot's, if units may grow."""
    site: SavedSite
    blueprints: tuple[_Name, ...]
    enabled: bool
    seed: SavedSeed | None


class Topology(Manifest):
    """The JSON file."""

    format: Literal["esper-model"] = "esper-model"
    version: Literal[7] = 7
    slots: tuple[SavedSlot, ...]
    frozen: tuple[_Name, ...]
    frozen_sha256: str
    host: dict[str, tuple[float, ...] | str]
    """Settings of the host that affect its outputs but are not tensors."""

    @property
    def tensors_file(self) -> str:
        return f"tensors-{self.tensors_sha256[:16]}.safetensors"


_FORMAT = StateFormat(
    name="esper-model",
    versions=(7,),
    manifest=Topology,
    what="saved model's",
    damaged_advice=": take another copy of the saved model",
    missing_advice=": give a folder written by esper.save",
    foreign_advice="does not describe a growing model: give a folder written by esper.save",
)


KEY = "growth"
"""The entry that a model's state dict gains."""


def describe_structure(model: GrowingModel) -> dict[str, dict[str, Any]]:
    """The modules of ``model`` by slot, as plain values: ``blueprint``, ``blend`` and ``fossilized``."""
    return {
        name: {"blueprint": seed.blueprint.name, "blend": int(seed.blend), "fossilized": seed.fossilized}
        for name, seed in model.seeds.items()
    }


def plant_structure(model: GrowingModel, structure: Mapping[str, Mapping[str, Any]]) -> None:
    """Plant the modules of ``structure`` in ``model``, and remove all others; after an error nothing has changed.

    New modules have alpha 0 and arbitrary values, which are to be loaded.
    """
    missing = [name for name in structure if name not in model.slots]
    if missing:
        raise CheckpointError(
            f"something grew in slot {missing[0]!r} when this state was saved, but the model has only "
            f"{', '.join(model.slots)}: attach the same slots"
        )
    # Make all modules before any is planted. A slot where nothing may germinate now may have one from before.
    current, seeds = describe_structure(model), model.seeds
    changed = {name: module for name, module in structure.items() if current.get(name) != module}
    for name, module in changed.items():
        seeds[name] = model.slots[name].make_seed(module["blueprint"], torch.Generator(), Blend(module["blend"]))
    replace_seeds(model, {name: seeds[name] for name in structure})
    for name, module in changed.items():
        if module["fossilized"]:
            model.slots[name].fossilize()


def replace_seeds(model: GrowingModel, seeds: Mapping[str, Seed]) -> None:
    """Replace all seeds of a model with ``seeds``, by slot, except those that stay in their slots."""
    slots = model.slots.values()
    for slot in slots:
        slot.require_not_disabled()
    former, optimizer = model.seeds, model.optimizer_link.optimizer
    moments = {} if optimizer is None else dict(optimizer.state)

    def plant_all(seeds: Mapping[str, Seed]) -> None:
        changed = [slot for slot in slots if slot.seed is not seeds.get(slot.name)]
        for slot in changed:
            slot.remove()
        for slot in changed:
            if slot.name in seeds:
                slot.plant(seeds[slot.name])

    try:
        plant_all(seeds)
    except SlotError:
        plant_all(former)
        if optimizer is not None:
            # Removed parameters have lost their moments.
            parameters = [parameter for seed in former.values() for parameter in seed.parameters()]
            optimizer.state.update({key: moments[key] for key in parameters if key in moments})
        raise


def require_structure(model: GrowingModel, structure: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse a model that does not have the modules of ``structure``."""
    current = describe_structure(model)
    for name in (*model.slots, *structure):
        if current.get(name) != structure.get(name):
            now, then = (
                "no seed"
                if module is None
                else f"a {'fossilized' if module['fossilized'] else 'live'} {module['blueprint']} "
                f"({Blend(module['blend']).name.lower()})"
                for module in (current.get(name), structure.get(name))
            )
            raise CheckpointError(
                f"slot {name!r} holds {now}, but held {then} when the grower's state was saved: restore the model first"
            )


class GrowthInStateDict:
    """Adds what has grown to ``model.state_dict()``; ``model.load_state_dict(...)`` then plants it before it loads.

    The state dict gains one tensor of bytes. A tensor that the model uses under several names is saved under the first
    one only, as files of safetensors require. Parts from `add_part`, such as a grower, are saved and loaded with the
    model, but not copied with it.
    """

    def __init__(self, model: GrowingModel) -> None:
        self._parts: dict[str, Stateful] = {}
        self._pending: dict[str, dict[str, Any]] = {}
        """Loaded states of parts that are not added yet."""
        model.register_state_dict_post_hook(self)
        model.planters.append(self._load_growth)

    def add_part(self, name: str, part: Stateful) -> None:
        """Save and load ``part`` with the model from now on; a state loaded before is restored now."""
        self._parts[name] = part
        self._load_parts()

    def _load_parts(self) -> None:
        for name in self._parts.keys() & self._pending.keys():
            self._parts[name].load_state_dict(self._pending.pop(name))

    def __call__(self, model: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
        """Add what has grown to ``state_dict``. Torch sets an attribute on hooks, so the object itself is one."""
        assert isinstance(model, GrowingModel)
        state = {
            "seeds": describe_structure(model),
            "twins": _remove_aliases(state_dict, prefix),
            "parts": {name: part.state_dict() for name, part in self._parts.items()},
        }
        state_dict[prefix + KEY] = pack_state(state)

    def _load_growth(self, model: GrowingModel, state_dict: dict[str, Tensor], prefix: str) -> None:
        packed = state_dict.pop(prefix + KEY, None)
        if packed is None:
            return
        state = unpack_state(packed)
        # Aliases back first, since torch requires every name; then modules, so that their values have a place.
        state_dict.update({prefix + alias: state_dict[prefix + name] for alias, name in state["twins"].items()})
        former = model.seeds
        plant_structure(model, state["seeds"])
        self._pending = state["parts"]
        try:
            self._load_parts()
        except Exception:
            replace_seeds(model, former)
            raise

    def __getstate__(self) -> Mapping[str, Any]:
        return {**self.__dict__, "_parts": {}, "_pending": {}}


def _remove_aliases(state_dict: dict[str, Tensor], prefix: str) -> dict[str, str]:
    """Remove all but the first name of every tensor; returns first names by removed ones, without ``prefix``."""
    first_names: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
    aliases: dict[str, str] = {}
    for name in [name for name in state_dict if name.startswith(prefix)]:
        tensor = state_dict[name]
        memory = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        # Empty tensors have no memory by which they could be recognised.
        first = first_names.setdefault(memory, name) if tensor.numel() else name
        if first != name:
            aliases[name.removeprefix(prefix)] = first.removeprefix(prefix)
            del state_dict[name]
    return aliases
