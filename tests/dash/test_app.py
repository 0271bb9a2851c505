"""What the dashboard's server answers."""

import json
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from dash.planted_run import BASELINES, FAMILIES, Plan, plant
from esper.dash.app import Access, dashboard
from esper.dash.pages import PAGE, late_level
from esper.dash.run_view import DEPTH, RunFinder
from esper.errors import RunError
from esper.runs.reader import RunReader
from esper.runs.run_directory import RunDirectory
from esper.train.results import write_results
from train import results_cases

PLAN = Plan(networks=6, slots=2, steps=12)
VIEWS = (
    "/api/runs",
    "/api/population?run=run",
    "/api/network?run=run&environment=1",
    "/api/look?run=run&episode=1&environment=1&step=1",
    "/api/interactions?run=run",
    "/api/learning?run=run",
    "/api/compare?run=run",
    "/api/events?run=run",
    "/api/events?run=run&important=1",
)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    plant(folder / "run", PLAN)
    return folder


def client(folder: Path) -> TestClient:
    return TestClient(dashboard(RunFinder((folder,)), Access("127.0.0.1")), base_url="http://127.0.0.1")


def get(folder: Path, path: str) -> Any:
    answer = client(folder).get(path)
    assert answer.status_code == 200, answer.text
    return json.loads(answer.text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def test_runs_their_learning_and_their_comparison(planted: Path):
    (run,) = get(planted, "/api/runs")["runs"]
    assert (run["name"], run["state"], run["done"], run["total"]) == ("run", "finished", 2, 2)
    assert (run["metric"], run["value"], run["suite"], run["seed"]) == ("J", pytest.approx(0.57), "tokens", 0)
    found = get(planted, "/api/learning?run=run")
    assert (found["iterations"], found["baselines"]) == ([1, 2], BASELINES)
    assert found["series"]["probe_score"] == pytest.approx([0.58, 0.59])
    assert [one["iteration"] for one in found["anomalies"]] == [1, 2]
    run, gone = get(planted, "/api/compare?run=run&run=gone")["runs"]
    assert (run["values"], run["probe"]["iteration"]) == (pytest.approx([0.56, 0.57]), 2)
    assert "no run" in gone["error"]


def test_a_population_is_that_of_the_newest_episode_unless_another_is_asked_for(planted: Path):
    newest = get(planted, "/api/population?run=run")
    assert newest["episode"] == {"number": 2, "first": 1, "last": 2}
    assert [network["environment"] for network in newest["networks"]] == list(range(PLAN.networks))
    assert newest["networks"][1]["family"] == FAMILIES[1]
    assert newest["networks"][1]["rollbacks"] == 1
    assert len(newest["networks"][0]["steps"]) == PLAN.steps
    assert get(planted, "/api/population?run=run&episode=1")["episode"]["number"] == 1


def test_a_network_is_told_in_full_and_its_seeds_live_as_the_view_of_the_store_says(planted: Path):
    found = get(planted, "/api/network?run=run&environment=1&episode=1")
    assert len(found["decisions"]) == PLAN.steps
    assert {one["environment"] for one in found["decisions"]} == {1}
    assert [seed["outcome"] for seed in found["seeds"]] == ["fossilized", "fossilized"]
    assert found["looks"] == list(range(PLAN.steps))
    assert (len(found["rollbacks"]), found["started"]["family"]) == (1, FAMILIES[1])
    columns = ("slot", "blueprint", "germinated", "blended", "held", "fossilized", "pruned", "outcome", "cause")
    columns += ("contribution", "error", "price", "threshold")
    with RunReader.open(planted / "run" / "run.db") as reader:
        stored = reader.rows(
            f"SELECT {', '.join(columns)} FROM seeds WHERE episode = 1 AND environment = 1 ORDER BY germinated"
        )
    assert [tuple(seed.get(column) for column in columns) for seed in found["seeds"]] == stored


def test_what_the_policy_saw_is_there_of_watched_networks_only(planted: Path):
    found = get(planted, "/api/look?run=run&episode=1&environment=1&step=3")
    assert found["look"]["step"] == 3
    assert found["choices"]["op"][0] == "wait"
    assert found["choices"]["blend"] == ["add", "gate", "multiply"]
    assert get(planted, "/api/look?run=run&episode=1&environment=5&step=3")["look"] is None


def test_interactions_are_those_of_the_last_probe_up_to_an_episode(planted: Path):
    newest, first = get(planted, "/api/interactions?run=run"), get(planted, "/api/interactions?run=run&episode=1")
    assert (newest["iteration"], first["iteration"]) == (2, 1)
    assert newest["slots"] == PLAN.slot_names
    assert [len(network["modules"]) for network in newest["networks"]] == [0, 1, 2, 2, 2]
    network = newest["networks"][2]
    assert network["modules"][1] == {"slot": 1, "blueprint": PLAN.blueprint(2, 1), "value": pytest.approx(0.18)}
    assert network["pairs"] == [{"first": 0, "second": 1, "interaction": pytest.approx(-0.05)}]
    assert first["networks"][2]["modules"][1]["value"] == pytest.approx(0.08)


def test_where_no_interaction_was_measured_is_told_from_where_no_probe_was_played(tmp_path: Path):
    store = plant(tmp_path / "run", Plan(networks=1, slots=1, steps=1, iterations=1))
    with closing(sqlite3.connect(store)) as connection, connection:
        connection.execute("DELETE FROM events WHERE type = 'interactions_measured'")
    older = get(tmp_path, "/api/interactions?run=run")
    assert (older["iteration"], older["networks"]) == (1, [])
    with closing(sqlite3.connect(store)) as connection, connection:
        connection.execute("DELETE FROM events WHERE type = 'policy_probed'")
    unprobed = get(tmp_path, "/api/interactions?run=run")
    assert (unprobed["iteration"], unprobed["networks"]) == (None, [])


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("$.modules[0].slot", 7),
        ("$.modules[0].slot", -1),
        ("$.modules[0].slot", 1),
        ("$.modules[0].value", {"<b>": 1}),
        ("$.modules", 3),
        ("$.pairs[0].interaction", "much"),
        ("$.pairs[0].third", 1),
    ],
)
def test_damaged_interactions_are_refused_in_a_sentence(tmp_path: Path, path: str, value: Any):
    store = plant(tmp_path / "run", Plan(networks=1, slots=2, steps=1, iterations=1))
    with closing(sqlite3.connect(store)) as connection, connection:
        connection.execute(
            "UPDATE events SET payload = json_set(payload, ?, json(?)) "
            "WHERE type = 'interactions_measured' AND json_array_length(payload, '$.pairs')",
            (path, json.dumps(value)),
        )
    answer = client(tmp_path).get("/api/interactions?run=run")
    assert answer.status_code == 404
    assert "damaged" in answer.json()["error"]


@pytest.mark.parametrize(
    "content",
    [None, "", "[]", '{"heldout": {}}', '{"elsewhere": {}}', "NaN", "[" * 100_000],
    ids=lambda content: str(content)[:20],
)
def test_an_evaluation_without_readable_verdicts_says_what_writes_them(tmp_path: Path, content: str | None):
    plant(tmp_path / "run", PLAN)
    run = RunDirectory(tmp_path / "run")
    write_results(run.evaluation, results_cases.planted({"policy": 0.7, "none": 0.5}))
    if content is not None:
        run.verdicts.write_text(content)
    (shown,) = get(tmp_path, "/api/compare?run=run")["runs"]
    assert shown["evaluation"] == {}
    assert f"with `esper report {run.path}`" in shown["evaluation_note"]
    assert shown["values"], "and the run's curve is there all the same"


def test_the_late_level_is_that_of_the_last_third():
    assert late_level([]) is None
    assert late_level([0.5]) == {"mean": 0.5, "count": 1, "low": 0.5, "high": 0.5}
    assert late_level([9.0] * 6 + [1.0, 2.0, 3.0]) == {"mean": 2.0, "count": 3, "low": 1.0, "high": 3.0}


def test_the_log_pages_backwards_and_filters(planted: Path):
    first = get(planted, "/api/events?run=run")
    ids = [event["id"] for event in first["events"]]
    assert (len(ids), first["more"]) == (PAGE, True)
    assert ids == sorted(ids, reverse=True)
    older = get(planted, f"/api/events?run=run&before={ids[-1]}")
    assert max(event["id"] for event in older["events"]) == ids[-1] - 1
    some = get(planted, "/api/events?run=run&type=rolled_back&type=run_started")
    assert {event["type"] for event in some["events"]} == {"rolled_back", "run_started"}
    named = {event["type"] for event in get(planted, "/api/events?run=run&text=QUAD/")["events"]}
    assert named == {"episode_started", "interactions_measured"}
    assert get(planted, "/api/events?run=run&text=%25")["events"] == []


def test_important_events_are_lives_of_seeds_rollbacks_anomalies_and_failures(planted: Path, tmp_path: Path):
    shutil.copytree(planted / "run", tmp_path / "run")
    with closing(sqlite3.connect(tmp_path / "run" / "run.db")) as connection, connection:
        connection.execute(
            "INSERT INTO events (time, type, version, iteration, payload) VALUES (0, 'lifecycle_transition', 1, 2, '{')"
        )
        connection.execute(
            "INSERT INTO events (time, type, version, iteration, payload) "
            "SELECT time, type, version, iteration, json_set(payload, '$.after', 'pruned') FROM events "
            "WHERE type = 'lifecycle_transition' AND json_valid(payload) LIMIT 1"
        )
        rows = connection.execute("SELECT id, type, payload FROM events ORDER BY id DESC").fetchall()

    def matters(kind: str, payload: str) -> bool:
        if kind in ("rolled_back", "anomaly_raised", "run_failed", "run_interrupted"):
            return True
        is_change = kind == "lifecycle_transition" and payload != "{"
        return is_change and json.loads(payload)["after"] in ("germinated", "fossilized", "pruned")

    expected = [number for number, kind, payload in rows if matters(kind, payload)]
    found = get(tmp_path, "/api/events?run=run&important=1")
    assert [event["id"] for event in found["events"]] == expected[:PAGE]
    assert {event["payload"]["after"] for event in found["events"] if event["type"] == "lifecycle_transition"} == {
        "germinated",
        "fossilized",
        "pruned",
    }
    assert 0 < len(expected) < len(rows)
    assert found["slots"] == PLAN.slot_names


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/api/none", 404, "no such page"),
        ("/api/population?run=none", 404, "no run 'none'"),
        ("/api/population", 404, "no run ''"),
        ("/api/population?run=../run", 404, "no run"),
        ("/api/population?run=run&episode=9", 404, "choose one from 1 to 2"),
        ("/api/network?run=run", 400, "`environment` is missing"),
        ("/api/network?run=run&environment=-1", 400, "whole number"),
        ("/api/network?run=run&environment=1e3", 400, "whole number"),
        ("/api/events?run=run&before=99999999999999999999", 400, "whole number"),
        ("/api/stream?run=none", 404, "no run"),
    ],
)
def test_mistakes_are_told_in_a_sentence(planted: Path, path: str, status: int, words: str):
    answer = client(planted).get(path)
    assert (answer.status_code, words in answer.json()["error"]) == (status, True), answer.text


def test_a_damaged_store_spoils_nothing_else(planted: Path, tmp_path: Path):
    shutil.copytree(planted, tmp_path / "runs")
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "run.db").write_bytes(b"SQLite format 3\0" + bytes(range(256)) * 9)
    broken, run = get(tmp_path / "runs", "/api/runs")["runs"]
    assert "damaged" in broken["error"]
    assert run["state"] == "finished"
    assert "damaged" in client(tmp_path / "runs").get("/api/learning?run=broken").json()["error"]


def test_a_stream_goes_on_after_the_last_event_that_the_browser_has(planted: Path):
    store = planted / "run" / "run.db"
    with closing(sqlite3.connect(store)) as connection:
        ids = [row for (row,) in connection.execute("SELECT id FROM events WHERE type = 'ppo_updated' ORDER BY id")]
    calls = iter([False, True])
    app = dashboard(RunFinder((planted,)), Access("127.0.0.1"), lambda: next(calls))
    served = TestClient(app, base_url="http://127.0.0.1")
    for value in ("9" * 5000, "-1", "x", "²"):
        answer = served.get("/api/stream?run=run", headers={"last-event-id": value.encode()})
        assert (answer.status_code, "`Last-Event-ID` is" in answer.text) == (400, True)
    text = served.get("/api/stream?run=run&type=ppo_updated&after=0", headers={"last-event-id": str(ids[0])}).text
    (data,) = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert [entry["id"] for entry in data] == ids[1:]
    assert "event: news" in text


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(["environment", "step", "slot", "episode", "stages", "after", "before", "cause", "family"])
PAYLOADS = st.dictionaries(FIELDS, ANYTHING).map(json.dumps) | ANYTHING.map(json.dumps) | st.text(max_size=20)
TYPES = st.sampled_from(
    [
        *("step_taken", "episode_started", "episode_ended", "lifecycle_transition", "gate_checked", "rolled_back"),
        *("policy_looked", "anomaly_raised", "<img src=x>", ""),
    ]
)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzzed")
    plant(folder / "run", Plan(networks=1, slots=1, steps=1, iterations=1))
    return folder


@pytest.mark.slow
@settings(max_examples=20)
@given(
    events=st.lists(st.tuples(TYPES, PAYLOADS), max_size=6),
    metadata=st.dictionaries(
        st.sampled_from(["command", "slots", "steps", "baseline_levels", "iterations", "features"]), ANYTHING
    ),
)
def test_whatever_a_run_contains_is_answered_as_json_or_as_a_sentence(
    fuzzed: Path, events: list[tuple[str, str]], metadata: dict[str, Any]
):
    with closing(sqlite3.connect(fuzzed / "run" / "run.db")) as connection, connection:
        connection.execute("DELETE FROM events WHERE time = 0")
        for key, value in metadata.items():
            connection.execute("INSERT OR REPLACE INTO metadata VALUES (?, ?)", (key, json.dumps(value)))
        for name, payload in events:
            stored = payload.encode("utf-8", "replace").decode()
            connection.execute("INSERT INTO events VALUES (NULL, 0, ?, 1, 1, ?)", (name, stored))
    for path in VIEWS:
        answer = client(fuzzed).get(path)
        content = json.loads(answer.text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
        assert answer.status_code in (200, 404)
        assert answer.status_code == 200 or content["error"]


# Finding runs.


SMALL = Plan(networks=1, slots=1, steps=2, iterations=1)


def names(*places: Path) -> list[str]:
    return sorted(RunFinder(places).find())


def test_runs_are_found_in_folders_and_by_themselves_under_names_that_can_be_shown(tmp_path: Path):
    plant(tmp_path / "runs" / "first", SMALL)
    plant(tmp_path / "runs" / "sweep" / "seed0", SMALL)
    assert names(tmp_path / "runs") == ["first", "sweep/seed0"]
    assert names(tmp_path / "runs" / "first") == ["first"]
    plant(tmp_path / "other" / "first", SMALL)
    assert names(tmp_path / "runs", tmp_path / "other") == [str(tmp_path / "other" / "first"), "first", "sweep/seed0"]
    # Hidden and deep folders are left alone.
    plant(tmp_path / "left" / ".hidden" / "run", SMALL)
    plant(tmp_path.joinpath("left", *"abcdefgh"[: DEPTH + 1]), SMALL)
    assert names(tmp_path / "left") == []
    plant(Path(os.fsdecode(os.fsencode(tmp_path / "bytes") + b"/bad\xff")), SMALL)
    assert names(tmp_path / "bytes") == ["bad\ufffd"]


def test_new_runs_show_and_vanished_ones_do_not(tmp_path: Path):
    finder = RunFinder((tmp_path / "runs",))
    assert finder.find() == {}
    store = plant(tmp_path / "runs" / "late", SMALL)
    assert finder.store("late") == store
    store.unlink()
    with pytest.raises(RunError, match="no run 'late'"):
        finder.store("late")


@pytest.mark.parametrize("name", ["../outside", "..", "/etc", "first/../../outside", "first\0", ""])
def test_no_name_leads_outside(tmp_path: Path, name: str):
    plant(tmp_path / "outside", SMALL)
    plant(tmp_path / "runs" / "first", SMALL)
    with pytest.raises(RunError):
        RunFinder((tmp_path / "runs",)).store(name)
