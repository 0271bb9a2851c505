"""Every kind of model in every format: which is exported, and which is refused with which sentence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import tiny_transformers
from esper.errors import EsperError
from esper.growth.attach import attach
from esper.growth.export import Format, export, make_plain
from esper.growth.probe import Arguments
from growth.growing import fossilize, random
from growth.plain_hosts import Convolutional, classifier, seeded

pytestmark = pytest.mark.landing

PROGRAMS = (Format.PT2, Format.ONNX)


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


def unfinished(out: Tensor) -> tuple[Tensor, ...]:
    """Outputs with infinities of either sign and NaN among them, as of masked logits, and one without any number."""
    first = torch.arange(3) == 0
    return out.masked_fill(first, -torch.inf), out.masked_fill(out > 0, torch.inf), out.where(first, torch.nan), out / 0


class OfOneSize(nn.Module):
    """Takes three examples and no others."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(inputs.reshape(3, 5))


class Deciding(nn.Module):
    """Looks at values."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(inputs if inputs.sum() > 0 else -inputs)


def grown(host: nn.Module, slot: str, blueprint: str, arguments: Arguments) -> nn.Module:
    model = attach(host, {slot: [blueprint]}, arguments)
    fossilize(model, slot, blueprint)
    return model.finalize()


def words(*shape: int) -> Tensor:
    return torch.randint(30, shape, generator=torch.Generator().manual_seed(1))


def bert() -> tuple[nn.Module, Arguments]:
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    arguments = {"attention_mask": mask, "input_ids": words(2, 4)}  # not in the order of the signature
    return tiny_transformers.bert(vocab_size=30).eval(), arguments


def grown_bert() -> tuple[nn.Module, Arguments]:
    model, arguments = bert()
    return grown(model, "bert.encoder.layer.0.output", "lowrank", arguments), arguments


def gpt2() -> tuple[nn.Module, Arguments]:
    model = tiny_transformers.gpt2(vocab_size=30, n_positions=8, n_layer=1).eval()
    arguments = {"input_ids": words(2, 4)}
    return grown(model, "transformer.h.0.mlp", "lowrank", arguments), arguments


def vit() -> tuple[nn.Module, Arguments]:
    return tiny_transformers.vit().eval(), {"pixel_values": random(2, 3, 8, 8)}


def t5() -> tuple[nn.Module, Arguments]:
    arguments = {"input_ids": words(2, 4), "decoder_input_ids": words(2, 3)}
    return tiny_transformers.t5(vocab_size=30).eval(), arguments


def mlp(kind: torch.dtype = torch.float32) -> tuple[nn.Module, Arguments]:
    plain = grown(classifier(), "2", "mlp", random(4, 5))
    return plain.to(kind), random(3, 5).to(kind)


def cnn(kind: torch.dtype = torch.float32) -> tuple[nn.Module, Arguments]:
    plain = grown(Convolutional(), "block", "conv3x3", random(2, 1, 4, 4))
    return plain.to(kind), random(2, 1, 4, 4).to(kind)


class Row(NamedTuple):
    make: Callable[[], tuple[nn.Module, Arguments]]
    refused: dict[Format, str] = {}
    """The sentences of formats that are refused; the others work."""
    fixed_batch: bool = False


def _all(sentence: str) -> dict[Format, str]:
    return dict.fromkeys(PROGRAMS, sentence)


ROWS = {
    "mlp": Row(mlp),
    "mlp fixed": Row(mlp, {Format.SAFETENSORS: "has only weights"}, fixed_batch=True),
    "mlp float64": Row(lambda: mlp(torch.float64), {Format.ONNX: r"uses torch.float64.*model\.float\(\)"}),
    "mlp bfloat16": Row(lambda: mlp(torch.bfloat16), {Format.ONNX: r"uses torch.bfloat16.*model\.float\(\)"}),
    "cnn": Row(cnn),
    "cnn float64": Row(lambda: cnn(torch.float64), {Format.ONNX: "uses torch.float64"}),
    "cnn bfloat16": Row(lambda: cnn(torch.bfloat16), {Format.ONNX: "uses torch.bfloat16"}),
    "bert": Row(bert),
    "bert grown": Row(grown_bert),
    "gpt2 grown": Row(gpt2),
    "vit": Row(vit),
    "t5": Row(t5),
    "dictionary": Row(lambda: (Returning(lambda out: {"logits": out, "loss": None}), random(3, 5))),
    "tuple": Row(lambda: (Returning(lambda out: (out, [out * 2, 3])), random(3, 5))),
    "infinite": Row(lambda: (Returning(unfinished), random(3, 5))),
    "dataclass": Row(lambda: (Returning(lambda out: Answer(out, "x", (out * 2,))), random(3, 5))),
    "no tensor": Row(
        lambda: (Returning(lambda out: object()), random(3, 5)),
        _all("returns a object that contains no tensor"),
    ),
    "one size": Row(
        lambda: (OfOneSize(), random(3, 5)),
        _all("cannot trace OfOneSize for any batch size .*with fixed_batch=True"),
    ),
    "one size fixed": Row(
        lambda: (OfOneSize(), random(3, 5)), {Format.SAFETENSORS: "has only weights"}, fixed_batch=True
    ),
    "deciding": Row(
        lambda: (Deciding(), random(3, 5)),
        _all(r"cannot trace Deciding \(.*, at test_export_matrix\.py:\d+\): .*export only the weights as safetensors"),
    ),
    "no word in onnx": Row(
        lambda: (Returning(lambda out: torch.linalg.svdvals(out[:, None])), random(3, 5)),
        {Format.ONNX: r"torch.onnx cannot express this model \(No ONNX function found"},
    ),
}

QUICK = {("infinite", Format.PT2)}
"""Of the cells that work, those that are no minute's matter in all."""


def cells(works: bool) -> list[Any]:
    return [
        pytest.param(
            row,
            kind,
            id=f"{name}-{kind}",
            marks=[pytest.mark.slow] if works and kind in PROGRAMS and (name, kind) not in QUICK else [],
        )
        for name, row in ROWS.items()
        for kind in Format
        if works is (kind not in row.refused)
    ]


@pytest.mark.parametrize(("row", "kind"), cells(works=True))
def test_it_is_exported(row: Row, kind: Format, tmp_path: Path) -> None:
    if kind is Format.ONNX:
        pytest.importorskip("onnxruntime")
    seeded()
    model, arguments = row.make()
    export(model, arguments, kind, tmp_path / f"net{kind.suffix}", fixed_batch=row.fixed_batch)
    assert (tmp_path / f"net{kind.suffix}").stat().st_size


@pytest.mark.parametrize(("row", "kind"), cells(works=False))
def test_it_is_refused_with_the_cause(row: Row, kind: Format, tmp_path: Path) -> None:
    if kind is Format.ONNX:
        pytest.importorskip("onnxruntime")
    seeded()
    model, arguments = row.make()
    with pytest.raises(EsperError, match=row.refused[kind]):
        export(model, arguments, kind, tmp_path / f"net{kind.suffix}", fixed_batch=row.fixed_batch)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_numbers_that_onnx_has_not_are_said_before_any_work(
    kind: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(torch.export, "export", lambda *_, **__: pytest.fail("the work has begun"))
    model, arguments = mlp()
    with pytest.raises(EsperError, match="the model uses"):
        export(model.to(kind), arguments, "onnx", tmp_path / "net.onnx")
    with pytest.raises(EsperError, match="the model uses"):
        export(model.float(), random(3, 5).to(kind), "onnx", tmp_path / "net.onnx")


def test_what_a_model_returns_becomes_pythons_own() -> None:
    one, two = torch.zeros(1), torch.zeros(2)
    assert make_plain(Answer(one, "note", (two, two))) == {"logits": one, "hidden": (two, two)}
    assert make_plain({"a": None, "b": [one, object()]}) == {"b": [one]}
    assert make_plain((one, None, {})) == (one,)
    transformers = pytest.importorskip("transformers")
    plain = make_plain(transformers.modeling_outputs.CausalLMOutputWithPast(logits=one, past_key_values=object()))
    assert type(plain) is dict
    assert plain == {"logits": one}
