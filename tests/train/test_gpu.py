"""Runs on a GPU: they repeat themselves, and go on on the CPU."""

import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from gpu import needs_gpu
from train.runs import at, ignore, resumed, short_suite, started, tiny


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    with short_suite():
        yield
    torch.use_deterministic_algorithms(False)


@needs_gpu
@pytest.mark.parametrize("suite", ["short", "mnist1d_conv", "images"])
def test_a_run_repeats_itself_to_the_last_bit(suite: str, tmp_path: Path) -> None:
    """To be run by `make gpu`, as cuBLAS has to be set up before anything computes."""
    found: list[dict[str, torch.Tensor]] = []
    for name in "ab":
        settings = tiny("iterations=2", "shards=2", "devices=cuda", f"suite={suite}")
        with started(tmp_path / name, settings) as running:
            running.train(ignore)
            found.append({name: value.cpu() for name, value in running.learner.state_tensors().items()})
    assert [name for name, value in found[0].items() if not torch.equal(value, found[1][name])] == []


@needs_gpu
@pytest.mark.parametrize("words", [["bf16=true"], ["deterministic=false"], ["ppo.bf16=true"], ["networks_per_pass=3"]])
def test_other_ways_to_compute_learn_as_well(words: list[str], tmp_path: Path) -> None:
    with started(tmp_path, tiny("iterations=1", "shards=2", "devices=cuda", *words)) as running:
        running.train(ignore)
        assert all(torch.isfinite(value).all() for value in running.learner.state_tensors().values())


@needs_gpu
def test_a_run_that_was_cut_goes_on(tmp_path: Path) -> None:
    settings = tiny("iterations=2", "shards=1", "devices=cuda")
    with started(tmp_path, settings) as running, pytest.raises(KeyboardInterrupt):
        running.train(at(1, partial(signal.raise_signal, signal.SIGINT)))
    with resumed(tmp_path) as running:
        numbers = list[int]()
        running.train(lambda iteration: numbers.append(iteration.number))
        assert numbers == [2]
