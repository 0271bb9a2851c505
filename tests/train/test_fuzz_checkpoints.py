"""Whatever lies in a checkpoint's files, loading it gives a checkpoint or a CheckpointError."""

import hashlib
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from esper.errors import CheckpointError
from esper.serialization import Checkpoints
from fuzzing import Mutator, assert_legible, harmless

TENSORS = {
    "policy.weight": torch.arange(6.0).reshape(2, 3),
    "policy.mask": torch.tensor([True, False]),
    "optimizer.half": torch.ones(3, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 4),
    "updates": torch.tensor(4),
}
STATE = {"cursor": 17, "generator": {"state": 2**127 + 1, "inc": -5}, "order": [3, 1, 2], "best": 0.25, "name": "é"}
TOKENS = [
    *(b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1", b"0", b"1.0", b"true", b"null", b"9" * 30, b"9" * 5000),
    *(b"[" * 3000, b'{"a":' * 3000, b"{}", b"[]", b'""', b'"\\ud800"', b'"\\u0000"', b"\x00", b"\xff\xfe", b"\n"),
    b"\x1b[31m",
    *(b'"__metadata__":{"a":"b"},', b'"F4"', b'"C64"', b'"F8_E4M3"', b'"BOOL"', b'"I64"', b"18446744073709551616"),
    *(b'"shape":[9223372036854775807,0]', b'"data_offsets":[0,99999999999]', b"[4294967296,4294967296]", b"[0,0]"),
    *(
        b"../../../../etc/passwd",
        b"/dev/zero",
        b"cposix\nsystem\n(S'true'\ntR.",
        b"\x80\x04\x95",
        b"PK\x03\x04",
        b"\xff" * 8,
    ),
    *(b'"version":2,', b'"version":"2\\n"', b'"iteration":', b'"state":{},', b'"tensors_bytes":99999999999999999999,'),
]


class Target:
    """One checkpoint, valid at first, and ways to damage it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.checkpoints = Checkpoints(folder)
        self.checkpoints.save(1, TENSORS, STATE)
        self._tensors, self._manifest = folder / "iteration-00000001.safetensors", folder / "iteration-00000001.json"
        self.tensors, self.manifest = self._tensors.read_bytes(), self._manifest.read_bytes()
        self._header_end = 8 + int.from_bytes(self.tensors[:8], "little")
        header = self.tensors[8 : self._header_end]
        self._mutator = Mutator([self.tensors, self.manifest, header], TOKENS, seed)
        self._damages: list[Callable[[], tuple[bytes, bytes]]] = [
            self._any_manifest,
            self._any_tensors,
            self._hashed_tensors,
            self._hashed_header,
            self._hashed_entry,
            self._hashed_state,
            self._field,
        ]

    def damage(self) -> None:
        tensors, manifest = self._mutator.random.choice(self._damages)()
        self._tensors.write_bytes(tensors)
        self._manifest.write_bytes(manifest)

    def _any_manifest(self) -> tuple[bytes, bytes]:
        return self.tensors, self._mutator.mutated(self.manifest)

    def _any_tensors(self) -> tuple[bytes, bytes]:
        return self._mutator.mutated(self.tensors), self.manifest

    def _hashed_tensors(self) -> tuple[bytes, bytes]:
        return self._described(self._mutator.mutated(self.tensors))

    def _hashed_header(self) -> tuple[bytes, bytes]:
        header = self._mutator.mutated(self.tensors[8 : self._header_end])
        return self._described(len(header).to_bytes(8, "little") + header + self.tensors[self._header_end :])

    def _hashed_entry(self) -> tuple[bytes, bytes]:
        """A header that is sound JSON, but claims something odd of one tensor."""
        header = json.loads(self.tensors[8 : self._header_end])
        entry = header[self._mutator.random.choice(sorted(header))]
        odd = (
            *(-1, 0, 1, 2**31, 2**63, 2**64, 1.5, "F64", "I8", "F4", [], [0], [2**62, 0], [0, 2**63], [1] * 99),
            *([6, 0], {}),
        )
        entry[self._mutator.random.choice(("dtype", "shape", "data_offsets", "more"))] = self._mutator.random.choice(
            odd
        )
        text = json.dumps(header).encode()
        return self._described(len(text).to_bytes(8, "little") + text + self.tensors[self._header_end :])

    def _hashed_state(self) -> tuple[bytes, bytes]:
        text = self._mutator.mutated(json.dumps(STATE).encode())
        try:
            digest = hashlib.sha256(json.dumps(json.loads(text), sort_keys=True).encode()).hexdigest()
        except (ValueError, RecursionError):
            digest = "0" * 64
        mark = b'"state": "here"'
        manifest = self._edited(state="here", state_sha256=digest)
        assert mark in manifest
        return self.tensors, manifest.replace(mark, b'"state": ' + text)

    def _field(self) -> tuple[bytes, bytes]:
        name = self._mutator.random.choice(sorted(json.loads(self.manifest)))
        odd = (
            *(None, True, -1, 2, 2.0, 2**63, 2**80, 1e308, float("nan"), "2", "", "\x1b\n", [], {}, [[]]),
            *("../../x", "a" * 64),
        )
        return self.tensors, self._edited(**{name: self._mutator.random.choice(odd)})

    def _described(self, tensors: bytes) -> tuple[bytes, bytes]:
        """The tensors with a manifest that states their size and hash."""
        return tensors, self._edited(tensors_sha256=hashlib.sha256(tensors).hexdigest(), tensors_bytes=len(tensors))

    def _edited(self, **fields: Any) -> bytes:
        return json.dumps({**json.loads(self.manifest), **fields}).encode()


STAGES = {
    "is not an Esper checkpoint": "foreign",
    "has format version": "version",
    "checkpoint manifest": "manifest",
    "has the manifest of iteration": "iteration",
    "is larger than": "size",
    "its size or its hash differs": "hash",
    "its header is too long": "header's length",
    "its header is wrong": "header's fields",
    "its header does not fit its contents": "header's claims",
    "is not a safetensors file": "header's JSON",
}
"""How far a refused input got, by the sentence that refuses it; checked in this order."""


def outcome(target: Target) -> str:
    """Load what lies there: how far it got."""
    with harmless(target.folder):
        try:
            loaded = target.checkpoints.load(1)
        except CheckpointError as error:
            assert_legible(error)
            return next(stage for words, stage in STAGES.items() if words in str(error))
    assert all(isinstance(tensor, torch.Tensor) for tensor in loaded.tensors.values())
    assert sum(tensor.nbytes for tensor in loaded.tensors.values()) <= 2 * len(target.tensors) + 10_000
    assert isinstance(loaded.state, dict)
    return "loaded"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    memory = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None)).resolve()
    yield path
    shutil.rmtree(path)


@pytest.mark.landing
@pytest.mark.parametrize(("damages", "seed"), [(1500, 1), pytest.param(50_000, 2, marks=pytest.mark.slow)])
def test_any_damage_ends_in_a_checkpoint_or_a_checkpoint_error(
    damages: int, seed: int, folder: Path, count_figure: Callable[[str, int], None]
):
    reached, target = Counter[str](), Target(folder, seed)
    for _ in range(damages):
        target.damage()
        reached[outcome(target)] += 1
    assert reached.keys() == {*STAGES.values(), "loaded"}
    assert_deep(reached)
    count_figure("checkpoints fuzzed", reached.total())


def assert_deep(reached: Counter[str]) -> None:
    """Not only the hash is tested: a fair share gets past every check before the last."""
    count = reached.total()
    past_hash = sum(amount for stage, amount in reached.items() if stage.startswith("header") or stage == "loaded")
    past_header = reached["header's claims"] + reached["loaded"]
    assert past_hash > 0.3 * count
    assert past_header > 0.1 * count
    assert reached["header's claims"] > 0.02 * count
    assert reached["loaded"] > 0.05 * count
