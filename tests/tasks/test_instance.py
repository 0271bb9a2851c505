"""An instance survives JSON, and a record of something else is refused with a sentence."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.errors import TaskError
from esper.tasks.instance import Instance

INSTANCE = Instance(
    suite="tokens",
    family="drift",
    variant="near",
    seed=7,
    widths=(10, 3, 3),
    learning_rate=0.01,
    train_size=384,
    rent=0.08,
    drift_step=11,
)

instances = st.builds(
    Instance,
    widths=st.lists(st.integers(1, 99)).map(tuple),
    seed=st.integers(0, 2**40),
    learning_rate=st.floats(1e-5, 1),
    rent=st.floats(0, 1),
    label_noise=st.floats(0, 1),
)


@given(instances)
def test_json_round_trip(instance: Instance) -> None:
    assert Instance.from_json(json.loads(json.dumps(instance.to_json()))) == instance


def test_an_instance_can_be_a_key() -> None:
    assert {INSTANCE: 1}[Instance.from_json(INSTANCE.to_json())] == 1


def test_unknown_field_is_refused() -> None:
    with pytest.raises(TaskError, match="colour"):
        Instance.from_json({**INSTANCE.to_json(), "colour": "red"})


@pytest.mark.parametrize("field", ["suite", "seed", "widths"])
def test_missing_field_is_refused(field: str) -> None:
    record = INSTANCE.to_json()
    del record[field]
    with pytest.raises(TaskError, match=field):
        Instance.from_json(record)


def test_value_of_the_wrong_type_is_refused() -> None:
    with pytest.raises(TaskError, match="train_size"):
        Instance.from_json({**INSTANCE.to_json(), "train_size": "many"})
