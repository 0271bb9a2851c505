"""Every finished iteration crosses once, whatever dies in between."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from esper.errors import ConfigError, RunError
from esper.runs.bridges import bridge as bridges
from esper.runs.bridges.bridge import Address, Bridge, Logger, Opening, flatten
from esper.runs.bridges.tail import Figures, Tail
from esper.runs.events import RunFailed, RunStarted, StepTaken
from esper.runs.store import RunStore
from runs.bridges.stored_run import begin, end, iterate, resume


class Notebook(Logger):
    """A tool that remembers across openings, and may die before it takes an iteration."""

    def __init__(self, forgets: bool = True) -> None:
        self.address = Address("notebook", "run-1")
        self.forgets = forgets
        self.openings: list[Opening] = []
        self.taken: list[Figures] = []
        self.told: list[str] = []
        self.dies_at: int | None = None
        self.outcome: str | None = None

    def open(self, opening: Opening) -> Logger:
        self.openings.append(opening)
        return self

    def forget(self, after: int) -> bool:
        if self.forgets:
            self.taken = [figures for figures in self.taken if figures.number <= after]
        return self.forgets

    def log_iteration(self, figures: Figures) -> None:
        if figures.number == self.dies_at:
            raise KeyboardInterrupt
        self.taken.append(figures)

    def log_history(self, lines: Sequence[str], iteration: int) -> None:
        self.told = list(lines)

    def close(self, outcome: str | None) -> None:
        self.outcome = outcome

    @property
    def numbers(self) -> list[int]:
        return [figures.number for figures in self.taken]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    with begin(tmp_path / "run.db") as opened:
        yield opened


def carry(store: RunStore, notebook: Notebook, destination: str | None = None) -> int:
    """By a bridge that begins now, as a new process does."""
    with Tail.open(store.path) as tail:
        bridge = Bridge("notebook", notebook.open, tail, store.path.parent, "run", {"seed": 3}, destination)
        with closing(bridge):
            return bridge.carry()


def test_an_iteration_crosses_when_it_is_closed(store: RunStore) -> None:
    notebook = Notebook()
    iterate(store, 1)
    iterate(store, 2, closed=False)
    assert carry(store, notebook) == 1
    (first,) = notebook.taken
    assert first.scalars["objective"] == pytest.approx(1 / 7)
    assert (first.scalars["lifecycle/germinated"], first.scalars["lifecycle/pruned"]) == (2, 0)
    assert first.samples == {"episode/objective": [0.1, 0.1], "seed/contribution": [0.25, 0.25]}
    assert first.notes == ["rolled back 1 times: exploded", "kl_high: the policy moved too far in 1"]
    assert "run started after iteration 0 (esper_version 0.1.0, seed 3)" in notebook.told[0]


def test_what_precedes_the_first_iteration_crosses_with_it(store: RunStore) -> None:
    notebook = Notebook()
    store.scalars(0, {"probe/loss": 0.5})
    store.flush()
    assert carry(store, notebook) == 0
    assert notebook.openings == [], "before the first iteration the run's metadata are not complete"
    assert notebook.told == []
    iterate(store, 1)
    assert carry(store, notebook) == 2
    assert notebook.numbers == [0, 1]
    assert notebook.taken[0].scalars["probe/loss"] == 0.5


def test_an_iteration_is_whole_though_the_run_is_rewound_meanwhile(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2, 3):
        iterate(store, number)
    real = Tail.metadata

    def rewind_afterwards(tail: Tail) -> dict[str, object]:
        found = real(tail)
        store.rewind(1)
        return found

    monkeypatch.setattr(Tail, "metadata", rewind_afterwards)
    with Tail.open(store.path) as tail:
        figures = tail.figures(2)
        assert figures is not None
        assert figures.scalars["objective"] == pytest.approx(3 / 7)
        assert figures.samples["episode/objective"] == [0.3, 0.3]
        assert tail.figures(2) is None


def test_a_later_bridge_goes_on_where_the_first_one_stopped(store: RunStore) -> None:
    notebook = Notebook()
    for number in range(1, 6):
        iterate(store, number)
        if number % 2:
            carry(store, notebook)
    assert carry(store, notebook) == 0
    assert notebook.numbers == [1, 2, 3, 4, 5]
    assert [opening.after for opening in notebook.openings] == [-1, 1, 3], "where nothing is new, nothing is opened"
    assert [opening.address for opening in notebook.openings] == [None, notebook.address, notebook.address]


def test_a_bridge_that_dies_loses_nothing(store: RunStore) -> None:
    notebook = Notebook()
    for number in range(1, 5):
        iterate(store, number)
    notebook.dies_at = 3
    with pytest.raises(KeyboardInterrupt):
        carry(store, notebook)
    notebook.dies_at = None
    assert carry(store, notebook) == 2
    assert notebook.numbers == [1, 2, 3, 4]


@pytest.mark.parametrize("forgets", [True, False])
@pytest.mark.parametrize("looks_in_between", [True, False])
def test_a_rewound_run_crosses_once(store: RunStore, forgets: bool, looks_in_between: bool) -> None:
    notebook = Notebook(forgets)
    for number in range(1, 6):
        iterate(store, number)
    carry(store, notebook)
    first = list(notebook.taken)
    iterate(store, 6, closed=False)
    resume(store, 2)
    if looks_in_between:
        carry(store, notebook)
        assert notebook.numbers == ([1, 2] if forgets else [1, 2, 3, 4, 5])
    for number in range(3, 8):
        iterate(store, number)
    carry(store, notebook)
    assert notebook.numbers == [1, 2, 3, 4, 5, 6, 7]
    assert (notebook.taken[4].time == first[4].time) is not forgets, "whoever can forget has the new ones"
    assert [line.partition(" UTC: ")[2].split(" after")[0] for line in notebook.told] == ["run started", "run resumed"]


def test_a_run_that_begins_again_crosses_once(store: RunStore) -> None:
    notebook = Notebook()
    iterate(store, 1)
    carry(store, notebook)
    store.rewind(0)
    store.emit(RunStarted(iteration=0, esper_version="0.1.0", seed=3))
    iterate(store, 1)
    carry(store, notebook)
    assert notebook.numbers == [1]


def test_a_model_that_grows_alone_crosses_epoch_by_epoch(tmp_path: Path) -> None:
    notebook = Notebook()
    with RunStore.create(tmp_path / "run.db") as store:
        store.set_metadata({"command": "grow"})
        store.emit(RunStarted(iteration=0, esper_version="0.1.0", seed=3))
        for epoch in (1, 2):
            store.scalars(epoch, {"validation_loss": 1 / epoch})
            store.emit(
                StepTaken(
                    iteration=epoch,
                    episode=1,
                    environment=0,
                    step=epoch - 1,
                    op="wait",
                    loss=1.0,
                    metric=0.5,
                    objective=0.5,
                    added=0.0,
                    stages=(),
                    blueprints=(),
                    alphas=(),
                    contributions=(),
                )
            )
        store.scalars(3, {"validation_loss": 0.1})
        store.flush()
        assert carry(store, notebook) == 2
    assert [figures.scalars["validation_loss"] for figures in notebook.taken] == [1, 0.5]


@pytest.mark.parametrize("failed", [False, True])
def test_following_ends_with_the_run_when_nobody_uses_it(
    store: RunStore, monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    monkeypatch.setattr(bridges, "POLL_SECONDS", 0.0)
    notebook, shown, turns = Notebook(), list[int](), iter(range(100))

    def in_use() -> bool:
        turn = next(turns)
        if turn == 2 and failed:
            store.emit(RunFailed(iteration=1, reason="no space"))
            store.flush()
        elif turn == 2:
            end(store, 1)
        else:
            iterate(store, turn + 1)
        return turn < 4

    with (
        Tail.open(store.path) as tail,
        closing(Bridge("notebook", notebook.open, tail, store.path.parent, "run", {})) as bridge,
    ):
        bridge.follow(in_use, shown.append)
    assert notebook.numbers == [1, 2, 4, 5]
    assert shown == [1, 1, 1, 1]
    assert notebook.outcome == ("failed" if failed else "finished")


def test_a_bridge_keeps_to_its_destination(store: RunStore) -> None:
    notebook = Notebook()
    iterate(store, 1)
    carry(store, notebook)
    with pytest.raises(ConfigError, match="goes to notebook already"):
        carry(store, notebook, "elsewhere")


def test_a_damaged_cursor_is_named(store: RunStore) -> None:
    (store.path.parent / "notebook.json").write_text('{"iteration": "once"}')
    with pytest.raises(RunError, match=r"notebook\.json does not say how far"):
        carry(store, Notebook())


def test_nested_settings_get_flat_names() -> None:
    nested = {"ppo": {"gamma": 1.0, "chunk": None, "betas": [0.9, 0.999]}, "reward": [{"mode": "outcome"}], "on": True}
    assert flatten(nested) == {"ppo.gamma": 1.0, "ppo.betas": "0.9, 0.999", "reward.0.mode": "outcome", "on": True}


@pytest.mark.slow
def test_a_trainer_imports_no_tool() -> None:
    script = """
import sys
import esper.commands.bridge, esper.commands.grow, esper.commands.train
print(sorted({"tensorboardX", "tensorboard", "wandb", "mlflow"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"
