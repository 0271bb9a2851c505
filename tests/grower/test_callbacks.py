"""Callbacks of a user's own see every turn of a grower's life, and get their state back."""

import math
from pathlib import Path
from typing import Any

import pytest

from esper.engine.engine import GrowthConfig
from esper.errors import DivergedError
from esper.grower import Decision, Ending, Grower, GrowerCallback, PrintDecisions, RunRecorder
from factories import Loop


class Diary(GrowerCallback):
    """Keeps the order of calls, and what came with them."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.decisions: list[Decision] = []
        self.stages: list[tuple[Any, Any]] = []
        """Before and after each decision."""
        self.losses: list[tuple[float, float]] = []
        """In training, and on validation data before any rollback."""
        self.growers: set[Grower] = set()
        self.ending: Ending | None = None
        self.error: Exception | None = None
        self.restored: dict[str, Any] | None = None

    def on_start(self, grower: Grower) -> None:
        assert grower.decisions == 0
        self._add("start", grower)

    def on_resume(self, grower: Grower, state: dict[str, Any] | None) -> None:
        self.restored = state
        self._add(f"resume {grower.decisions}", grower)

    def on_step_start(self, grower: Grower) -> None:
        self._add(f"step {grower.decisions}", grower)

    def on_decision(self, grower: Grower, decision: Decision) -> None:
        assert grower.decisions == decision.number
        self.decisions.append(decision)
        self.stages.append((grower.engine.applied.stages.tolist(), grower.network.table.stage.tolist()))
        training = grower.engine.assessed.training
        self.losses.append((float(training.loss[0]), float(grower.engine.assessed.before_rollback.loss[0])))
        self._add(f"decision {decision.number}", grower)

    def on_failure(self, grower: Grower, error: Exception) -> None:
        self.error = error
        self._add("failure", grower)

    def on_finish(self, grower: Grower, ending: Ending) -> None:
        self.ending = ending
        self._add("finish", grower)

    def on_close(self, grower: Grower) -> None:
        self._add("close", grower)

    def state_dict(self) -> dict[str, Any]:
        return {"calls": len(self.calls)}

    def _add(self, call: str, grower: Grower) -> None:
        self.calls.append(call)
        self.growers.add(grower)


def test_a_callback_sees_start_steps_decisions_end_and_close() -> None:
    diary = Diary()
    loop = Loop("all_at_start", callbacks=[diary])
    assert diary.calls == ["start"]
    decisions = [loop.epoch() for _ in range(3)]
    assert diary.calls[1:] == ["step 0", "decision 1", "step 1", "decision 2", "step 2", "decision 3"]
    assert diary.decisions == decisions
    before, after = diary.stages[1]
    assert diary.stages[0][1] == before != after
    assert diary.stages[2][1] == loop.grower.network.table.stage.tolist()
    ending = loop.grower.finish()
    assert diary.ending is ending
    assert ending.changes
    loop.grower.close()
    assert diary.calls[-3:] == ["step 3", "finish", "close"], "what is unfinished is refused or judged as in a step"
    assert diary.growers == {loop.grower}
    idle = Diary()
    Loop("none", callbacks=[idle]).grower.finish()
    assert idle.calls == ["start", "finish"], "where nothing is unfinished the end is not a step"


def test_a_callback_sees_why_training_stops() -> None:
    diary = Diary()
    loop = Loop("none", callbacks=[diary])
    for _ in range(3):
        loop.epoch(lambda _: math.nan)
    with pytest.raises(DivergedError) as error:
        loop.epoch(lambda _: math.nan)
    assert diary.error is error.value
    assert diary.calls[-3:] == ["decision 3", "step 3", "failure"]


class Newcomer(Diary):
    """Another kind."""


def test_its_state_comes_back_to_each_of_several_of_one_kind() -> None:
    first, second = Diary(), Diary()
    loop = Loop("all_at_start", callbacks=[first, second])
    for _ in range(4):
        loop.epoch()
    second.calls.append("one more")
    again, newcomer = [Diary(), Diary()], Newcomer()
    resumed = Loop.resume(loop.saved(), "all_at_start", callbacks=[newcomer, *again])
    assert [diary.restored for diary in again] == [{"calls": 9}, {"calls": 10}]
    assert newcomer.restored is None, "it was not there when the grower was saved"
    assert again[0].calls == ["start", "resume 4"]
    assert resumed.epoch().number == 5


def test_callbacks_are_called_in_their_order_after_those_of_run_and_verbose(tmp_path: Path) -> None:
    first, second = Diary(), Newcomer()
    grower = Loop("none", callbacks=[first, second], run=tmp_path / "run", verbose=True).grower
    assert [type(callback) for callback in grower.callbacks] == [PrintDecisions, RunRecorder, Diary, Newcomer]
    own = Loop("none", callbacks=[RunRecorder(tmp_path / "own"), PrintDecisions()]).grower
    own.step(train_loss=1.0)
    assert (tmp_path / "own" / "run.db").is_file()


def test_a_rolled_back_decision_has_what_was_measured_before() -> None:
    diary = Diary()
    loop = Loop("none", callbacks=[diary], growth=GrowthConfig())
    loop.epoch()
    loop.epoch(lambda _: math.inf)
    before, after = diary.losses
    assert diary.decisions[1].rollback is not None
    assert math.isnan(after[1]), "a model that is not finite is not measured"
    assert not math.isnan(before[1])
    assert after[0] == math.inf
