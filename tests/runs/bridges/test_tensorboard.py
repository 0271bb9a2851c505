"""What TensorBoard reads in the folder is the run: nothing missing, nothing twice."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path

import pytest
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from esper.errors import ConfigError
from esper.runs.bridges import tensorboard
from esper.runs.bridges.bridge import Bridge
from esper.runs.bridges.tail import Figures, Tail
from esper.runs.store import RunStore
from runs.bridges.stored_run import NAN_AT, begin, end, iterate, resume


def carry(store: RunStore, destination: Path) -> int:
    folder = store.path.parent
    with Tail.open(store.path) as tail:
        to = ("tensorboard", tensorboard.open_logger)
        bridge = Bridge(*to, tail, folder, "run", {"ppo.gamma": 1.0}, str(destination))
        with closing(bridge):
            return bridge.carry()


def read(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    accumulator.Reload()
    return accumulator


def steps(accumulator: EventAccumulator, tag: str) -> list[int]:
    return [event.step for event in accumulator.Scalars(tag)]


def texts(folder: Path, tag: str) -> dict[int, str]:
    """As TensorBoard itself reads them; the plain accumulator keeps texts that are void."""
    accumulator = plugin_event_accumulator.EventAccumulator(str(folder), size_guidance={"tensors": 0})
    accumulator.Reload()
    found = [(one.step, one.tensor_proto.string_val[0].decode()) for one in accumulator.Tensors(f"{tag}/text_summary")]
    assert len(dict(found)) == len(found), "no step twice"
    return dict(found)


def test_tensorboard_reads_the_run(tmp_path: Path) -> None:
    out = tmp_path / "tb"
    with begin(tmp_path / "run.db") as store:
        for number in (1, 2, 3):
            iterate(store, number)
        end(store, 3)
        assert carry(store, out) == 3
    found = read(out)
    assert [event.value for event in found.Scalars("objective")] == pytest.approx([1 / 7, 2 / 7, 3 / 7])
    assert [event.step for event in found.Scalars("value") if math.isnan(event.value)] == [NAN_AT]
    assert [event.value for event in found.Scalars("lifecycle/germinated")] == [2, 2, 2]
    assert [event.histogram_value.num for event in found.Histograms("seed/contribution")] == [2, 2, 2]
    assert texts(out, "notes")[2] == "- rolled back 1 times: exploded\n- kl_high: the policy moved too far in 2"
    assert "| ppo.gamma | 1.0 |" in texts(out, "settings")[0]
    assert "| slots | layer0, layer1 |" in texts(out, "run")[0]
    assert "run ended after iteration 3" in texts(out, "history")[4]


def test_a_bridge_killed_in_the_middle_of_an_iteration_writes_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "tb"
    write = tensorboard.TensorBoardLogger.log_iteration

    def dying(sink: tensorboard.TensorBoardLogger, figures: Figures) -> None:
        write(sink, figures)
        if figures.number == 2:  # written, but not counted yet
            raise KeyboardInterrupt

    with begin(tmp_path / "run.db") as store:
        for number in range(1, 5):
            iterate(store, number)
        with monkeypatch.context() as patch:
            patch.setattr(tensorboard.TensorBoardLogger, "log_iteration", dying)
            with pytest.raises(KeyboardInterrupt):
                carry(store, out)
        assert steps(read(out), "objective") == [1, 2]
        carry(store, out)
        end(store, 4)
        carry(store, out)
    found = read(out)
    assert steps(found, "objective") == [1, 2, 3, 4]
    assert sorted(texts(out, "notes")) == [1, 2, 3, 4]
    assert "run ended" in texts(out, "history")[5]
    assert len(texts(out, "settings")) == 1


def test_iterations_made_anew_replace_the_first_ones(tmp_path: Path) -> None:
    out = tmp_path / "tb"
    with begin(tmp_path / "run.db") as store:
        for number in range(1, 6):
            iterate(store, number)
        carry(store, out)
        resume(store, 2)
        iterate(store, 3)
        carry(store, out)
        again = read(out)
        assert steps(again, "objective") == [1, 2, 3]
        for number in (4, 5, 6):
            iterate(store, number)
        carry(store, out)
    assert steps(read(out), "objective") == [1, 2, 3, 4, 5, 6]


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tb").mkdir()
    (tmp_path / "tb" / "thesis.txt").touch()
    with begin(tmp_path / "run.db") as store:
        iterate(store, 1)
        with pytest.raises(ConfigError, match="is not empty"):
            carry(store, tmp_path / "tb")
