"""A run store with believable events of many networks, written at once."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from esper.runs.events import (
    AnomalyRaised,
    EpisodeEnded,
    EpisodeStarted,
    Event,
    GateChecked,
    InteractionsMeasured,
    ModulePair,
    ModuleValue,
    NetworkStep,
    PolicyLooked,
    PolicyProbed,
    PPOUpdated,
    RunEnded,
    RunStarted,
    StepTaken,
)
from esper.runs.store import RunStore
from lab.planted import change, rolled_back

FAMILIES = ("quad", "ctx", "vote", "drift")
BLUEPRINTS = ("mlp", "attention", "norm", "gate")
OPERATIONS = ("wait", "germinate", "advance", "set_alpha", "fossilize", "prune")
BASELINES = {"none": 0.53, "random": 0.57, "heuristic": 0.62}
HEADS = ("op", "slot", "blueprint")
STAGES = ("dormant", "germinated", "blending", "blending", "holding", "fossilized")
"""Of a slot whose seed is kept, by the sixth of the episode."""
WATCHED = 4
PROBES = 5
"""Probe instances."""


@dataclass(frozen=True)
class Plan:
    """What to plant."""

    networks: int = 64
    slots: int = 4
    steps: int = 30
    iterations: int = 2
    families: tuple[str, ...] = FAMILIES
    blueprints: tuple[str, ...] = BLUEPRINTS
    reason: str = "passed"
    """Of changes of stage, verdicts and rollbacks."""
    ended: bool = True

    @property
    def slot_names(self) -> list[str]:
        return [f"layer{slot}" for slot in range(self.slots)]

    def family(self, network: int) -> str:
        return self.families[network % len(self.families)]

    def blueprint(self, network: int, slot: int) -> str:
        return self.blueprints[(network + slot) % len(self.blueprints)]


def plant(run: Path, plan: Plan = Plan()) -> Path:
    """Make the directory of a run and its store; returns the store."""
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("{}\n")
    store = run / "run.db"
    with RunStore.create(store) as writer:
        writer.set_metadata(metadata(plan))
        writer.emit(RunStarted(iteration=0, platform={"esper": "0.1.0"}, seed=0))
        for iteration in range(1, plan.iterations + 1):
            for event in episode(plan, iteration):
                writer.emit(event)
            learn(writer, plan, iteration)
        if plan.ended:
            writer.emit(RunEnded(iteration=plan.iterations, seconds=12.0))
    return store


def metadata(plan: Plan) -> dict[str, object]:
    sizes = {"environments": plan.networks, "iterations": plan.iterations, "steps": plan.steps}
    names = {"slots": plan.slot_names, "blueprints": [*plan.blueprints], "operations": OPERATIONS, "heads": HEADS}
    features = {"globals": ["progress", "rent"], "slots": ["alpha"], "blueprints": ["cost"]}
    about = {"command": "train", "seed": 0, "suite": "tokens", "features": features, "baseline_levels": BASELINES}
    return {**about, **sizes, **names}


def episode(plan: Plan, number: int) -> Iterator[Event]:
    """All events of an episode."""
    yield from begin(plan, number)
    for step in range(plan.steps):
        yield from advance(plan, number, step)


def place_of(number: int, network: int, step: int) -> NetworkStep:
    return NetworkStep(iteration=number, episode=number, environment=network, step=step)


def begin(plan: Plan, number: int) -> Iterator[Event]:
    for network in range(plan.networks):
        family = plan.family(network)
        problem = {"instance": f"{family}/relu/{network}", "family": family, "variant": "relu", "widths": (10, 10, 10)}
        numbers = {"rent": 0.08, "learning_rate": 0.01, "train_size": 768, "host_parameters": 404}
        yield EpisodeStarted(**place_of(number, network, 0), **problem, **numbers, reward="outcome")


def advance(plan: Plan, number: int, step: int) -> Iterator[Event]:
    """A step of all networks, as a population takes it."""
    for network in range(plan.networks):
        place = place_of(number, network, step)
        if network < WATCHED:
            yield looked(plan, place)
        yield from changes(plan, place)
        yield taken(plan, place)
        if network == 1 and step == plan.steps // 2:
            figures = {"loss_before": 5.0, "metric_before": 0.2, "loss_after": 0.9, "metric_after": 0.6}
            yield rolled_back(plan.reason, **place, **figures)
        if step == plan.steps - 1:
            kept = tuple(plan.blueprint(network, slot) for slot in range(plan.slots))
            end = accuracy(network, step)
            yield EpisodeEnded(**place, objective=end, accuracy=end + 0.05, added=0.4, paid=0.5, kept=kept)


def stage(plan: Plan, slot: int, step: int) -> str:
    """Slots begin one after the other."""
    sixth = (step - slot) * len(STAGES) // plan.steps
    return STAGES[max(0, min(sixth, len(STAGES) - 1))]


def accuracy(network: int, step: int) -> float:
    return round(0.4 + 0.003 * (network % 40) + 0.012 * step + 0.02 * math.sin(network + step), 5)


def changes(plan: Plan, place: NetworkStep) -> Iterator[Event]:
    network, step = place["environment"], place["step"]
    for slot in range(plan.slots):
        before, after = stage(plan, slot, step - 1), stage(plan, slot, step)
        if step and before != after:
            seed = plan.blueprint(network, slot)
            figures = {"contribution": 0.02, "error": 0.004, "price": 0.01, "threshold": 0.015, "reason": plan.reason}
            yield change(place["step"], slot, before, after, seed, "tick", **{**place, **figures})
            yield GateChecked(**place, slot=slot, gate="G3", passed=True, reason=plan.reason)


def taken(plan: Plan, place: NetworkStep) -> StepTaken:
    network, step = place["environment"], place["step"]
    stages = tuple(stage(plan, slot, step) for slot in range(plan.slots))
    living = [name != "dormant" for name in stages]
    return StepTaken(
        **place,
        op="germinate" if step == 1 else "wait",
        loss=1.2 - 0.02 * step,
        metric=accuracy(network, step) + 0.05,
        objective=accuracy(network, step),
        added=0.01 * step,
        stages=stages,
        blueprints=tuple(plan.blueprint(network, slot) if alive else None for slot, alive in enumerate(living)),
        alphas=tuple(min(1.0, step / plan.steps) if alive else 0.0 for alive in living),
        contributions=tuple(0.01 * (slot - 1) if alive else None for slot, alive in enumerate(living)),
        slot=0 if step == 1 else None,
        blueprint=plan.blueprint(network, 0) if step == 1 else None,
        value=0.1,
        log_prob=-0.5,
        reward=0.02,
        terms={"objective": 0.03, "progress": -0.01},
        train_loss=1.1 - 0.02 * step,
    )


def looked(plan: Plan, place: NetworkStep) -> PolicyLooked:
    even = tuple(1 / plan.slots for _ in range(plan.slots))
    return PolicyLooked(
        **place,
        globals=(place["step"] / plan.steps, 0.08),
        slots=tuple((0.5,) for _ in range(plan.slots)),
        blueprints=tuple(tuple((0.1,) for _ in plan.blueprints) for _ in range(plan.slots)),
        probabilities={"op": (0.7, 0.2, 0.1, 0.0, 0.0, 0.0), "slot": even},
    )


def measured(plan: Plan, iteration: int, instance: int) -> InteractionsMeasured:
    """The first instance's network kept no module, the next one, and so on."""
    kept = range(min(instance, plan.slots))
    return InteractionsMeasured(
        iteration=iteration,
        instance=f"{plan.family(instance)}/relu/{plan.reason}",
        family=plan.family(instance),
        metric="accuracy",
        modules=tuple(
            ModuleValue(slot=slot, blueprint=plan.blueprint(instance, slot), value=0.1 * iteration - 0.02 * slot)
            for slot in kept
        ),
        pairs=tuple(
            ModulePair(first=first, second=second, interaction=0.05 * (first + second) - 0.1)
            for first, second in combinations(kept, 2)
        ),
        exact=True,
    )


def learn(writer: RunStore, plan: Plan, iteration: int) -> None:
    """What an iteration's update tells."""
    metrics = {"entropy": 0.8, "kl": 0.01, "clip_fraction": 0.05, "gradient_norm": 0.3, "explained_variance": 0.4}
    metrics |= {f"{name}/{head}": 0.7 for name in ("head_entropy", "module_gradient_norm") for head in HEADS}
    score = 0.55 + 0.01 * iteration
    writer.record_scalars(iteration, {"objective": score, "probe_score": score + 0.02, "seconds": 1.0})
    writer.record_scalars(iteration, {f"ppo/{name}": value for name, value in metrics.items()})
    update = {"optimizer_steps": 16, "stopped_early": False, "kl": 0.01, "anomalies": ("kl",), "metrics": metrics}
    writer.emit(PPOUpdated(iteration=iteration, **update))
    alarm = {"anomaly": "entropy", "figure": "head_entropy/slot", "value": 0.001, "bound": 0.02, "head": "slot"}
    writer.emit(AnomalyRaised(iteration=iteration, meaning=plan.reason, response="skip", **alarm))
    for instance in range(PROBES):
        writer.emit(measured(plan, iteration, instance))
    writer.emit(PolicyProbed(iteration=iteration, score=score + 0.02, baselines=BASELINES))
