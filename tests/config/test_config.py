"""Settings come from file and overrides, and every mistake is one clear sentence."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, model_validator

from esper.config.loading import dump_settings, format_settings, load_settings
from esper.config.settings import Settings
from esper.errors import ConfigError
from esper.train.settings import TrainSettings

README = ("iterations=60", "ppo.clip=0.1")


class Isolation(StrEnum):
    NONE = "none"
    SHADOW = "shadow"


class Adam(Settings):
    kind: Literal["adam"] = "adam"
    beta: float = Field(default=0.9, ge=0, lt=1)


class Sgd(Settings):
    kind: Literal["sgd"] = "sgd"
    momentum: float = 0.9


class PPO(Settings):
    epochs: int = Field(default=4, ge=1, le=100)
    clip: float = 0.2
    optimizer: Annotated[Adam | Sgd, Field(discriminator="kind")] = Adam()

    @model_validator(mode="after")
    def _clip_suits_epochs(self) -> "PPO":
        if self.epochs > 50 and self.clip > 0.5:
            raise ValueError("more than 50 epochs need a clip of at most 0.5")
        return self


class Train(Settings):
    seed: int = 0
    name: str = "run"
    isolation: Isolation = Isolation.NONE
    ppo: PPO = PPO()
    tempos: tuple[Annotated[int, Field(gt=0)], ...] = (3, 5)
    horizon: int | Literal["auto"] = "auto"
    drift: float | None = None


class Task(Settings):
    suite: str


def load(tmp_path: Path, text: str, *overrides: str) -> Train:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return load_settings(Train, path, overrides)


def complaint(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(f"{tmp_path}/", "")


class TestMerging:
    def test_defaults_need_no_file(self):
        assert load_settings(Train, None) == Train()

    def test_an_empty_file_changes_nothing(self, tmp_path: Path):
        assert load(tmp_path, "# nothing yet\n") == Train()

    def test_the_file_wins_over_defaults_and_overrides_over_the_file(self, tmp_path: Path):
        settings = load(tmp_path, "seed: 3\nppo: {epochs: 2, clip: .1}", "ppo.epochs=7", "ppo.epochs=8", "name=x=y")
        assert settings == Train(seed=3, name="x=y", ppo=PPO(epochs=8, clip=0.1))

    def test_values_of_overrides_are_yaml(self):
        settings = load_settings(Train, None, ["tempos=[1, 2]", "drift=1e-3", "isolation=shadow", "ppo={epochs: 9}"])
        assert settings == Train(tempos=(1, 2), drift=0.001, isolation=Isolation.SHADOW, ppo=PPO(epochs=9))

    def test_a_mapping_changes_the_keys_it_names(self, tmp_path: Path):
        settings = load(tmp_path, "ppo: {epochs: 2, clip: .1}", "ppo={epochs: 7}")
        assert settings == Train(ppo=PPO(epochs=7, clip=0.1))
        assert load(tmp_path, "tempos: [1]", "tempos=[2, 3]").tempos == (2, 3)

    def test_the_example_of_the_readme_changes_two_lines(self):
        usual, found = (
            format_settings(load_settings(TrainSettings, None, given)).splitlines() for given in ((), README)
        )
        assert [(old, new) for old, new in zip(usual, found, strict=True) if old != new] == [
            ("iterations: 20", "iterations: 60"),
            ("  clip: 0.2", "  clip: 0.1"),
        ]

    def test_an_override_may_change_the_kind_of_a_union(self):
        settings = load_settings(Train, None, ["ppo.optimizer.kind=sgd", "ppo.optimizer.momentum=0.5"])
        assert settings.ppo.optimizer == Sgd(momentum=0.5)

    def test_an_override_may_go_below_an_empty_group(self, tmp_path: Path):
        assert load(tmp_path, "ppo:\n", "ppo.epochs=9").ppo.epochs == 9

    def test_an_override_does_not_leak_through_a_yaml_alias(self, tmp_path: Path):
        class Two(Settings):
            first: PPO = PPO()
            second: PPO = PPO()

        path = tmp_path / "two.yaml"
        path.write_text("first: &shared {epochs: 2}\nsecond: *shared\n")
        settings = load_settings(Two, path, ["first.epochs=3"])
        assert (settings.first.epochs, settings.second.epochs) == (3, 2)


class TestMistakes:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("ppo: {epoch: 3}", "config.yaml: unknown key `ppo.epoch`, did you mean `ppo.epochs`?"),
            ("sed: 3", "config.yaml: unknown key `sed`, did you mean `seed`?"),
            ("ppo: {zzz: 1}", "config.yaml: unknown key `ppo.zzz`, known here: clip, epochs, optimizer"),
            (
                "ppo: {optimizer: {kind: adam, bta: .5}}",
                "config.yaml: unknown key `ppo.optimizer.bta`, did you mean `ppo.optimizer.beta`?",
            ),
            ("ppo: {epochs: 0}", "config.yaml: `ppo.epochs` is 0, but must be at least 1 and at most 100"),
            ("ppo: {epochs: 101}", "config.yaml: `ppo.epochs` is 101, but must be at least 1 and at most 100"),
            (
                "ppo: {optimizer: {kind: adam, beta: 1.0}}",
                "config.yaml: `ppo.optimizer.beta` is 1.0, but must be at least 0 and below 1",
            ),
            ("tempos: [3, -1]", "config.yaml: `tempos[1]` is -1, but must be greater than 0"),
            ("isolation: shdow", "config.yaml: `isolation` is 'shdow', but must be 'none' or 'shadow'"),
            (
                "horizon: long",
                "config.yaml: `horizon` is 'long', but must be a valid integer, "
                "unable to parse string as an integer or must be 'auto'",
            ),
            ("ppo: {epochs: 60, clip: .6}", "config.yaml: `ppo`: more than 50 epochs need a clip of at most 0.5"),
            ("seed: many\nppo: {epoch: 3}", "config.yaml: unknown key `ppo.epoch`, did you mean `ppo.epochs`?"),
            ("[1, 2]", "config.yaml must hold `key: value` lines, not [1, 2]"),
            ("just words", "config.yaml must hold `key: value` lines, not 'just words'"),
            ("seed: 1\nname: [x", "config.yaml line 2, column 9: expected ',' or ']', but got '<stream end>'"),
            ("seed: 1\nseed: 2", "config.yaml line 2, column 1: key 'seed' is given twice"),
            ("seed: !!bool maybe", "config.yaml holds a value that does not fit its YAML tag: 'maybe'"),
        ],
    )
    def test_in_a_file(self, tmp_path: Path, text: str, message: str):
        assert complaint(tmp_path, text) == message

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("ppo.epoch=3", "--set ppo.epoch=3: unknown key `ppo.epoch`, did you mean `ppo.epochs`?"),
            ("ppo.epochs=0", "--set ppo.epochs=0: `ppo.epochs` is 0, but must be at least 1 and at most 100"),
            ("seed.x=1", "--set seed.x=1: `seed` is a value, it has no keys below it; give it whole"),
            ("seed", "--set seed: write it as dotted.key=value"),
            ("=3", "--set =3: write it as dotted.key=value"),
            ("ppo..epochs=3", "--set ppo..epochs=3: write it as dotted.key=value"),
        ],
    )
    def test_in_an_override(self, tmp_path: Path, override: str, message: str):
        assert complaint(tmp_path, "seed: 3", override) == message

    def test_a_missing_key(self):
        with pytest.raises(ConfigError, match="^key `suite` is missing$"):
            load_settings(Task, None)

    def test_half_a_character_in_what_a_check_says(self, tmp_path: Path):
        class Checked(Settings):
            name: Any = ""

            @model_validator(mode="after")
            def _check(self) -> "Checked":
                raise ValueError(f"nobody is called {self.name}")

        path = tmp_path / "config.yaml"
        path.write_text(r'name: "\ud800"')
        with pytest.raises(ConfigError) as caught:
            load_settings(Checked, path)
        assert str(caught.value) == r"a value of the settings is no text: 'nobody is called \ud800'"

    def test_a_missing_file(self, tmp_path: Path):
        with pytest.raises(ConfigError, match="cannot read the configuration .*: No such file"):
            load_settings(Train, tmp_path / "nowhere.yaml")

    def test_no_python_object_is_made_from_yaml(self, tmp_path: Path):
        message = complaint(tmp_path, f"name: !!python/object/apply:pathlib.Path.touch [{tmp_path / 'made'}]")
        assert "could not determine a constructor for the tag" in message
        assert not (tmp_path / "made").exists()

    @pytest.mark.parametrize("text", ["[" * 100_000, "a: &a [*a]", "when: 2001-13-45", "? [1]\n: 2", "1: 2", "=", "\0"])
    def test_odd_yaml_ends_in_a_config_error(self, tmp_path: Path, text: str):
        complaint(tmp_path, text)

    def test_a_value_that_unfolds_without_end_stays_short(self, tmp_path: Path):
        lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
        lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 40)]
        assert len(complaint(tmp_path, "\n".join([*lines, "seed: *a39"]))) < 500


class TestDumping:
    finite = st.floats(allow_nan=False)

    @given(
        st.builds(
            Train,
            seed=st.integers(),
            name=st.text(),
            isolation=st.sampled_from(Isolation),
            ppo=st.builds(PPO, epochs=st.integers(1, 50), clip=finite, optimizer=st.builds(Sgd, momentum=finite)),
            tempos=st.lists(st.integers(1), max_size=3).map(tuple),
            horizon=st.just("auto") | st.integers(),
            drift=st.none() | finite,
        )
    )
    def test_dumped_settings_load_to_an_equal_object(self, tmp_path_factory: pytest.TempPathFactory, settings: Train):
        path = tmp_path_factory.getbasetemp() / "dumped.yaml"
        dump_settings(settings, path)
        assert load_settings(Train, path) == settings

    @pytest.mark.parametrize("name", ["next\x85line", "line\u2028separator", "Überlauf", "日本"])
    def test_text_survives_whatever_its_characters(self, tmp_path: Path, name: str):
        dump_settings(Train(name=name), tmp_path / "dumped.yaml")
        assert load_settings(Train, tmp_path / "dumped.yaml").name == name


def test_settings_cannot_be_changed():
    settings: Any = Train()
    with pytest.raises(ValueError, match="frozen"):
        settings.seed = 1
