"""Run stores with planted events, as figures and reports need them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from esper.config.loading import dump_settings
from esper.lab.evaluate import Behaviour, Usage, write_behaviour
from esper.runs.events import (
    EpisodeEnded,
    EpisodeStarted,
    Event,
    InteractionsMeasured,
    ModulePair,
    ModuleValue,
    StepTaken,
)
from esper.runs.run_directory import RunDirectory
from esper.runs.store import RunStore
from esper.train.iteration import LEVELS, record_iteration
from esper.train.results import Result, write_results
from esper.train.settings import TrainSettings
from lab import planted

ITERATIONS, NETWORKS = 4, 3


def trained(path: Path, *, steps: bool = True, name: str = "norm", family: str = "order") -> RunDirectory:
    """A run of `esper train`; ``name`` is a blueprint's and a slot's."""
    run = RunDirectory.create(path)
    dump_settings(TrainSettings(iterations=ITERATIONS), run.config)
    with RunStore.create(run.store) as store:
        store.set_metadata({"command": "train", LEVELS: planted.LEVELS, "slots": [name, "layer1"]})
        for number in range(1, ITERATIONS + 1):
            for environment in range(NETWORKS):
                for event in _episode(number, environment, name, family):
                    if steps or not isinstance(event, StepTaken):
                        store.emit(event)
            probe = 0.6 if number == ITERATIONS else None
            figures = planted.iteration(number, ITERATIONS, probe=probe, kl=0.001 * number)
            measured = () if probe is None else tuple(_interactions(number, name, family))
            record_iteration(store, replace(figures, interactions=measured), planted.LEVELS)
    return run


BEHAVIOUR = Behaviour(ITERATIONS, ("norm", "layer1"), ("norm",), (Usage("order", "heldout", 3, {"wait": 1.0}, ()),), ())


def evaluated(path: Path, results: Sequence[Result], *, seed: int = 0) -> RunDirectory:
    """A run of `esper train` with this training seed and what `esper evaluate` left of these results."""
    run = trained(path, steps=False)
    dump_settings(TrainSettings(iterations=ITERATIONS, seed=seed), run.config)
    write_results(run.evaluation, results)
    write_behaviour(run.behaviour, BEHAVIOUR)
    return run


def grown(path: Path, *, name: str = "norm") -> RunDirectory:
    """A run of a `Grower` that has not ended; ``name`` is a blueprint's and a slot's."""
    run = RunDirectory.create(path)
    run.config.write_text("host: MlpNet\n")
    with RunStore.create(run.store) as store:
        store.set_metadata({"command": "grow", "host": "MlpNet", "slots": [name, "layer1"]})
        for event in _episode(1, 0, name, "digits"):
            store.emit(event)
        figures = {"train_accuracy": 0.5, "validation_accuracy": 0.4, "train_loss": 1.0, "validation_loss": 1.2}
        store.record_scalars(1, {**figures, "added_parameters": 12})
    return run


def _interactions(number: int, name: str, family: str) -> Iterator[InteractionsMeasured]:
    """Two networks that kept two modules, and one that kept one of them."""
    for instance, kept in enumerate((2, 2, 1)):
        yield InteractionsMeasured(
            iteration=number,
            instance=f"{family}/far/{instance}",
            family=family,
            metric="accuracy",
            modules=tuple(ModuleValue(slot=slot, blueprint=name, value=0.1) for slot in range(kept)),
            pairs=(ModulePair(first=0, second=1, interaction=0.1 * instance - 0.3),) if kept == 2 else (),
            exact=True,
        )


def _episode(number: int, environment: int, name: str, family: str) -> list[Event]:
    place = {"iteration": number, "episode": number, "environment": environment}
    stages, residents = ("blending", "dormant"), (name, None)
    contribution = 0.01 * (environment + 1) + 0.001 * number
    return [
        EpisodeStarted(
            **{**place, "step": 0, "instance": f"{family}/far/1", "family": family, "variant": "far", "rent": 0.1},
            learning_rate=1e-3,
            train_size=128,
            widths=(10,),
            host_parameters=400,
            reward="outcome",
        ),
        planted.change(0, 0, "dormant", "germinated", name, "germinate", **place),
        StepTaken(
            **{**place, "step": 0, "op": "germinate", "loss": 1.0, "metric": 0.5, "objective": 0.4, "added": 0.1},
            stages=stages,
            blueprints=residents,
            alphas=(0.5, 0.0),
            slot=0,
            blueprint=name,
            contributions=(contribution, None),
            terms={"objective": 0.25, "rent": -0.05},
        ),
        planted.change(1, 0, "blending", "fossilized", name, "fossilize", **place, contribution=contribution),
        EpisodeEnded(**place, step=1, objective=0.5, accuracy=0.6, added=0.3, paid=0.2, kept=(name, None)),
    ]
