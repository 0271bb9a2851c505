"""`export`: files that need no Esper compute what the model does, or are not there."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from safetensors.torch import save as encode
from torch import Tensor, nn

from esper.errors import ExportError, RunError
from esper.growth.attach import attach
from esper.growth.export import Format, export, formats
from esper.growth.export.exporting import verify
from esper.growth.export.formats import write_source
from esper.growth.export.reloading import collect_tensors
from esper.growth.export.tracing import Inputs, trace_model
from esper.growth.persist import save
from esper.lifecycle.actions import Blend
from growth.growing import fossilize, random
from growth.plain_hosts import Convolutional, Tokenwise, classifier, seeded

NAMES = {Format.PT2: "net.pt2", Format.ONNX: "net.onnx", Format.SAFETENSORS: "net.safetensors", Format.PYTHON: "net.py"}
FILES = {
    Format.PT2: {"net.pt2"},
    Format.ONNX: {"net.onnx"},
    Format.SAFETENSORS: {"net.safetensors", "net.structure.json"},
    Format.PYTHON: {"net.py", "net.weights.safetensors"},
}


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
    assert names_in(tmp_path) == FILES[kind]
    inputs = random(9, 5)
    found = by_hand(kind, tmp_path / NAMES[kind], plain, inputs)
    torch.testing.assert_close(found, plain(inputs), atol=1e-5, rtol=1e-5)


def by_hand(kind: Format, file: Path, plain: nn.Module, inputs: Tensor) -> Tensor:
    """What a user of the file would compute with it."""
    match kind:
        case Format.PT2:
            return torch.export.load(file).module()(inputs)
        case Format.ONNX:
            session = pytest.importorskip("onnxruntime").InferenceSession(file)
            return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: inputs.numpy()})[0])
        case Format.SAFETENSORS:
            classes = json.loads(file.with_suffix(".structure.json").read_text())["classes"]
            assert classes["2"] == "torch.nn.modules.linear.Linear"
            assert load_file(file).keys() == plain.state_dict().keys()
            plain.load_state_dict(load_file(file))
            return plain(inputs)
        case Format.PYTHON:
            words = [sys.executable, "-c", "import net, sys, torch; torch.save(net.load()(torch.load('in')), 'out')"]
            torch.save(inputs, file.parent / "in")
            subprocess.run(words, check=True, cwd=file.parent)
            return torch.load(file.parent / "out")


@pytest.mark.slow
@pytest.mark.parametrize("kind", Format)
def test_images_and_keywords_and_several_outputs_are_exported(kind: Format, tmp_path: Path) -> None:
    seeded()
    images = attach(Convolutional(), ["block"], random(2, 1, 5, 6))
    fossilize(images, "block", "depthwise", Blend.GATE)
    export(images.finalize(), random(2, 1, 5, 6), kind, tmp_path / NAMES[kind])
    given = {"tokens": random(2, 4, 5), "scale": random(2, 1, 1)}
    tokens = attach(Tokenwise(), {"first": ["attention"]}, given)
    fossilize(tokens, "first", "attention")
    export(Both(tokens.finalize()), given, kind, tmp_path / NAMES[kind])
    assert names_in(tmp_path) == FILES[kind]


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


def test_source_names_the_submodules_and_leaves_nothing_of_esper_in_the_code(plain: nn.Module) -> None:
    text = write_source(trace_model(plain.eval(), Inputs.of(random(3, 5))), "Sequential")
    assert "# 2: Linear" in text
    assert "assert" not in text
    assert "esper" not in text
    compile(text, "model.py", "exec")


def altered(writer: Callable[..., None]) -> Callable[..., None]:
    """Writes the file of a model whose weights are a little off."""

    def write(model: nn.Module, *where: Any) -> None:
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.mul_(1.001)
        writer(model, *where)

    return write


@pytest.mark.parametrize("kind", [Format.SAFETENSORS, pytest.param(Format.PYTHON, marks=pytest.mark.slow)])
def test_a_file_that_computes_something_else_is_not_left_behind(
    kind: Format, plain: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(formats.WRITERS, kind, altered(formats.WRITERS[kind]))
    (tmp_path / NAMES[kind]).write_text("what was there before")
    with pytest.raises(ExportError, match=r"off by \d\.?\d*e?-?\d* where 1e-05 is allowed|holds another '0.bias'"):
        export(plain, random(4, 5), kind, tmp_path / NAMES[kind])
    assert names_in(tmp_path) == {NAMES[kind]}
    assert (tmp_path / NAMES[kind]).read_text() == "what was there before"


INF, NAN = torch.inf, torch.nan
NOT_FINITE: list[tuple[list[float], list[float], str]] = [
    ([-INF, 1.0, INF, NAN], [-INF, 1.000001, INF, NAN], ""),
    ([NAN, NAN], [NAN, NAN], ""),
    ([-INF, 1.0], [-INF, 1.1], "off by 0.1 where"),
    ([-INF, 1.0], [INF, 1.0], "infinite or NaN in other places"),
    ([-INF, 1.0], [NAN, 1.0], "infinite or NaN in other places"),
    ([-INF, 1.0], [-1e38, 1.0], "infinite or NaN in other places"),
    ([2.0, 1.0], [2.0, INF], "infinite or NaN in other places"),
    ([2.0, 1.0], [2.0, NAN], "infinite or NaN in other places"),
    ([2.0, NAN], [NAN, 2.0], "infinite or NaN in other places"),
]
"""What a model returns, what its file does, and the sentence about it; none where they are the same."""


@pytest.mark.parametrize("kind", [kind for kind in Format if kind is not Format.SAFETENSORS])
@pytest.mark.parametrize(("expected", "returned", "sentence"), NOT_FINITE)
def test_what_is_not_finite_is_so_in_the_file_at_the_same_places(
    kind: Format,
    expected: list[float],
    returned: list[float],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        Path(words[-1]).write_bytes(encode({"0": torch.tensor(returned)}))
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ExportError, match=sentence) if sentence else nullcontext():
        verify(kind, tmp_path / NAMES[kind], Inputs.of(random(3, 5)), [torch.tensor(expected)], tmp_path)


def test_a_file_that_needs_esper_is_refused(plain: nn.Module, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("import esper\n")
    inputs = Inputs.of(random(3, 5))
    with pytest.raises(ExportError, match="does not run without Esper.*No module named 'esper'"):
        verify(Format.PYTHON, tmp_path / "net.py", inputs, [], tmp_path)


class Deciding(nn.Module):
    """Looks at values."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs if inputs.sum() > 0 else -inputs


def test_mistakes_are_named(plain: nn.Module, tmp_path: Path) -> None:
    inputs = random(3, 5)
    with pytest.raises(ExportError, match="format is 'onyx': give one of pt2, onnx, safetensors, python"):
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


def test_no_two_formats_write_one_file(plain: nn.Module, tmp_path: Path) -> None:
    assert sum(map(len, FILES.values())) == len(set.union(*FILES.values()))
    with pytest.raises(ExportError, match=r"ends in \.weights\.safetensors is that of a python export's second file"):
        export(plain, random(3, 5), "safetensors", tmp_path / "net.weights.safetensors")


def test_files_beside_a_saved_model_are_untouched(tmp_path: Path) -> None:
    model = attach(classifier(), ["0"], random(4, 5))
    save(model, tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    export(model.finalize(), random(4, 5), "safetensors", tmp_path / "model.safetensors")
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("kind", [kind for kind in Format if len(FILES[kind]) > 1])
def test_a_second_file_of_another_origin_is_never_replaced(kind: Format, plain: nn.Module, tmp_path: Path) -> None:
    (beside,) = FILES[kind] - {NAMES[kind]}
    (tmp_path / beside).write_text("mine")
    with pytest.raises(ExportError, match=f"{beside} is there already without {NAMES[kind]}"):
        export(plain, random(3, 5), kind, tmp_path / NAMES[kind])
    assert names_in(tmp_path) == {beside}
    assert (tmp_path / beside).read_text() == "mine"


def test_a_second_export_of_one_format_replaces_both_files_of_the_first(plain: nn.Module, tmp_path: Path) -> None:
    export(nn.Linear(5, 2), random(3, 5), "safetensors", tmp_path / "net.safetensors")
    export(plain, random(3, 5), "safetensors", tmp_path / "net.safetensors")
    assert names_in(tmp_path) == FILES[Format.SAFETENSORS]
    assert load_file(tmp_path / "net.safetensors").keys() == plain.state_dict().keys()
    classes = json.loads((tmp_path / "net.structure.json").read_text())["classes"]
    assert classes[""].endswith("Sequential")


def test_weights_alone_need_no_model_that_can_be_traced(tmp_path: Path) -> None:
    model = nn.Sequential(Deciding(), nn.Linear(5, 2).to(torch.bfloat16), nn.BatchNorm1d(2).double())
    model[1].bias.data[0] = torch.nan
    export(model, random(3, 5), "safetensors", tmp_path / "net.safetensors")
    found = load_file(tmp_path / "net.safetensors")
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        name: tensor.dtype for name, tensor in model.state_dict().items()
    }


def test_random_inputs_have_the_range_of_the_example() -> None:
    words = torch.tensor([[3, 7], [7, 9]])
    drawn = Inputs.of({"words": words, "scale": torch.full((2, 1), 5.0), "shift": torch.ones(3)}).draw(
        50, torch.Generator().manual_seed(0)
    )
    assert drawn.keywords["words"].shape == (50, 2)
    assert {tuple(row) for row in drawn.keywords["words"].tolist()} == {(3, 7), (7, 9)}
    assert torch.equal(drawn.keywords["scale"], torch.full((50, 1), 5.0))
    assert drawn.keywords["shift"].shape == (3,)


def test_outputs_are_found_wherever_they_are() -> None:
    one, two = torch.zeros(1), torch.zeros(2)
    assert collect_tensors({"a": one, "b": [(two, None)]}) == [one, two]
