"""Growing a model of one's own needs the core alone; whatever needs an extra says in one sentence which."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from esper.cli import COMMANDS
from esper.errors import ConfigError
from esper.extras import EXTRAS
from esper.grower import config

TRAIN = EXTRAS["train"]
WITHOUT_THE_EXTRA = f"""
import sys

for name in {TRAIN!r}:
    sys.modules[name] = None
"""

WHOLE_GROW = """
import torch
from torch import nn

import esper
from esper.grower import PrintDecisions
from esper.growth.export import export

torch.manual_seed(0)
x = torch.randn(64, 8)
y = (x[:, :2].prod(1) > 0).long()


def make_host():
    return nn.Sequential(nn.Linear(8, 3), nn.ReLU(), nn.Linear(3, 2))


model = esper.attach(make_host(), {"0": ["mlp", "lowrank"]}, example_input=x[:2])
optimizer = torch.optim.AdamW(model.parameter_groups(lr=1e-2))


def learn(model, optimizer, *_):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


validation = esper.Validation("classification", [(x, y)])
grower = esper.Grower(
    model,
    optimizer,
    evaluate=validation,
    controller="all_at_start",
    horizon=8,
    callbacks=[PrintDecisions(), esper.RunRecorder("run")],
)
for _ in range(8):
    grower.step(train_loss=[learn(model, optimizer) for _ in range(40)][-1])
grower.finish()
assert model.added_parameters, "nothing grew"
print(model.summary())
looked = model.look(lambda model, batch: nn.functional.cross_entropy(model(x), y, reduction="none"), [(x, y)])
print(looked)
looked.to_svg("map.svg")
esper.save(model, "saved.safetensors")
again = esper.load("saved.safetensors", make_host(), example_input=x[:2])
plain = model.finalize()
assert torch.equal(again.eval()(x), model.eval()(x)) and torch.allclose(plain.eval()(x), model(x), atol=1e-5)
export(plain, "grown.pt2", x[:2])
print(torch.export.load("grown.pt2").module()(x[:7]).shape)

blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)))
esper.ladder(nn.Sequential(blocks, nn.Linear(8, 2)), learn, depths=[2, 4], steps=10, folder="ladder", example_input=x)

print("done")
"""


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_EXTRA + code], cwd=folder, check=False, capture_output=True, text=True
    )


@pytest.mark.landing
def test_a_whole_grow_needs_no_extra(tmp_path: Path) -> None:
    result = run(WHOLE_GROW, tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("done\n")
    assert (tmp_path / "run" / "run.db").is_file()


@pytest.mark.landing
@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
def test_a_command_without_its_extra_is_one_sentence(command: str, tmp_path: Path) -> None:
    code = f"from esper.cli import main; raise SystemExit(main({command.split()!r}))"
    result = run(code, tmp_path)
    assert result.returncode == 2
    assert re.fullmatch(
        rf"error: `esper {command}` needs gymnasium, .*, yaml: pip install .*\[train\]'.*\n", result.stderr
    )


def test_a_learned_controller_without_the_extra_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "open_policy", lambda *_: None)
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match=r"^controller 'mine', which is the run of a training, needs yaml: pip inst"):
        config.choose_controller("mine", None, None, None, None)


@pytest.mark.landing
def test_help_and_version_need_no_extra(tmp_path: Path) -> None:
    for words in (["--help"], ["--version"]):
        assert run(f"from esper.cli import main; raise SystemExit(main({words!r}))", tmp_path).returncode == 0


@pytest.mark.landing
@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("import esper.rl", r"esper\.rl needs gymnasium"),
        ("import esper; esper.train_controller", r"esper\.train needs gymnasium, .*, yaml"),
    ],
    ids=["environment", "training"],
)
def test_training_without_its_extra_is_one_sentence(code: str, sentence: str, tmp_path: Path) -> None:
    assert re.search(rf"esper\.errors\.ConfigError: {sentence}: pip install .*\[train\]'", run(code, tmp_path).stderr)


def test_the_extra_has_what_commands_ask_for() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    names = {re.match(r"[\w-]+", line)[0] for line in project["optional-dependencies"]["train"]}
    assert names == {{"sklearn": "scikit-learn", "yaml": "pyyaml"}.get(name, name) for name in TRAIN}
