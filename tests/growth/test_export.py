"""`export`: files that need no Esper compute what the model does, or are not there."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from safetensors.torch import save as encode
from torch import Tensor, nn

from esper.errors import ExportError, RunError
from esper.growth import export as exporting
from esper.growth import reloading
from esper.growth.attach import attach
from esper.growth.export import Format, Inputs, export, verify
from esper.growth.persist import save
from esper.growth.reloading import collect_tensors
from esper.lifecycle.actions import Blend
from growth.growing import fossilize, random
from growth.plain_hosts import Convolutional, Tokenwise, classifier, seeded

pytestmark = pytest.mark.landing

NAMES = {Format.PT2: "net.pt2", Format.ONNX: "net.onnx", Format.SAFETENSORS: "net.safetensors"}


@pytest.fixture(scope="module")
def plain() -> nn.Module:
    """A classifier with two fossils, one of which reads the network's input."""
    seeded()
    model = attach(classifier(), ["0", "2"], random(4, 5))
    fossilize(model, "0", "input_skip", Blend.GATE)
    fossilize(model, "2", "mlp", Blend.MULTIPLY)
    return model.finalize()


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("kind", Format)
def test_every_format_is_written_once_it_has_proved_itself(
    kind: Format, plain: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind is Format.ONNX:
        pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    export(plain, random(1, 5), kind, NAMES[kind])  # a single example does as well, and so does a relative path
    assert names_in(tmp_path) == {NAMES[kind]}
    inputs = random(9, 5)
    returned = by_hand(kind, tmp_path / NAMES[kind], plain, inputs)
    torch.testing.assert_close(returned, plain(inputs), atol=1e-5, rtol=1e-5)


def by_hand(kind: Format, file: Path, plain: nn.Module, inputs: Tensor) -> Tensor:
    """What a user of the file would compute with it."""
    match kind:
        case Format.PT2:
            return torch.export.load(file).module()(inputs)
        case Format.ONNX:
            session = pytest.importorskip("onnxruntime").InferenceSession(file)
            return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: inputs.numpy()})[0])
        case Format.SAFETENSORS:
            assert classes_of(file)["2"] == "torch.nn.modules.linear.Linear"
            assert load_file(file).keys() == plain.state_dict().keys()
            plain.load_state_dict(load_file(file))
            return plain(inputs)


def classes_of(file: Path) -> dict[str, str]:
    with safe_open(file, "pt") as opened:
        return json.loads(opened.metadata()["classes"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", Format)
def test_images_and_keywords_and_several_outputs_are_exported(kind: Format, tmp_path: Path) -> None:
    seeded()
    images = attach(Convolutional(), ["block"], random(2, 1, 5, 6))
    fossilize(images, "block", "depthwise", Blend.GATE)
    export(images.finalize(), random(2, 1, 5, 6), kind, tmp_path / NAMES[kind])
    arguments = {"tokens": random(2, 4, 5), "scale": random(2, 1, 1)}
    tokens = attach(Tokenwise(), {"first": ["attention"]}, arguments)
    fossilize(tokens, "first", "attention")
    export(Both(tokens.finalize()), arguments, kind, tmp_path / NAMES[kind])
    assert names_in(tmp_path) == {NAMES[kind]}


class Both(nn.Module):
    """Two outputs by name, and weights that are tied."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.one, self.other = nn.Linear(2, 2), nn.Linear(2, 2)
        self.other.weight = self.one.weight

    def forward(self, tokens: Tensor, scale: Tensor) -> dict[str, Tensor]:
        inner = self.inner(tokens, scale=scale)
        return {"one": self.one(inner), "other": self.other(inner)}


def test_a_file_that_holds_something_else_is_not_left_behind(
    plain: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(model: nn.Module, path: Path) -> None:
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.mul_(1.001)
        path.write_bytes(encode(model.state_dict()))

    monkeypatch.setattr(exporting, "write_weights", write)
    (tmp_path / "net.safetensors").write_text("what was there before")
    with pytest.raises(ExportError, match="differs from the model's tensors"):
        export(plain, random(4, 5), "safetensors", tmp_path / "net.safetensors")
    assert names_in(tmp_path) == {"net.safetensors"}
    assert (tmp_path / "net.safetensors").read_text() == "what was there before"


INF, NAN = torch.inf, torch.nan
RETURNED: list[tuple[list[float], list[float], bool]] = [
    ([-INF, 1.0, INF, NAN], [-INF, 1.000001, INF, NAN], True),
    ([NAN, NAN], [NAN, NAN], True),
    ([1e6, 1.0], [1e6, 2.0], True),
    ([-INF, 1.0], [-INF, 1.1], False),
    ([-INF, 1.0], [INF, 1.0], False),
    ([-INF, 1.0], [NAN, 1.0], False),
    ([-INF, 1.0], [-1e38, 1.0], False),
    ([2.0, 1.0], [2.0, INF], False),
    ([2.0, 1.0], [2.0, NAN], False),
    ([2.0, NAN], [NAN, 2.0], False),
]
"""What a model returns, what its file does, and whether they are the same."""


@pytest.mark.parametrize("kind", [Format.PT2, Format.ONNX])
@pytest.mark.parametrize(("expected", "returned", "same"), RETURNED)
def test_a_file_returns_what_the_model_does_with_infinities_at_the_same_places(
    kind: Format,
    expected: list[float],
    returned: list[float],
    same: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        Path(words[-1]).write_bytes(encode({"0": torch.tensor(returned)}))
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    with nullcontext() if same else pytest.raises(ExportError, match="by more than .*, or are infinite or NaN"):
        verify(kind, tmp_path / NAMES[kind], Inputs.from_arguments(random(3, 5)), [torch.tensor(expected)])


def test_a_file_that_needs_more_than_torch_is_refused(tmp_path: Path) -> None:
    double = torch.library.custom_op(
        "of_this_test::double", lambda x: 2 * x, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    double.register_fake(torch.empty_like)

    class Own(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return double(inputs)

    with pytest.raises(ExportError, match="the pt2 file does not run without Esper"):
        export(Own(), random(3, 5), "pt2", tmp_path / "net.pt2")
    assert not names_in(tmp_path)


def test_where_files_are_run_esper_cannot_be_imported() -> None:
    program = "import reloading\ntry: reloading.main('', '', 'none', '')\nexcept FileNotFoundError: import esper.errors"
    folder = Path(reloading.__file__).parent
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, cwd=folder)
    assert "ModuleNotFoundError" in done.stderr


class Deciding(nn.Module):
    """Looks at values."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs if inputs.sum() > 0 else -inputs


def test_mistakes_are_named(plain: nn.Module, tmp_path: Path) -> None:
    inputs = random(3, 5)
    with pytest.raises(ExportError, match="format is 'onyx': give 'pt2', 'onnx' or 'safetensors'"):
        export(plain, inputs, "onyx", tmp_path / "net")
    for kind, name in NAMES.items():
        ending = Path(name).suffix
        with pytest.raises(ExportError, match=rf"needs a file name that ends in \{ending}, not 'net'"):
            export(plain, inputs, kind, tmp_path / "net")
    with pytest.raises(ExportError, match="holds a bool"):
        export(plain, (inputs, True), "pt2", tmp_path / "net.pt2")
    with pytest.raises(ExportError, match="needs a first tensor"):
        export(plain, torch.tensor(1.0), "pt2", tmp_path / "net.pt2")


@pytest.mark.parametrize("kind", Format)
def test_a_missing_folder_is_said_before_any_work(
    kind: Format, plain: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy, "deepcopy", lambda _: pytest.fail("the work has begun"))
    with pytest.raises(RunError, match="there is no folder .*nowhere"):
        export(plain, random(3, 5), kind, tmp_path / "nowhere" / NAMES[kind])


def test_files_beside_a_saved_model_are_untouched(tmp_path: Path) -> None:
    model = attach(classifier(), ["0"], random(4, 5))
    save(model, tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    export(model.finalize(), random(4, 5), "safetensors", tmp_path / "model.safetensors")
    assert {path: path.read_bytes() for path in before} == before


def test_an_export_replaces_an_earlier_one(plain: nn.Module, tmp_path: Path) -> None:
    file = tmp_path / "net.safetensors"
    export(nn.Linear(5, 2), random(3, 5), "safetensors", file)
    export(plain, random(3, 5), "safetensors", file)
    assert names_in(tmp_path) == {"net.safetensors"}
    assert load_file(file).keys() == plain.state_dict().keys()
    assert classes_of(file)[""].endswith("Sequential")


def test_weights_alone_need_no_model_that_can_be_traced(tmp_path: Path) -> None:
    model = nn.Sequential(Deciding(), nn.Linear(5, 2).to(torch.bfloat16), nn.BatchNorm1d(2).double())
    model[1].bias.data[0] = torch.nan
    export(model, random(3, 5), "safetensors", tmp_path / "net.safetensors")
    returned = load_file(tmp_path / "net.safetensors")
    assert {name: tensor.dtype for name, tensor in returned.items()} == {
        name: tensor.dtype for name, tensor in model.state_dict().items()
    }


def test_random_inputs_have_the_range_of_the_example() -> None:
    words = torch.tensor([[3, 7], [7, 9]])
    drawn = Inputs.from_arguments({"words": words, "scale": torch.full((2, 1), 5.0), "shift": torch.ones(3)}).draw(
        50, torch.Generator().manual_seed(0)
    )
    assert drawn.keywords["words"].shape == (50, 2)
    assert {tuple(row) for row in drawn.keywords["words"].tolist()} == {(3, 7), (7, 9)}
    assert torch.equal(drawn.keywords["scale"], torch.full((50, 1), 5.0))
    assert drawn.keywords["shift"].shape == (3,)


def test_outputs_are_found_wherever_they_are() -> None:
    one, two = torch.zeros(1), torch.zeros(2)
    assert collect_tensors({"a": one, "b": [(two, None)]}) == [one, two]
