"""What is set per head or per operation, is set one by one or all at once, by override and by file."""

from pathlib import Path

import pytest

from esper.config.loading import dump_settings, load_settings
from esper.config.settings import Settings
from esper.control.policy import PolicySettings
from esper.errors import ConfigError
from esper.lifecycle.actions import Head, Op, PerHead
from esper.rl.ppo import PPOSettings

PER_HEAD = [
    (model, name)
    for model in (PPOSettings, PolicySettings)
    for name, field in model.model_fields.items()
    if field.annotation is PerHead
]
HEADS = [head.name.lower() for head in Head]
NUMBER = 0.125


def with_one(model: type[Settings], name: str, leaf: str) -> Settings:
    """The defaults, but for one leaf."""
    group = getattr(model(), name).model_copy(update={leaf: NUMBER})
    return model().model_copy(update={name: group})


def test_floors_of_entropy_and_probability_are_per_head() -> None:
    assert [name for _, name in PER_HEAD] == ["entropy_start", "entropy_floor", "probability_floor"]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(("model", "name"), PER_HEAD)
def test_one_head_is_set_alone(model: type[Settings], name: str, head: str, tmp_path: Path) -> None:
    expected = with_one(model, name, head)
    assert expected != model()
    assert load_settings(model, None, [f"{name}.{head}={NUMBER}"]) == expected
    path = tmp_path / "config.yaml"
    path.write_text(f"{name}: {{{head}: {NUMBER}}}\n")
    assert load_settings(model, path) == expected


@pytest.mark.parametrize(("model", "name"), PER_HEAD)
def test_one_number_sets_all_heads(model: type[Settings], name: str, tmp_path: Path) -> None:
    settings = load_settings(model, None, [f"{name}={NUMBER}"])
    assert getattr(settings, name) == PerHead.fill(NUMBER)
    dump_settings(settings, tmp_path / "config.yaml")
    assert load_settings(model, tmp_path / "config.yaml") == settings


@pytest.mark.parametrize("op", [op.name.lower() for op in Op])
def test_one_operations_prior_is_set_alone(op: str) -> None:
    assert load_settings(PolicySettings, None, [f"op_prior.{op}={NUMBER}"]) == with_one(PolicySettings, "op_prior", op)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("ppo.entropy_floor=-1", r"`ppo\.entropy_floor\.op` is -1, but must be at least 0"),
        ("ppo.entropy_floor.slots=1", r"unknown key `ppo\.entropy_floor\.slots`, did you mean .*slot"),
        ("policy.probability_floor.slot=0.7", r"`policy\.probability_floor`: 0\.7 for slot leaves nothing to choose"),
        ("policy.op_prior=[1.5, 0, 0, 0, 1, -2]", r"`policy\.op_prior` is \[1\.5.*must be a mapping of wait"),
        ("policy.op_prior.trim=1", r"unknown key `policy\.op_prior\.trim`"),
        ("ppo.surrogate=choices", r"`ppo\.surrogate` is 'choices', but must be 'joint' or 'factored'"),
    ],
)
def test_mistakes_are_named(override: str, sentence: str) -> None:
    class Tree(Settings):
        ppo: PPOSettings = PPOSettings()
        policy: PolicySettings = PolicySettings(advice=None)

    with pytest.raises(ConfigError, match=sentence):
        load_settings(Tree, None, [override])
