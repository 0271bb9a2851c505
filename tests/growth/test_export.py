"""`export`: files that need no Esper compute what the model does, or are not there."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.errors import ExportError, RunError
from esper.growth.attach import attach
from esper.growth.export import export
from esper.growth.inputs import Arguments
from esper.lifecycle.actions import Blend
from factories import draw_normal, fossilize
from growth.plain_hosts import Convolutional, Tokenwise, classifier

pytestmark = pytest.mark.landing

WITHOUT_ESPER = """
import sys
sys.modules["esper"] = None  # every import of it fails
import torch
inputs, expected = torch.load(sys.argv[2], weights_only=True)
if sys.argv[1].endswith(".onnx"):
    import onnxruntime
    session = onnxruntime.InferenceSession(sys.argv[1])
    returned = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: inputs.numpy()})[0])
else:
    returned = torch.export.load(sys.argv[1]).module()(inputs)
torch.testing.assert_close(returned, expected, atol=1e-5, rtol=1e-5)
"""


def grown() -> nn.Module:
    """A classifier with two fossils, one of which reads the network's input."""
    torch.manual_seed(0)
    model = attach(classifier(), ["0", "2"], draw_normal(4, 5))
    fossilize(model, "0", "input_skip", Blend.GATE)
    fossilize(model, "2", "mlp", Blend.MULTIPLY)
    return model.finalize()


@pytest.fixture(params=[".pt2", pytest.param(".onnx", marks=pytest.mark.slow)])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == ".onnx":
        pytest.importorskip("onnxruntime")
    return tmp_path / f"net{request.param}"


def test_a_file_runs_where_esper_cannot_be_imported(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plain, inputs = grown(), draw_normal(9, 5)
    export(nn.Linear(5, 2), file.name, draw_normal(3, 5))  # replaced by the next one
    export(plain, file.name, draw_normal(1, 5))  # one example is enough
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    torch.save((inputs, plain(inputs).detach()), tmp_path / "values.pt")
    words = [sys.executable, "-c", WITHOUT_ESPER, str(file), str(tmp_path / "values.pt")]
    done = subprocess.run(words, check=False, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr


@dataclass
class Answer:
    """What some models return."""

    logits: Tensor
    note: str
    hidden: tuple[Tensor, ...] | None = None


class Returning(nn.Module):
    """Returns what ``wrapped`` makes of its logits."""

    def __init__(self, wrapped: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.head, self.wrapped = nn.Linear(5, 3), wrapped

    def forward(self, inputs: Tensor) -> Any:
        return self.wrapped(self.head(inputs))


def make_extreme(out: Tensor) -> tuple[Tensor, ...]:
    """Outputs with infinities of either sign and NaN among them, as of masked logits, and one without any number."""
    first = torch.arange(3) == 0
    return out.masked_fill(first, -torch.inf), out.masked_fill(out > 0, torch.inf), out.where(first, torch.nan), out / 0


class Both(nn.Module):
    """Two outputs by name, weights that are tied, and an argument without a batch."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.one, self.other = inner, nn.Linear(2, 2), nn.Linear(2, 2)
        self.other.weight = self.one.weight

    def forward(self, tokens: Tensor, scale: Tensor) -> dict[str, Tensor]:
        inner = self.inner(tokens, scale=scale)
        return {"one": self.one(inner), "other": self.other(inner)}


def images(kind: torch.dtype = torch.float32) -> tuple[nn.Module, Arguments]:
    model = attach(Convolutional(), ["block"], draw_normal(2, 1, 5, 6))
    fossilize(model, "block", "depthwise", Blend.GATE)
    return model.finalize().to(kind), draw_normal(2, 1, 5, 6).to(kind)


def tokens() -> tuple[nn.Module, Arguments]:
    arguments = {"scale": torch.tensor([[[2.0]]]), "tokens": draw_normal(4, 4, 5)}
    model = attach(Tokenwise(), {"first": ["attention"]}, dict(reversed(arguments.items())))
    fossilize(model, "first", "attention")
    return Both(model.finalize()), dict(reversed(arguments.items()))


def bert() -> tuple[nn.Module, Arguments]:
    tiny_transformers = pytest.importorskip("tiny_transformers")
    words = torch.randint(30, (2, 4), generator=torch.Generator().manual_seed(1))
    arguments = {"attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]), "input_ids": words}
    model = attach(
        tiny_transformers.bert(vocab_size=30).eval(), {"bert.encoder.layer.0.output": ["lowrank"]}, arguments
    )
    fossilize(model, "bert.encoder.layer.0.output", "lowrank")
    return model.finalize(), arguments  # not in the order of the signature


def gpt2() -> tuple[nn.Module, Arguments]:
    tiny_transformers = pytest.importorskip("tiny_transformers")
    words = torch.randint(30, (2, 4), generator=torch.Generator().manual_seed(1))
    model = tiny_transformers.gpt2(vocab_size=30, n_positions=8, n_layer=1).eval()
    return model, {"input_ids": words}  # returns a cache, too


EXPORTED: dict[str, Callable[[], tuple[nn.Module, Arguments]]] = {
    "images": images,
    "tokens": tokens,
    "bert": bert,
    "gpt2": gpt2,
    "dictionary": lambda: (Returning(lambda out: {"logits": out, "loss": None}), draw_normal(3, 5)),
    "tuple": lambda: (Returning(lambda out: (out, [out * 2, 3])), draw_normal(3, 5)),
    "infinite": lambda: (Returning(make_extreme), draw_normal(3, 5)),
    "dataclass": lambda: (Returning(lambda out: Answer(out, "x", (out * 2,))), draw_normal(3, 5)),
}


@pytest.mark.slow
@pytest.mark.parametrize("make", EXPORTED.values(), ids=EXPORTED)
def test_models_of_all_kinds_are_exported(make: Callable[[], tuple[nn.Module, Arguments]], file: Path) -> None:
    torch.manual_seed(0)
    model, arguments = make()
    export(model, file, arguments)
    assert file.stat().st_size


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_other_types_of_numbers_are_exported_by_torch(kind: torch.dtype, tmp_path: Path) -> None:
    model, inputs = images(kind)
    export(model, tmp_path / "net.pt2", inputs)
    torch.testing.assert_close(torch.export.load(tmp_path / "net.pt2").module()(inputs), model.eval()(inputs))


class OfOneSize(nn.Module):
    """Takes three examples and no others."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.reshape(3, 5)


class Deciding(nn.Module):
    """Looks at values."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs if inputs.sum() > 0 else -inputs


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (OfOneSize(), "cannot trace the model for any batch size .*with a fixed batch size"),
        (Deciding(), "cannot trace the model for any batch size .*torch.save"),
        (Returning(lambda out: object()), "returns no tensor"),
        (Returning(lambda out: 3), "returns no tensor"),
    ],
)
def test_what_cannot_be_exported_is_refused_with_the_cause(model: nn.Module, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=sentence):
        export(model, tmp_path / "net.pt2", draw_normal(3, 5))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", [lambda out: torch.linalg.svdvals(out[:, None]), lambda out: out.double()])
def test_what_onnx_cannot_express_or_run_is_refused(wrapped: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model = Returning(lambda out: torch.nn.functional.conv1d(wrapped(out)[:, None], wrapped(torch.ones(1, 1, 1))))
    with pytest.raises(ExportError, match="the file does not run as the model does"):
        export(model, tmp_path / "net.onnx", draw_normal(3, 5))
    assert not list(tmp_path.iterdir())


INF, NAN = torch.inf, torch.nan
RETURNED: list[tuple[list[float], list[float], bool]] = [
    ([-INF, 1.0, INF, NAN], [-INF, 1.000001, INF, NAN], True),
    ([NAN, NAN], [NAN, NAN], True),
    ([1e6, 1.0], [1e6, 2.0], True),
    ([-INF, 1.0], [-INF, 1.1], False),
    ([-INF, 1.0], [INF, 1.0], False),
    ([-INF, 1.0], [NAN, 1.0], False),
    ([2.0, 1.0], [2.0, INF], False),
    ([2.0, NAN], [NAN, 2.0], False),
    ([2.0, 1.0], [2.0], False),
]
"""What a model returns, what its file does, and whether they are the same."""


@pytest.mark.parametrize(("expected", "returned", "same"), RETURNED)
def test_a_file_with_other_outputs_is_not_left_behind(
    expected: list[float], returned: list[float], same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Constant(nn.Module):
        def __init__(self, values: list[float]) -> None:
            super().__init__()
            self.register_buffer("values", torch.tensor(values))

        def forward(self, inputs: Tensor) -> Tensor:
            return inputs[:, :1] * 0 + self.values

    written = torch.export.export(
        Constant(returned), (draw_normal(3, 5),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)
    )
    monkeypatch.setattr(torch.export, "load", lambda _: written)
    file = tmp_path / "net.pt2"
    file.write_text("what was there before")
    if same:
        export(Constant(expected), file, draw_normal(3, 5))
        return
    with pytest.raises(ExportError, match="the file does not run as the model does"):
        export(Constant(expected), file, draw_normal(3, 5))
    assert [path.name for path in tmp_path.iterdir()] == ["net.pt2"]
    assert file.read_text() == "what was there before"


def test_mistakes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.export, "export", lambda *_, **__: pytest.fail("the work has begun"))
    model, inputs, file = classifier(), draw_normal(3, 5), tmp_path / "net.pt2"
    with pytest.raises(ExportError, match=r"'net.safetensors' ends in neither .pt2 nor .onnx: .*save_model"):
        export(model, tmp_path / "net.safetensors", inputs)
    for wrong in ((inputs, True), (), draw_normal(0, 5)):
        with pytest.raises(ExportError, match="must hold tensors only, none of them empty"):
            export(model, file, wrong)
    with pytest.raises(ExportError, match="needs a first tensor"):
        export(model, file, torch.tensor(1.0))
    with pytest.raises(RunError, match=r"cannot write .*nowhere"):
        export(model, tmp_path / "nowhere" / "net.pt2", inputs)
