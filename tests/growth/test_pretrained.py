"""`save_pretrained` never loses what grew in silence."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tiny_transformers
from esper.errors import ExportError
from esper.growth.attach import attach
from esper.growth.model import GrowingModel
from factories import draw_normal, fossilize

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.landing

SLOT = "bert.encoder.layer.0.output"
WAYS = {
    "save_pretrained": lambda part, folder: part.save_pretrained(folder),
    "push_to_hub": lambda part, folder: part.push_to_hub(str(folder)),
}


def given() -> dict[str, Tensor]:
    return {"input_ids": torch.tensor([[1, 2, 3], [4, 5, 6]])}


def bert() -> nn.Module:
    torch.manual_seed(0)
    return tiny_transformers.bert(vocab_size=9, hidden_size=8, intermediate_size=8).eval()


def attached() -> GrowingModel:
    return attach(bert(), {SLOT: ["lowrank"]}, given())


def grown() -> GrowingModel:
    model = attached()
    fossilize(model, SLOT, "lowrank")
    return model


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "itself": lambda module: module,
    "copied": copy.deepcopy,
    "pickled": lambda module: pickle.loads(pickle.dumps(module)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("copied", COPIES)
def test_a_plain_model_and_its_parts_refuse(way: str, copied: str, tmp_path: Path) -> None:
    plain = COPIES[copied](grown().finalize())
    for part in (plain, plain.bert):
        with pytest.raises(KeyError, match=r"would lose what grew here.*esper\.save.*torch\.save\(plain\.state_dict"):
            WAYS[way](part, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("way", WAYS)
def test_a_host_refuses_until_it_is_released(way: str, tmp_path: Path) -> None:
    model = attached()
    for one in (model, copy.deepcopy(model)):
        for part in (one.host, one.host.bert):
            with pytest.raises(ExportError, match=r"would lose what grew.*esper\.save"):
                WAYS[way](part, tmp_path)
    assert not list(tmp_path.iterdir())
    model.release()
    assert "save_pretrained" not in vars(model.host)
    model.host.save_pretrained(tmp_path)
    assert (tmp_path / "config.json").exists()


def test_what_did_not_grow_is_saved_as_ever(tmp_path: Path) -> None:
    model = attached()
    plain = model.finalize()
    plain.save_pretrained(tmp_path)
    again = type(plain).from_pretrained(tmp_path)
    assert torch.equal(again(**given()).logits, model(**given()).logits)


def test_what_was_finalized_once_still_refuses_when_it_grows_again(tmp_path: Path) -> None:
    model = attach(grown().finalize(), {"classifier": ["mlp"]}, given())
    for one in (model.host, model.finalize()):
        with pytest.raises(KeyError, match="would lose what grew"):
            one.save_pretrained(tmp_path)


def test_a_host_without_such_methods_gets_none() -> None:
    model = attach(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3)), ["0"], draw_normal(4, 5))
    fossilize(model, "0", "mlp")
    assert "save_pretrained" not in vars(model.host)
    assert "save_pretrained" not in vars(model.finalize())


def trainer_for(model: nn.Module, folder: Path, save_strategy: str) -> transformers.Trainer:
    settings = transformers.TrainingArguments(
        str(folder),
        max_steps=1,
        save_steps=1,
        save_strategy=save_strategy,
        per_device_train_batch_size=2,
        remove_unused_columns=False,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    example = {"input_ids": torch.tensor([1, 2, 3]), "labels": torch.tensor(1)}
    return transformers.Trainer(model, settings, train_dataset=[example] * 8)


def test_a_trainer_trains_a_plain_model_whose_state_is_saved_by_torch(tmp_path: Path) -> None:
    model = grown()
    plain, again = model.finalize(), model.finalize()
    trainer_for(plain, tmp_path, "no").train()
    torch.save(plain.state_dict(), tmp_path / "plain.pt")
    again.load_state_dict(torch.load(tmp_path / "plain.pt", weights_only=True))
    assert torch.equal(again.eval()(**given()).logits, plain.eval()(**given()).logits)
    assert not torch.equal(again(**given()).logits, model.eval()(**given()).logits)
    with pytest.raises(KeyError, match="would lose what grew here"):
        trainer_for(plain, tmp_path, "steps").train()


def test_a_trainer_saves_a_growing_model(tmp_path: Path) -> None:
    trainer_for(grown(), tmp_path, "steps").train()
    assert (tmp_path / "checkpoint-1" / "model.safetensors").exists()
