"""What happens in a run, as typed, versioned records: the events of runs, of growing networks and of learning.

An event is a frozen dataclass of JSON values. `register_event` files its type under a name and a version;
`decode_event` rebuilds a stored event, and refuses unknown names and versions. Change an event's fields only together
with its version.

Stages, operations, causes, reasons and blueprints are given by name, in lower case. Slots are given by their index; the
run's metadata ``slots`` holds their names. In training, an episode has the number of its iteration; a run of a `Grower`
has the single episode 1.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, TypedDict, TypeVar, dataclass_transform

from pydantic import ConfigDict, TypeAdapter, ValidationError

from esper.errors import RunError


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events; `iteration` is the trainer's iteration that it belongs to."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", ser_json_inf_nan="strings")
    name: ClassVar[str]
    version: ClassVar[int]
    # History survives a rewind: that a run was interrupted stays true when the iterations after it are done again.
    history: ClassVar[bool] = False

    iteration: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkEvent(Event):
    """Base of events of one network; `step` counts the episode's decisions from 0."""

    episode: int
    environment: int
    step: int


class NetworkStep(TypedDict):
    """A decision of a network: the fields that every `NetworkEvent` has."""

    iteration: int
    episode: int
    environment: int
    step: int


_registry: dict[str, type[Event]] = {}
E = TypeVar("E", bound=type[Event])


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def register_event(name: str, version: int = 1) -> Callable[[E], E]:
    """Class decorator of event types: makes a frozen dataclass that is stored under `name`, at `version`."""

    def decorate(event_type: E) -> E:
        if name in _registry:
            raise ValueError(f"an event named {name!r} is registered already")
        event_type = dataclass(frozen=True, slots=True, kw_only=True)(event_type)
        event_type.name = name
        event_type.version = version
        _registry[name] = event_type
        return event_type

    return decorate


def event_types() -> dict[str, type[Event]]:
    """All registered event types by name."""
    return dict(_registry)


def encode_event(event: Event) -> str:
    """The event's fields as JSON, without defaults. Non-finite numbers become strings, which `decode_event` reads."""
    return _adapter(type(event)).dump_json(event, exclude_defaults=True).decode()


def decode_event(name: str, version: int, payload: str) -> Event:
    """Rebuild a stored event.

    Raises:
        RunError: the name or version is unknown, or the payload does not fit them.
    """
    event_type = _registry.get(name)
    if event_type is None or event_type.version != version:
        raise RunError(f"event {name!r} version {version} is unknown here: read this run with the Esper that wrote it")
    try:
        return _adapter(event_type).validate_json(payload)
    except ValidationError as error:
        raise RunError(f"a stored event {name!r} is damaged: {error.errors()[0]['msg']}") from error


@cache
def _adapter(event_type: type[Event]) -> TypeAdapter[Any]:
    return TypeAdapter(event_type)


@register_event("run_started", version=2)
class RunStarted(Event):
    """A new run begins. `platform` has the versions of the software, the operating system and the devices."""

    history = True

    platform: dict[str, str]
    seed: int


@register_event("run_interrupted")
class RunInterrupted(Event):
    """The run stopped before its end, for instance by Ctrl-C."""

    history = True

    reason: str


@register_event("run_failed")
class RunFailed(Event):
    """The run stopped at an error; `reason` is its message."""

    history = True

    reason: str


@register_event("run_resumed", version=2)
class RunResumed(Event):
    """The run goes on after the checkpoint of `iteration`, on this `platform`."""

    history = True

    platform: dict[str, str]


@register_event("run_ended")
class RunEnded(Event):
    """All iterations are done; `seconds` counts the last process only."""

    history = True

    seconds: float


@register_event("checkpoint_written")
class CheckpointWritten(Event):
    """A checkpoint is safe on disk; `file` is relative to the run directory."""

    file: str
    sha256: str


@register_event("episode_started", version=2)
class EpisodeStarted(NetworkEvent):
    """A network begins to learn a problem.

    `instance` is its name, `rent` the price of growth, and `reward` the mode by which its controller is paid, with the
    settings in which several of that mode differ.
    """

    instance: str
    family: str
    variant: str
    rent: float
    learning_rate: float
    train_size: int
    widths: tuple[int, ...]
    host_parameters: int
    reward: str


@register_event("step_taken", version=4)
class StepTaken(NetworkEvent):
    """A decision, and how the network stood after the minibatches that followed it.

    `metric` is what growth is about, in its own units: accuracy on validation data, unless the run's metadata
    ``metric`` name another figure. The *score* is that figure or, where ``higher_is_better`` is false, its relative
    reduction below its ``reference``. Contributions are differences of scores, and in a run of a `Grower`, where lower
    is better, relative reductions below the figure without the seed. `objective` is J, the network's score with all
    seeds less rent. `loss` is on validation data, in nats where it is a cross-entropy; `added` are the seeds'
    parameters over the host's. Tuples have an entry per slot. In a run of a `Grower`, the figures are those that the
    decision was made on.
    """

    op: str
    loss: float
    metric: float
    objective: float
    added: float
    stages: tuple[str, ...]
    blueprints: tuple[str | None, ...]
    alphas: tuple[float, ...]
    contributions: tuple[float | None, ...]
    """How much the network depends on each seed: its score less that with the seed switched off (leave-one-out). For
    seeds on trial where the metadata's ``evidence`` is ``refit``: its score less that of a fork that trains on without
    the seed. None without a seed, or where it was not measured."""
    contribution_errors: tuple[float | None, ...] = ()
    """Standard error of each contribution; None where it is not known. Only in a run of a `Grower`."""
    thresholds: tuple[float | None, ...] = ()
    """Contribution from which the controller keeps each seed, rent included; None without a seed, or where no threshold
    decides, as under a trained policy. Only in a run of a `Grower`."""
    gradient_ratios: tuple[float | None, ...] = ()
    """Each seed's gradient over that of host and fossils, both as root mean squares per parameter: mean over the
    minibatches since the decision before. None where it was not measured, or nothing was to be compared with."""
    vanished_shares: tuple[float | None, ...] = ()
    """Share of minibatches in which each seed's gradient vanished: the exponential mean over decisions that gate G2
    reads. None where the gradient was never measured."""
    exploded_shares: tuple[float | None, ...] = ()
    """Share of minibatches in which it exploded, likewise."""
    slot: int | None = None
    blueprint: str | None = None
    """What was germinated; in a run of a `Grower` also what was in the slot that another operation acted on."""
    choices: dict[str, str] = field(default_factory=dict[str, str])
    """The choices of the other heads that the operation reads, by head."""
    value: float | None = None
    """The policy's estimate of the return from here on; None for rules."""
    log_prob: float | None = None
    """The action's log probability under the policy."""
    reward: float | None = None
    """The decision's reward; None in a run of a `Grower`."""
    terms: dict[str, float] = field(default_factory=dict[str, float])
    """The terms of the reward that are not 0, by name."""
    train_loss: float | None = None


@register_event("policy_looked")
class PolicyLooked(NetworkEvent):
    """The policy's observation before a decision, and the probability of each choice; only for watched networks.

    The run's metadata ``features`` names the last axes of the observation.
    """

    globals: tuple[float, ...]
    slots: tuple[tuple[float, ...], ...]
    """One token per slot."""
    blueprints: tuple[tuple[tuple[float, ...], ...], ...]
    """Per slot and blueprint."""
    probabilities: dict[str, tuple[float, ...]]
    """Probabilities per head that the decision read, given the choices before it; 0 for illegal choices."""


@register_event("lifecycle_transition", version=4)
class LifecycleTransition(NetworkEvent):
    """A slot changed its stage."""

    slot: int
    before: str
    after: str
    blueprint: str | None
    """Blueprint of the seed that came, stayed or went; None in a cooldown."""
    cause: str
    """An operation, ``tick``, ``rollback``, ``start``, or ``finish``: judged at the end of growth."""
    reason: str
    """The verdict of the gate before the new stage."""
    contribution: float | None = None
    """The seed's contribution, as in ``step_taken``, at that time."""
    error: float | None = None
    """Standard error of the contribution by which a seed was kept or pruned; None where it is not known. This field and
    those that follow are only in runs of a `Grower`, and only where a seed was judged."""
    price: float | None = None
    """What that seed added to the rent."""
    threshold: float | None = None
    """Contribution from which it would have been kept, rent included; None where no threshold decides."""
    loss_gain: float | None = None
    """How much lower the validation loss was with the seed, as a share of the loss."""
    loss_error: float | None = None
    """Standard error of ``loss_gain``; None where it is not known."""
    loss_threshold: float | None = None
    """``loss_gain`` from which it would have been kept; None where only the score decides."""


@register_event("gate_judged")
class GateJudged(NetworkEvent):
    """The gate ahead of a seed changed its verdict.

    A gate says what is allowed, not what is worth it: a seed whose gate has passed may still be pruned, because its
    contribution, or its effect on the loss, is below the controller's threshold (`lifecycle_transition` has all four).
    """

    slot: int
    gate: str
    passed: bool
    reason: str


@register_event("rolled_back", version=3)
class RolledBack(NetworkEvent):
    """The governor returned a network to its last good state; loss and metric are as in ``step_taken``."""

    trouble: str
    loss_before: float
    metric_before: float
    loss_after: float
    metric_after: float
    pruned: tuple[int, ...]
    """Slots whose seeds were pruned."""
    ended: bool
    """Whether the episode ended, after one rollback too many."""


@register_event("episode_ended")
class EpisodeEnded(NetworkEvent):
    """An episode is over: the final network on validation data, and `paid`, the sum of the controller's rewards."""

    objective: float
    accuracy: float
    added: float
    paid: float
    kept: tuple[str | None, ...]
    """Blueprint of the fossil in each slot."""


@register_event("ppo_updated", version=3)
class PPOUpdated(Event):
    """A policy update is done; `metrics` are those of `esper.rl.diagnostics.UpdateMetrics`, under flat names."""

    optimizer_steps: int
    stopped_early: bool
    kl: float
    anomalies: tuple[str, ...]
    metrics: dict[str, float]


@register_event("anomaly_raised", version=2)
class AnomalyRaised(Event):
    """An update is not healthy: `anomaly` names what is wrong, and `meaning` is a sentence about it."""

    anomaly: str
    meaning: str
    figure: str
    """The metric beyond its bound, as in ``ppo_updated``."""
    value: float
    bound: float
    head: str | None = None
    """The head of the policy that it is about."""
    response: str = "record"
    """``record``, ``skip`` (the update was undone) or ``stop``."""


@register_event("minibatch_recorded")
class MinibatchRecorded(Event):
    """A minibatch of the update in an iteration after an anomaly; figures of heads are named ``figure/head``."""

    minibatch: int
    """Its place in the update, from 0."""
    figures: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleValue:
    """What one of the modules that a network kept adds to its score."""

    slot: int
    blueprint: str
    value: float | None
    """Shapley value; None where it is not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePair:
    """What two of the modules that a network kept add together beyond what each adds alone."""

    first: int
    """Slot; the lower one."""
    second: int
    interaction: float


@register_event("interactions_measured")
class InteractionsMeasured(Event):
    """What the modules that the greedy policy kept in a probe instance's network are worth, alone and in pairs.

    They play a cooperative game: a set of them is worth the network's score on validation data with only these switched
    on. The score is `metric`: accuracy or, on suites about the loss, the share of a guess's loss that is removed.
    """

    instance: str
    family: str
    metric: str
    """``accuracy`` or ``loss_gone``."""
    modules: tuple[ModuleValue, ...]
    """The kept modules in the order of slots: ``slot``, ``blueprint``, and ``value``, the Shapley value (Shapley,
    1953), which is null where it is not finite."""
    pairs: tuple[ModulePair, ...]
    """All pairs of kept modules: slots ``first`` and ``second``, and their ``interaction``, the Shapley interaction
    index (Grabisch and Roubens, 1999): positive where they help each other, negative where one makes the other
    redundant. Pairs whose interaction is not finite are missing."""
    exact: bool
    """Whether from the scores of all sets of modules. With more than six modules both are estimated from the network
    without each module and without each pair, which is exact where modules interact in pairs only."""


@register_event("policy_probed")
class PolicyProbed(Event):
    """The greedy policy's mean test score on the run's probe instances, and that of each baseline there."""

    score: float
    baselines: dict[str, float]
