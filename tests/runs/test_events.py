"""Events survive the trip to JSON and back, and strangers are refused."""

import dataclasses
import math
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.errors import RunError
from esper.runs.events import Event, PPOUpdated, RunStarted, decode_event, encode_event, event_types, register_event

TYPES = sorted(event_types().values(), key=lambda event_type: event_type.name)
JSON_VALUES = st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text())


def values_for(kind: Any) -> st.SearchStrategy[Any]:
    if kind == dict[str, Any]:
        return JSON_VALUES
    return st.from_type(kind)


def instances(event_type: type[Event]) -> st.SearchStrategy[Event]:
    hints = get_type_hints(event_type)
    names = [field.name for field in dataclasses.fields(event_type)]
    return st.builds(event_type, **{name: values_for(hints[name]) for name in names})


@pytest.mark.landing
@pytest.mark.parametrize("event_type", TYPES, ids=lambda event_type: event_type.name)
def test_every_event_survives_the_round_trip(event_type: type[Event]):
    @given(instances(event_type))
    def check(event: Event):
        # Compared as text, because NaN differs from itself.
        assert repr(decode_event(event.name, event.version, encode_event(event))) == repr(event)

    check()


def test_non_finite_numbers_survive():
    event = PPOUpdated(
        iteration=3, optimizer_steps=1, stopped_early=True, kl=math.inf, anomalies=("kl",), metrics={"kl": -math.inf}
    )
    assert decode_event(event.name, event.version, encode_event(event)) == event


def test_an_unknown_event_is_refused():
    with pytest.raises(RunError, match="'moon_landed' version 1 is unknown"):
        decode_event("moon_landed", 1, "{}")


def test_another_version_is_refused():
    with pytest.raises(RunError, match="'run_started' version 99 is unknown"):
        decode_event("run_started", 99, encode_event(RunStarted(iteration=0, platform={"esper": "1.0"}, seed=7)))


@pytest.mark.parametrize(
    "payload", ["", "{}", "[]", '{"iteration": 0, "platform": {"esper": "1"}, "seed": 1, "shoe_size": 43}']
)
def test_a_damaged_payload_is_refused(payload: str):
    with pytest.raises(RunError, match="a stored event 'run_started' is damaged"):
        decode_event("run_started", 2, payload)


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="registered already"):

        @register_event("run_started")
        @dataclasses.dataclass(frozen=True, slots=True)
        class Impostor(Event):
            pass


def test_events_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunStarted(iteration=0, platform={"esper": "1.0"}, seed=7).seed = 8  # type: ignore[misc]
