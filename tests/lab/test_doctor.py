"""The doctor finds what is wrong, says what to do about it, and is content with a sound machine."""

from __future__ import annotations

import copy
import json
import tempfile
from dataclasses import astuple, replace
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path

import pytest
import torch

from esper.cli import main
from esper.lab import doctor
from esper.lab.doctor import (
    TOLERANCE,
    Device,
    Memory,
    SelfTest,
    SuiteMemory,
    examine,
    examine_folder,
    find_devices,
    installed_packages,
    network_memory,
    population_memory,
    self_test,
    suite_memory,
)
from esper.runs import database
from esper.runs.database import file_system
from esper.tasks.registry import get_suite, suite_names
from esper.tasks.suite import Source

NEEDED = Memory(1, 2, 3, 4, 5, 6, 7)
PASSED = SelfTest("cpu", 27, 26, 1e-15, True, 0.5, 1.0, "stacked")
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


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "real" not in request.fixturenames:
        monkeypatch.setattr(doctor, "self_test", lambda device: replace(PASSED, device=str(device)))
        monkeypatch.setattr(doctor, "suite_memory", lambda name, *_: SuiteMemory(name, NEEDED, {"cpu": 7}))


@pytest.fixture
def real() -> None:
    """The test wants the real self test."""


def install(monkeypatch: pytest.MonkeyPatch, esper: FakeEsper) -> None:
    monkeypatch.setattr(doctor, "distribution", lambda name: esper)


class TestPackages:
    def test_this_installation_suits(self):
        core, extras = installed_packages()
        assert {"torch", "numpy", "pydantic"} <= {one.name for one in core}
        assert all(one.fits for one in core)
        assert next(one for one in extras if one.name == "dev").lacking == ()

    def test_an_extra_that_lacks_something_says_how_to_get_it(self, monkeypatch: pytest.MonkeyPatch):
        origin = json.dumps({"url": "file:///home/me/my%20esper", "dir_info": {"editable": True}})
        needs = (
            "numpy",
            "no-such-thing>=2; extra == 'ui'",
            "numpy>=1; extra == 'ui'",
            "esper-growth[ui]; extra == 'all'",
        )
        install(monkeypatch, FakeEsper(*needs, origin=origin))
        core, (everything, ui) = installed_packages()
        assert ui.lacking == ("no-such-thing>=2",)
        assert ui.install == "pip install -e '/home/me/my esper[ui]'"
        assert everything.lacking == ui.lacking
        assert [one.name for one in core] == ["numpy"]

    def test_from_an_index_it_is_installed_by_name(self, monkeypatch: pytest.MonkeyPatch):
        install(monkeypatch, FakeEsper("nothing-of-this; extra == 'ui'"))
        _, extras = installed_packages()
        assert extras[1].install == "pip install 'esper-growth[ui]'"

    @pytest.mark.parametrize(
        ("needs", "problem"),
        [
            ("numpy<1.0", "does not suit Esper: `pip install 'numpy<1.0'`"),
            ("no-such-thing", "no-such-thing is not installed: `pip install 'no-such-thing'`"),
        ],
    )
    def test_a_core_dependency_out_of_range_is_a_problem(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, needs: str, problem: str
    ):
        install(monkeypatch, FakeEsper(needs))
        (found,) = examine(tmp_path).problems
        assert found.endswith(problem)

    def test_an_esper_that_is_not_installed_is_a_problem(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
        def missing(name: str) -> Distribution:
            raise PackageNotFoundError(name)

        monkeypatch.setattr(doctor, "distribution", missing)
        found = examine(tmp_path)
        assert found.packages == ()
        assert "pip install -e ." in found.problems[0]


class TestDevices:
    def test_without_cuda_there_is_the_cpu(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
        (cpu,) = find_devices()
        assert cpu.name == "cpu"
        assert cpu.memory is None or cpu.memory > 2**20

    def test_elsewhere_than_on_linux_memory_is_unknown(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
        monkeypatch.setattr(doctor, "MEMINFO", tmp_path / "nowhere")
        assert find_devices()[0].memory is None

    def test_a_device_that_fails_is_a_problem_and_the_others_are_tested(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ):
        def test(device: torch.device) -> SelfTest:
            if device.type == "cuda":
                raise RuntimeError("no kernel image is available\nmore of that")
            return PASSED

        monkeypatch.setattr(doctor, "self_test", test)
        broken = Device("cuda:0", "Old", 2**30)
        monkeypatch.setattr(doctor, "find_devices", lambda: (Device("cpu", "x", None), broken))
        found = examine(tmp_path)
        assert found.self_test == (PASSED,)
        assert found.problems == (
            "torch cannot compute on cuda:0 (no kernel image is available): use another device, or mend its driver",
        )


class TestSelfTest:
    @pytest.mark.usefixtures("real")
    def test_stacked_and_looped_agree_here_with_seeds_that_count(self):
        found = self_test(torch.device("cpu"))
        assert found.agrees
        assert found.seeds >= found.blended > 0
        assert found.difference is not None
        assert 0 <= found.difference < TOLERANCE  # on some processors they are equal to the bit
        assert found.faster == ("stacked" if found.stacked_seconds < found.looped_seconds else "looped")

    @pytest.mark.usefixtures("real")
    def test_a_mistake_in_one_of_them_is_noticed(self, monkeypatch: pytest.MonkeyPatch):
        real = torch.bmm

        def wrong(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return real(left, right) * (1 + 1e-4)

        monkeypatch.setattr(torch, "bmm", wrong)
        monkeypatch.setattr(torch, "baddbmm", lambda bias, left, right: bias + wrong(left, right))
        assert not self_test(torch.device("cpu")).agrees

    @pytest.mark.parametrize(("difference", "words"), [(0.25, "2.5e-01"), (None, "not finite")])
    def test_disagreement_is_a_problem(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, difference: float | None, words: str
    ):
        wrong = replace(PASSED, difference=difference, agrees=False)
        monkeypatch.setattr(doctor, "self_test", lambda device: wrong)
        (problem,) = examine(tmp_path).problems
        assert problem.startswith(f"on cpu stacked and looped networks differ by {words}, more than 1e-06")


class TestData:
    def test_every_suite_declares_where_its_data_come_from(self, tmp_path: Path):
        found = examine(tmp_path).data
        assert tuple(found) == suite_names()
        assert all(source.found for source in found.values())
        assert get_suite("digits").source.path is not None

    def test_a_missing_file_is_a_problem(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
        gone = Source("shipped with scikit-learn", tmp_path / "gone.csv")
        monkeypatch.setattr(type(get_suite("digits")), "source", gone)
        (problem,) = examine(tmp_path).problems
        assert problem == f"suite digits finds no {tmp_path}/gone.csv: reinstall what it is shipped with scikit-learn"


class TestMemory:
    def test_each_further_network_takes_as_much(self):
        suite = get_suite("tokens")
        three, network = astuple(population_memory(suite, 3)), astuple(network_memory(suite))
        assert min(network) > 0
        assert three == pytest.approx([3 * part for part in network], rel=1e-4)

    def test_activations_are_those_of_the_minibatch(self):
        usual, larger = get_suite("tokens"), copy.copy(get_suite("tokens"))
        larger.batch_size = 3 * usual.batch_size
        found, more = network_memory(usual), network_memory(larger)
        assert more.activations == pytest.approx(3 * found.activations, rel=0.01)
        assert (more.values, more.validation) == (found.values, found.validation)

    def test_what_fits_is_what_the_device_has_over_what_a_network_takes(self):
        gpu, cpu, strange = (
            Device("cuda:0", "Fast", 10 * 2**30),
            Device("cpu", "x", 2**30),
            Device("xpu:0", "xpu", None),
        )
        found = suite_memory("digits", (cpu, gpu, strange))
        total = found.network.total
        assert found.networks == {"cpu": 2**30 // total, "cuda:0": 10 * 2**30 // total}

    def test_training_and_validation_take_turns(self):
        assert NEEDED.total == 1 + 2 + 4 + 5 + max(3 + 6, 7)
        assert replace(NEEDED, validation=100).total == 1 + 2 + 4 + 5 + 100


class TestRunsFolder:
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
    def test_the_file_system_is_that_of_the_nearest_mount(self, path: str, kind: str):
        assert file_system(Path(path), MOUNTS) == kind

    @pytest.mark.parametrize(
        ("kind", "safe"), [("ext4", True), ("nfs4", False), ("cifs", False), ("9p", False), ("fuse.sshfs", False)]
    )
    def test_shared_file_systems_are_problems(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, safe: bool
    ):
        mounts = tmp_path / "mounts"
        mounts.write_text(f"27 1 254:0 / / rw shared:1 - {kind} /dev/vda rw\n")
        monkeypatch.setattr(database, "MOUNTS", mounts)
        found = examine(tmp_path / "runs")
        assert found.runs.wal_safe is safe
        assert (found.problems == ()) is safe

    def test_elsewhere_than_on_linux_it_is_unknown(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
        monkeypatch.setattr(database, "MOUNTS", tmp_path / "nowhere")
        found = examine_folder(tmp_path)
        assert (found.file_system, found.wal_safe) == (None, None)

    def test_looking_leaves_no_trace(self, tmp_path: Path):
        assert examine_folder(tmp_path / "a" / "runs").obstacle is None
        assert list(tmp_path.iterdir()) == []

    def test_a_folder_that_cannot_be_written_is_a_problem(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
        def read_only(**options: Path) -> None:
            raise OSError(30, "Read-only file system")

        monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
        (problem,) = examine(tmp_path).problems
        assert (
            problem
            == f"no run can be written to {tmp_path} (Read-only file system): choose another folder with --run-dir"
        )

    def test_a_file_in_its_place_is_a_problem(self, tmp_path: Path):
        (tmp_path / "runs").write_text("")
        assert examine_folder(tmp_path / "runs").obstacle == "Not a directory"


@pytest.mark.usefixtures("real")
def test_a_real_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    code = main(["doctor", "--json"])
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    sections = {"machine", "versions", "devices", "extras", "self_test", "data", "memory", "runs", "problems"}
    assert record.keys() == sections
    assert [one["suite"] for one in record["memory"]] == list(suite_names())
    assert all(one["networks"]["cpu"] > 0 for one in record["memory"])
    assert {"esper", "python", "torch", "numpy"} <= record["versions"].keys()
    assert record["self_test"][0]["agrees"]
    assert record["runs"]["path"] == str(tmp_path / "runs")
    assert code == (1 if record["problems"] else 0)
    assert list(tmp_path.iterdir()) == []


def test_problems_are_told_and_make_the_code_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("")
    assert main(["doctor"]) == 1
    assert f"problem: no run can be written to {tmp_path}/runs (Not a directory)" in capsys.readouterr().out
