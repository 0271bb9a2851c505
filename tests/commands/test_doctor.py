"""The doctor finds what is wrong, says what to do about it, and is content with a sound machine."""

from __future__ import annotations

import json
import tempfile
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch

from esper.cli import main
from esper.commands import doctor
from esper.commands.doctor import TOLERANCE, compare_strategies
from esper.runs import database
from esper.tasks.registry import get_suite, suite_names
from esper.tasks.suite import Source

pytestmark = pytest.mark.landing

MOUNTS = r"""22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
31 27 0:40 / /home rw - nfs4 server:/home rw
32 27 0:41 / /mnt/a\040b rw - fuse.sshfs host: rw
33 27 0:42 / /home/me/local rw - xfs /dev/vdb rw
34 27 0:43 / /over rw - ext4 /dev/vdc rw
35 34 0:44 / /over rw - 9p host rw"""


class FakeEsper(Distribution):
    """The metadata of an Esper that needs what is not here."""

    def __init__(self, *requirements: str, origin: str | None = None) -> None:
        self._lines = [f"Requires-Dist: {requirement}" for requirement in requirements]
        self._origin = origin

    def read_text(self, filename: str) -> str | None:
        lines = [
            "Metadata-Version: 2.4",
            "Name: esper-growth",
            *self._lines,
            "Provides-Extra: ui",
            "Provides-Extra: all",
        ]
        return {"METADATA": "\n".join(lines), "direct_url.json": self._origin}.get(filename)

    def locate_file(self, path: object) -> Path:
        raise NotImplementedError


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without torch's report and the self test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "get_pretty_env_info", lambda: "PyTorch version: 2")
    monkeypatch.setattr(doctor, "compare_strategies", lambda *_: 1e-15)


def examine(capsys: pytest.CaptureFixture[str], code: int) -> dict[str, Any]:
    assert main(["doctor", "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_a_real_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    record = examine(capsys, 0)
    assert record.keys() == {"torch", "versions", "extras", "devices", "data", "runs", "problems"}
    assert record["torch"].startswith("PyTorch version: ")
    assert {"esper", "torch", "numpy"} <= record["versions"].keys()
    assert 0 <= record["devices"]["cpu"] < TOLERANCE  # on some processors they are equal to the bit
    assert record["data"].keys() == set(suite_names())
    assert record["runs"]["path"] == str(tmp_path / "runs")
    assert record["problems"] == []
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_in_one_of_the_strategies_is_noticed(monkeypatch: pytest.MonkeyPatch):
    right = torch.bmm

    def wrong(left: torch.Tensor, right_: torch.Tensor) -> torch.Tensor:
        return right(left, right_) * (1 + 1e-4)

    monkeypatch.setattr(torch, "bmm", wrong)
    monkeypatch.setattr(torch, "baddbmm", lambda bias, left, right: bias + wrong(left, right))
    assert compare_strategies(torch.device("cpu"), lambda *_: None, decisions=2) > TOLERANCE


@pytest.mark.usefixtures("quick")
class TestProblems:
    def test_without_one_all_is_well(self, capsys: pytest.CaptureFixture[str]):
        assert main(["doctor"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert "PyTorch version: 2" in lines
        assert "suite digits: shipped with scikit-learn" in lines
        assert lines[-1] == "no problems found"

    def test_an_extra_that_lacks_something_says_how_to_get_it(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ):
        origin = json.dumps({"url": "file:///home/me/my%20esper", "dir_info": {"editable": True}})
        needs = (
            "numpy",
            "no-such-thing>=2; extra == 'ui'",
            "numpy>=1; extra == 'ui'",
            "esper-growth[ui]; extra == 'all'",
        )
        monkeypatch.setattr(doctor, "distribution", lambda name: FakeEsper(*needs, origin=origin))
        record = examine(capsys, 0)
        command = "pip install -e '/home/me/my esper[ui]'"
        assert record["extras"]["ui"] == {"lacking": ["no-such-thing>=2"], "install": command}
        assert record["extras"]["all"]["lacking"] == ["no-such-thing>=2"]
        assert record["versions"].keys() == {"esper", "numpy"}
        main(["doctor"])
        assert f"extra ui: lacks no-such-thing>=2: {command}" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("needs", "problem"),
        [
            ("numpy<1.0", "is not a version Esper supports: `pip install 'numpy<1.0'`"),
            ("no-such-thing", "no-such-thing is not installed: `pip install 'no-such-thing'`"),
        ],
    )
    def test_a_core_dependency_out_of_range(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], needs: str, problem: str
    ):
        monkeypatch.setattr(doctor, "distribution", lambda name: FakeEsper(needs))
        (sentence,) = examine(capsys, 1)["problems"]
        assert sentence.endswith(problem)

    def test_an_esper_that_is_not_installed(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
        def missing(name: str) -> Distribution:
            raise PackageNotFoundError(name)

        monkeypatch.setattr(doctor, "distribution", missing)
        record = examine(capsys, 1)
        assert record["versions"] == {}
        assert "pip install -e ." in record["problems"][0]

    def test_a_device_that_fails_while_the_others_are_tested(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ):
        def compare(device: torch.device, *_: object) -> float:
            if device.type == "cuda":
                raise RuntimeError("no kernel image is available\nmore of that")
            return 1e-15

        monkeypatch.setattr(doctor, "compare_strategies", compare)
        monkeypatch.setattr(doctor, "list_devices", lambda: ("cuda:0", "cpu"))
        record = examine(capsys, 1)
        assert record["devices"] == {"cpu": 1e-15}
        assert record["problems"] == [
            "torch cannot compute on cuda:0 (no kernel image is available): use another device, or repair its driver"
        ]

    @pytest.mark.parametrize(("difference", "words"), [(0.25, "2.5e-01"), (float("nan"), "nan")])
    def test_networks_that_disagree(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], difference: float, words: str
    ):
        monkeypatch.setattr(doctor, "compare_strategies", lambda *_: difference)
        (problem,) = examine(capsys, 1)["problems"]
        assert problem.startswith(f"on cpu stacked and looped networks differ by {words}, more than 1e-06")

    def test_a_missing_data_set(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ):
        gone = Source("shipped with scikit-learn", tmp_path / "gone.csv")
        monkeypatch.setattr(type(get_suite("digits")), "source", gone)
        (problem,) = examine(capsys, 1)["problems"]
        assert problem == f"suite digits: {tmp_path}/gone.csv is missing (shipped with scikit-learn): reinstall it"

    @pytest.mark.parametrize(
        ("kind", "safe"), [("ext4", True), ("nfs4", False), ("cifs", False), ("9p", False), ("fuse.sshfs", False)]
    )
    def test_a_shared_file_system(
        self,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        kind: str,
        safe: bool,
    ):
        mounts = tmp_path / "mounts"
        mounts.write_text(f"27 1 254:0 / / rw shared:1 - {kind} /dev/vda rw\n")
        monkeypatch.setattr(database, "MOUNTS", mounts)
        record = examine(capsys, 0 if safe else 1)
        assert record["runs"]["wal_safe"] is safe
        assert [f"is on {kind}, where SQLite may lose" in problem for problem in record["problems"]] == [True] * (
            not safe
        )

    def test_elsewhere_than_on_linux_the_file_system_is_unknown(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ):
        monkeypatch.setattr(database, "MOUNTS", tmp_path / "nowhere")
        runs = examine(capsys, 0)["runs"]
        assert (runs["file_system"], runs["wal_safe"]) == (None, None)

    def test_a_folder_that_cannot_be_written(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ):
        def read_only(**options: Path) -> None:
            raise OSError(30, "Read-only file system")

        monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
        (problem,) = examine(capsys, 1)["problems"]
        where = tmp_path / "runs"
        assert (
            problem == f"no run can be written to {where} (Read-only file system): choose another folder with --run-dir"
        )

    def test_a_file_in_the_place_of_the_folder(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
        (tmp_path / "runs").write_text("")
        assert main(["doctor"]) == 1
        assert f"problem: no run can be written to {tmp_path}/runs (Not a directory)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/me/runs", "nfs4"),
        ("/home/me/local/runs", "xfs"),
        ("/mnt/a b/runs", "fuse.sshfs"),
        ("/homestead", "ext4"),
        ("/over/runs", "9p"),
    ],
)
def test_the_file_system_is_that_of_the_nearest_mount(path: str, kind: str):
    assert database.file_system(Path(path), MOUNTS) == kind
