"""A run directory may come from a stranger: reading it runs nothing, follows no link out of it and fills no memory."""

import hashlib
import json
import os
import pickle
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from esper.cli import main
from esper.config.loading import load_settings
from esper.errors import CheckpointError, ConfigError, RunError
from esper.files import UnsuitableFileError, read_bounded, write_atomically
from esper.lab.evaluate import read_behaviour
from esper.serialization import MOST_MANIFEST_BYTES, Checkpoints, decode_tensors
from esper.train.results import read_evaluation, write_results
from esper.train.settings import TrainSettings
from fuzzing import harmless
from train.results_cases import planted

STEM = "iteration-00000001"


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    found = Checkpoints(tmp_path / "checkpoints")
    found.save(1, {"x": torch.ones(2)}, {"cursor": 1})
    return found


def put(checkpoints: Checkpoints, tensors: bytes) -> None:
    """Put tensors with a manifest that vouches for them."""
    manifest = checkpoints.folder / f"{STEM}.json"
    content = json.loads(manifest.read_text())
    content.update(tensors_bytes=len(tensors), tensors_sha256=hashlib.sha256(tensors).hexdigest())
    manifest.write_text(json.dumps(content))
    (checkpoints.folder / f"{STEM}.safetensors").write_bytes(tensors)


def framed(header: str, body: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header.encode() + body


def entry(dtype: str = "F32", shape: str = "[1]", offsets: str = "[0,4]", name: str = "x") -> str:
    return f'"{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}'


class TestTensors:
    def test_a_pickle_with_a_matching_hash_is_refused_and_never_run(self, checkpoints: Checkpoints, tmp_path: Path):
        class Bomb:
            def __reduce__(self):
                return (Path.touch, (tmp_path / "exploded",))

        put(checkpoints, pickle.dumps(Bomb()))
        with pytest.raises(CheckpointError, match="is not a safetensors file"):
            checkpoints.latest()
        torch.save({"x": Bomb()}, tmp_path / "torch.pt")
        put(checkpoints, (tmp_path / "torch.pt").read_bytes())
        with pytest.raises(CheckpointError, match="is not a safetensors file"):
            checkpoints.latest()
        assert not (tmp_path / "exploded").exists()

    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"\xff" * 8,
            (2**40).to_bytes(8, "little") + b"{}",
            framed("[]"),
            framed("[" * 100_000),
            framed("{" + entry(shape="[" + "9" * 5000 + "]") + "}"),
            framed("{" + entry(offsets="[0,400]") + "}", b"1234"),
            framed("{" + entry(offsets="[4,0]") + "}", b"1234"),
            framed("{" + entry() + "," + entry(name="y") + "}", b"1234"),
            framed("{" + entry() + "," + entry() + "}", b"1234"),
            framed("{" + entry() + "}", b"12345678"),
            framed("{" + entry(dtype="F4") + "}", b"1234"),
            framed("{" + entry(dtype="object") + "}", b"1234"),
            framed("{" + entry(shape="[1.0]") + "}", b"1234"),
            framed("{" + entry(shape="[-1]") + "}", b"1234"),
            framed("{" + entry(shape="[true]") + "}", b"1234"),
            framed("{" + entry(shape="[NaN]") + "}", b"1234"),
            framed("{" + entry(shape="[9223372036854775807,0]", offsets="[0,0]") + "}"),
            framed("{" + entry(shape="[0,9223372036854775807]", offsets="[0,0]") + "}"),
            framed("{" + entry(shape=f"[{'1,' * 99}1]") + "}", b"1234"),
            framed('{"__metadata__":{"a":"b"},' + entry() + "}", b"1234"),
        ],
        ids=lambda value: "",
    )
    def test_a_header_that_lies_is_refused(self, data: bytes):
        assert list(decode_tensors(framed("{" + entry() + "}", b"1234"))) == ["x"]
        with pytest.raises(ValueError, match="."):
            decode_tensors(data)

    def test_a_file_larger_than_its_manifest_says_is_not_read(self, checkpoints: Checkpoints):
        os.truncate(checkpoints.folder / f"{STEM}.safetensors", 2**40)  # sparse: it takes no space
        with pytest.raises(CheckpointError, match="it is larger than"):
            checkpoints.load(1)


class TestManifest:
    def test_a_huge_one_is_not_read(self, checkpoints: Checkpoints):
        os.truncate(checkpoints.folder / f"{STEM}.json", 2**40)
        with pytest.raises(CheckpointError, match=f"it is larger than {MOST_MANIFEST_BYTES} bytes"):
            checkpoints.load(1)

    def test_none_is_written_that_could_not_be_read(self, checkpoints: Checkpoints):
        with pytest.raises(CheckpointError, match="keep large values as tensors"):
            checkpoints.save(2, {}, {"big": "x" * MOST_MANIFEST_BYTES})
        assert checkpoints.iterations() == [1]

    @pytest.mark.parametrize("field", ["iteration", "tensors_bytes", "version"])
    @pytest.mark.parametrize(
        "value", ["NaN", "Infinity", "1e999", "1.0", "true", "-1", "9" * 400, "9" * 5000, '"1"', "[[]]"]
    )
    def test_odd_numbers_are_refused(self, checkpoints: Checkpoints, field: str, value: str):
        path = checkpoints.folder / f"{STEM}.json"
        content = json.loads(path.read_text())
        content[field] = "here"
        path.write_text(json.dumps(content).replace('"here"', value))
        with pytest.raises(CheckpointError) as caught:
            checkpoints.load(1)
        assert len(str(caught.value)) < 600

    def test_a_key_given_twice_is_refused(self, checkpoints: Checkpoints):
        path = checkpoints.folder / f"{STEM}.json"
        path.write_text(path.read_text().replace("{", '{"iteration": 1, ', 1))
        with pytest.raises(CheckpointError, match="torn or corrupt"):
            checkpoints.load(1)


class TestFiles:
    @pytest.mark.parametrize("suffix", ["json", "safetensors"])
    @pytest.mark.parametrize(
        "replace",
        [
            lambda path: path.mkdir(),
            os.mkfifo,
            lambda path: path.symlink_to("/dev/zero"),
            lambda path: path.symlink_to(path),
            lambda path: path.symlink_to("/etc"),
        ],
        ids=["folder", "pipe", "device", "loop", "link to a folder"],
    )
    def test_what_is_no_file_is_refused_at_once(
        self, checkpoints: Checkpoints, suffix: str, replace: Callable[[Path], None]
    ):
        path = checkpoints.folder / f"{STEM}.{suffix}"
        path.unlink()
        replace(path)
        with pytest.raises(CheckpointError):
            checkpoints.latest()

    def test_names_that_are_not_ours_are_no_checkpoints(self, checkpoints: Checkpoints):
        for name in (
            "iteration-../../x.json",
            "iteration-٠٠٠٠٠٠٠٢.json",
            "iteration-2.json",
            "iteration-00000002.json\n",
        ):
            (checkpoints.folder / name.replace("/", "_")).write_text("{}")
        assert checkpoints.iterations() == [1]

    def test_a_file_that_hides_its_size_is_refused(self):
        with pytest.raises(UnsuitableFileError):
            read_bounded(Path("/proc/self/status"), 2**20)

    def test_a_write_does_not_follow_a_planted_link(self, tmp_path: Path):
        victim = tmp_path / "victim"
        victim.write_text("precious")
        (tmp_path / ".report.html.partial").symlink_to(victim)
        write_atomically(tmp_path / "report.html", "new")
        assert victim.read_text() == "precious"
        assert (tmp_path / "report.html").read_text() == "new"
        assert not (tmp_path / "report.html").is_symlink()


class TestEvaluations:
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("score", "NaN"),
            ("host_parameters", "0"),
            ("added_parameters", "9" * 400),
            ("split", '"../x"'),
            ("score", "[]"),
        ],
    )
    def test_impossible_results_are_refused(self, tmp_path: Path, field: str, value: str):
        path = tmp_path / "evaluation.json"
        write_results(path, planted({"policy": 0.5, "none": 0.4}))
        records = json.loads(path.read_text())
        assert read_evaluation(path)
        records[3][field] = "here"
        path.write_text(json.dumps(records).replace('"here"', value))
        with pytest.raises(RunError, match="is damaged"):
            read_evaluation(path)

    @pytest.mark.parametrize("kept", [lambda one: one.controller != "policy", lambda one: one.instance.endswith("1")])
    def test_results_that_cannot_be_compared_are_refused(self, tmp_path: Path, kept: Callable[..., bool]):
        results = planted({"policy": 0.5, "none": 0.4})
        odd = [one for index, one in enumerate(results) if one.controller == "none" or (index % 2 and kept(one))]
        (tmp_path / "evaluation.json").write_text(json.dumps([asdict(one) for one in odd]))
        with pytest.raises(RunError, match="did not all play the same"):
            read_evaluation(tmp_path / "evaluation.json")

    @pytest.mark.parametrize("text", ["", "[", "[" * 100_000, '{"usage": []}', "9" * 5000, "\x00", "NaN"])
    def test_odd_files_are_refused(self, tmp_path: Path, text: str):
        (tmp_path / "file.json").write_text(text)
        for read in (read_evaluation, read_behaviour):
            with pytest.raises(RunError, match="is damaged"):
                read(tmp_path / "file.json")


class TestConfig:
    @pytest.mark.parametrize(
        ("text", "words"),
        [
            (
                "\n".join(["m0: &m0 {x: 1}", *(f"m{i}: &m{i} {{<<: [*m{i - 1}, *m{i - 1}]}}" for i in range(1, 60))]),
                "`<<`",
            ),
            ("!!merge x: {seed: 1}", "`<<`"),
            ("seed: " + ":".join(["1"] * 20_000), "too long"),
            ("seed: 0x" + "f" * 6000, "too long"),
            ("seed: " + "{" * 2000, "nested too deeply"),
            ("seed: " + "9" * 300, "and below"),
            ("#" * 100_000, "larger than"),
            ("seed: !!python/name:os.system", "could not determine a constructor"),
            ('"\\e[31m": 1', "unknown key"),
            ("seed: !%1b%0a x", "could not determine a constructor"),
        ],
        ids=lambda value: "",
    )
    def test_bombs_end_in_one_line(self, tmp_path: Path, text: str, words: str):
        (tmp_path / "config.yaml").write_text(text)
        with harmless(tmp_path), pytest.raises(ConfigError, match=words) as caught:
            load_settings(TrainSettings, tmp_path / "config.yaml")
        assert str(caught.value).isprintable()

    @pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
    def test_unicode_with_a_mark_is_read(self, tmp_path: Path, encoding: str):
        (tmp_path / "config.yaml").write_bytes("seed: 5".encode(encoding))
        assert load_settings(TrainSettings, tmp_path / "config.yaml").seed == 5


@pytest.mark.parametrize(
    "path", ["nowhere", "file", "file/x", "nul\0", "../..", "", "loop", "/dev/zero", "\udcff", "x" * 5000]
)
@pytest.mark.parametrize(
    "words", ["report {}", "evaluate {}", "train --resume {}", "train --set iterations=-1 --config {}"]
)
def test_odd_paths_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, path: str
):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("loop").symlink_to("loop")
    assert main([word.format(path) for word in words.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
