"""What happens in a run, as typed, versioned records: the events of runs, of growing networks and of learning.

An event is a frozen dataclass of JSON values. Whenever its fields change, its version must change, too.

Stages, operations, causes, reasons and blueprints are given by name, in lower case, slots by their index; the run's
metadata ``slots`` list their names. In training, an episode has the number of its iteration; a run of a `Grower` has
the single episode 1.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, TypedDict, TypeVar, dataclass_transform

from pydantic import ConfigDict, TypeAdapter, ValidationError

from esper.errors import RunError


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base class of all events; `iteration` is the trainer's iteration to which the event belongs."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", ser_json_inf_nan="strings")
    name: ClassVar[str]
    version: ClassVar[int]
    # History survives a rewind: a run was interrupted even if the iterations after that are repeated.
    history: ClassVar[bool] = False

    iteration: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkEvent(Event):
    """Base class of events of one network; `step` counts the decisions of the episode from 0."""

    episode: int
    environment: int
    step: int


class NetworkStep(TypedDict):
    """The fields that every `NetworkEvent` has."""

    iteration: int
    episode: int
    environment: int
    step: int


_registry: dict[str, type[Event]] = {}
E = TypeVar("E", bound=type[Event])


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def register_event(name: str, version: int = 1) -> Callable[[E], E]:
    """Class decorator for event types, stored under `name` and `version`."""

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
    """The event's fields as JSON, without those at their defaults; non-finite numbers become strings."""
    return _adapter(type(event)).dump_json(event, exclude_defaults=True).decode()


def decode_event(name: str, version: int, payload: str) -> Event:
    """Rebuild a stored event."""
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
    """A new run begins. `platform` lists the versions of the software, the operating system and the devices."""

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
    """The run stopped because of an error, whose message is `reason`."""

    history = True

    reason: str


@register_event("run_resumed", version=2)
class RunResumed(Event):
    """The run continues from the checkpoint of `iteration`, on this `platform`."""

    history = True

    platform: dict[str, str]


@register_event("run_extended")
class RunExtended(Event):
    """The run has been given more iterations, `after` instead of `before`, all other settings being kept."""

    history = True

    before: int
    after: int


@register_event("run_ended")
class RunEnded(Event):
    """All iterations are done; `seconds` is the time of the last process only."""

    history = True

    seconds: float


@register_event("checkpoint_written")
class CheckpointWritten(Event):
    """A checkpoint is safe on disk; `file` is relative to the run directory."""

    file: str
    sha256: str


@register_event("episode_started", version=2)
class EpisodeStarted(NetworkEvent):
    """A network begins to learn a problem, the `instance`.

    `rent` is the price of growth, `reward` the controller's reward mode, with its settings where modes alone are equal.
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
    """A decision, and the state of the network after the minibatches that followed it.

    `metric` is accuracy on validation data, or what the run's metadata ``metric`` name, in its own units. The *score*
    is the metric or, where ``higher_is_better`` is false, its relative reduction below ``reference``. `objective` is J,
    the score with all seeds, minus rent. `loss` is on validation data, in nats where it is a cross-entropy. `added` is
    the number of the seeds' parameters divided by the host's. Tuples have one entry per slot. In a run of a `Grower`,
    the values are those on which the decision was based.
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
    """How much the network depends on each seed: its score minus that with the seed switched off (leave-one-out). In a
    run of a `Grower` in which lower is better, the relative reduction of the metric instead. Where the metadata
    ``refit`` is true, seeds on probation are compared with a fork that trains on without the seed. None without a seed,
    or where it was not measured."""
    contribution_errors: tuple[float | None, ...] = ()
    """Standard error of each contribution, where it is known. Only in a run of a `Grower`."""
    thresholds: tuple[float | None, ...] = ()
    """Smallest contribution, rent included, for which each seed is kept; None where no threshold decides, as with a
    trained policy. Only in a run of a `Grower`."""
    gradient_ratios: tuple[float | None, ...] = ()
    """Ratio of each seed's gradient to that of host and fossils, both as root mean squares per parameter: the mean over
    minibatches since the previous decision, where it was measured."""
    vanished_shares: tuple[float | None, ...] = ()
    """Fraction of minibatches in which each seed's gradient vanished, as an exponential mean over decisions, for gate
    G2."""
    exploded_shares: tuple[float | None, ...] = ()
    """Fraction of minibatches in which each seed's gradient exploded, as in ``vanished_shares``."""
    slot: int | None = None
    blueprint: str | None = None
    """The germinated blueprint; in a run of a `Grower` also that in the slot of another operation."""
    choices: dict[str, str] = field(default_factory=dict[str, str])
    """The choices of the policy's other heads for the operation, by head."""
    value: float | None = None
    """The policy's estimate of the return from this step on; None for rules."""
    log_prob: float | None = None
    """The action's log probability under the policy."""
    reward: float | None = None
    """The decision's reward; None in a run of a `Grower`."""
    terms: dict[str, float] = field(default_factory=dict[str, float])
    """The nonzero terms of the reward, by name."""
    train_loss: float | None = None


@register_event("policy_looked")
class PolicyLooked(NetworkEvent):
    """The policy's observation before a decision, and the probability of each choice; only for watched networks.

    The run's metadata ``features`` list the names of the features.
    """

    globals: tuple[float, ...]
    slots: tuple[tuple[float, ...], ...]
    """Features of each slot."""
    blueprints: tuple[tuple[tuple[float, ...], ...], ...]
    """Features of each blueprint in each slot."""
    probabilities: dict[str, tuple[float, ...]]
    """Probabilities of the choices of each head used by the decision, given the earlier choices; 0 for illegal ones."""


@register_event("lifecycle_transition", version=4)
class LifecycleTransition(NetworkEvent):
    """A slot changed its stage."""

    slot: int
    before: str
    after: str
    blueprint: str | None
    """Blueprint of the seed in the slot, or of the seed that was just removed; None in a cooldown."""
    cause: str
    """An operation, ``tick``, ``rollback``, ``start``, or ``finish`` for a seed decided about at the end."""
    reason: str
    """The reason given by the gate before the new stage."""
    contribution: float | None = None
    """The seed's contribution, as in ``step_taken``, at that time."""
    error: float | None = None
    """Standard error of the contribution, where it is known. This and the following fields exist only in runs of a
    `Grower`, where a seed was kept or pruned."""
    price: float | None = None
    """How much the seed added to the rent."""
    threshold: float | None = None
    """Smallest contribution, rent included, for which the seed would have been kept, where one decides."""
    loss_gain: float | None = None
    """How much lower the validation loss was with the seed, relative to the loss."""
    loss_error: float | None = None
    """Standard error of ``loss_gain``, where it is known."""
    loss_threshold: float | None = None
    """Smallest ``loss_gain`` for which the seed would have been kept; None where only the score decides."""


@register_event("gate_checked")
class GateChecked(NetworkEvent):
    """The result of a seed's next gate changed: what is allowed, not what is worthwhile.

    A seed whose gate has passed may still be pruned (see `lifecycle_transition`).
    """

    slot: int
    gate: str
    passed: bool
    reason: str


@register_event("rolled_back", version=3)
class RolledBack(NetworkEvent):
    """The governor restored a network's last good state; loss and metric are defined as in ``step_taken``."""

    trouble: str
    loss_before: float
    metric_before: float
    loss_after: float
    metric_after: float
    pruned: tuple[int, ...]
    """Slots whose seeds were pruned."""
    ended: bool
    """Whether the episode ended, because the number of rollbacks exceeded the limit."""


@register_event("episode_ended")
class EpisodeEnded(NetworkEvent):
    """An episode ended, with the final network's results on validation data and `paid`, the sum of all rewards."""

    objective: float
    accuracy: float
    added: float
    paid: float
    kept: tuple[str | None, ...]
    """Blueprint of the fossil in each slot."""


@register_event("ppo_updated", version=3)
class PPOUpdated(Event):
    """The policy was updated; `metrics` are its figures, by the names of `esper.rl.ppo.FIGURES`."""

    optimizer_steps: int
    stopped_early: bool
    kl: float
    anomalies: tuple[str, ...]
    metrics: dict[str, float]


@register_event("anomaly_raised", version=2)
class AnomalyRaised(Event):
    """A policy update is not healthy: `anomaly` is the name of the problem, and `meaning` explains it in a sentence."""

    anomaly: str
    meaning: str
    figure: str
    """The metric that is out of bounds, named as in ``ppo_updated``."""
    value: float
    bound: float
    head: str | None = None
    """The head of the policy that is affected; None if it is not a single one."""
    response: str = "record"
    """``record``, ``skip`` (the update was undone) or ``stop``."""


@register_event("minibatch_recorded")
class MinibatchRecorded(Event):
    """Metrics of one minibatch of an update, recorded in the iterations after an anomaly.

    Metrics of heads are named ``figure/head``.
    """

    minibatch: int
    """Index of the minibatch in the update, from 0."""
    figures: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleValue:
    """How much one kept module adds to its network's score."""

    slot: int
    blueprint: str
    value: float | None
    """Shapley value; None where it is not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePair:
    """How much two kept modules of a network add together beyond what each adds alone."""

    first: int
    """The lower of the two slots."""
    second: int
    interaction: float


@register_event("interactions_measured")
class InteractionsMeasured(Event):
    """The values of the modules that the greedy policy kept in the network of a probe instance, alone and in pairs.

    The modules are the players of a cooperative game: a set of modules has the network's score on validation data with
    only this set switched on. The score is accuracy or, where the objective is the loss, its relative reduction.
    """

    instance: str
    family: str
    metric: str
    """``accuracy`` or ``loss_gone``."""
    modules: tuple[ModuleValue, ...]
    """The kept modules in the order of slots: ``slot``, ``blueprint``, and ``value``, the Shapley value (Shapley,
    1953); null where it is not finite."""
    pairs: tuple[ModulePair, ...]
    """Slots ``first`` and ``second``, and their ``interaction``, the Shapley interaction index (Grabisch and Roubens,
    1999), where it is finite: positive where they help each other, negative where one makes the other redundant."""
    exact: bool
    """Whether the scores of all sets were computed. With more than six modules, values and interactions are estimated
    from the networks without each module and each pair: exact if modules interact only in pairs."""


@register_event("policy_probed")
class PolicyProbed(Event):
    """Mean test scores of the greedy policy and of each baseline on the run's probe instances."""

    score: float
    baselines: dict[str, float]
