"""A process that computes on a GPU sets it up once: as its current device, and for the same bits every time."""

import os
from collections.abc import Iterator

import pytest
import torch

import esper
from esper.errors import ConfigError
from esper.numerics import devices
from esper.numerics.devices import CUBLAS_WORKSPACE, FIXED_WORKSPACES, describe_platform, prepare_device


@pytest.fixture(autouse=True)
def current(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The devices that were made current, on a machine that pretends to have two GPUs."""
    chosen: list[int] = []
    monkeypatch.setattr(devices, "list_devices", lambda: ("cpu", "cuda:0", "cuda:1"))
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    monkeypatch.delenv(CUBLAS_WORKSPACE, raising=False)
    settings = torch.backends.cuda.matmul, torch.backends.cudnn.rnn, torch.backends.cudnn.conv
    before = [setting.fp32_precision for setting in settings], torch.backends.cudnn.benchmark
    yield chosen
    for setting, precision in zip(settings, before[0], strict=True):
        setting.fp32_precision = precision
    torch.backends.cudnn.benchmark = before[1]
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    os.environ.pop(CUBLAS_WORKSPACE, None)


def described() -> tuple[str, str, str, bool, bool, str | None]:
    """Precisions of products, LSTMs and convolutions, whether kernels are timed or fixed, and the workspace."""
    cudnn = torch.backends.cudnn
    precisions = torch.backends.cuda.matmul.fp32_precision, cudnn.rnn.fp32_precision, cudnn.conv.fp32_precision
    fixed = torch.are_deterministic_algorithms_enabled()
    return *precisions, cudnn.benchmark, fixed, os.environ.get(CUBLAS_WORKSPACE)


@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_a_gpu_is_the_processes_own_and_computes_the_same_bits_every_time(name: str, current: list[int]) -> None:
    assert prepare_device(name, deterministic=True) == torch.device(name)
    assert current == [int(name.partition(":")[2] or 0)]
    assert described() == ("ieee", "ieee", "ieee", False, True, FIXED_WORKSPACES[0])
    prepare_device(name, deterministic=True)


def test_without_a_fixed_order_only_convolutions_lose_precision(current: list[int]) -> None:
    prepare_device("cuda:0", deterministic=False)
    assert current == [0]
    assert described() == ("ieee", "ieee", "tf32", True, False, None)
    prepare_device("cuda:0", deterministic=True)
    assert described() == ("ieee", "ieee", "ieee", False, True, FIXED_WORKSPACES[0])


@pytest.mark.parametrize("deterministic", [True, False])
def test_on_the_cpu_nothing_is_set(deterministic: bool, current: list[int]) -> None:
    before = described()
    assert prepare_device("cpu", deterministic=deterministic) == torch.device("cpu")
    assert described() == before
    assert current == []


def test_a_device_that_is_not_there_is_refused_before_anything_is_set(current: list[int]) -> None:
    before = described()
    with pytest.raises(ConfigError, match="no device 'cuda:2' on this machine"):
        prepare_device("cuda:2", deterministic=True)
    assert (described(), current) == (before, [])


def test_what_can_no_longer_be_made_deterministic_is_refused(
    monkeypatch: pytest.MonkeyPatch, current: list[int]
) -> None:
    monkeypatch.setenv(CUBLAS_WORKSPACE, ":0:0")
    with pytest.raises(ConfigError, match=r"=:0:0 cuBLAS is not deterministic: set it to :4096:8, or set determ"):
        prepare_device("cuda", deterministic=True)
    prepare_device("cuda", deterministic=False)
    monkeypatch.delenv(CUBLAS_WORKSPACE)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="has used CUDA before, and perhaps cuBLAS without"):
        prepare_device("cuda", deterministic=True)
    monkeypatch.setenv(CUBLAS_WORKSPACE, FIXED_WORKSPACES[1])
    prepare_device("cuda", deterministic=True)
    assert current == [0, 0]
    assert os.environ[CUBLAS_WORKSPACE] == FIXED_WORKSPACES[1]


def test_the_platform_names_versions_and_the_models_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"Card {index}")
    platform = describe_platform(["cuda:7", "cuda:1", "cpu"])
    assert platform["devices"] == "cpu, cuda:1 (Card 1), cuda:7"  # the last belongs to another machine
    assert platform["torch"] == torch.__version__
    assert platform["esper"] == esper.__version__
    assert describe_platform(["cuda"])["devices"] == "cuda (Card 0)"
