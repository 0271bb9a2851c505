"""What happens to growing networks.

Stages, operations, causes, reasons and blueprints are given by name, in lower case. Slots are given by their index; the
run's metadata ``slots`` holds their names. In training, an episode has the number of its iteration; a model that grows
alone has the single episode 1.
"""

from dataclasses import dataclass, field

from esper.telemetry.events.record import Event, register


@dataclass(frozen=True, slots=True)
class NetworkEvent(Event):
    """Base of events of one network; `step` counts the episode's decisions from 0."""

    episode: int
    environment: int
    step: int


@register("episode_started")
@dataclass(frozen=True, slots=True)
class EpisodeStarted(NetworkEvent):
    """A network begins to learn a problem; `instance` is its name, `rent` the price of growth."""

    instance: str
    family: str
    variant: str
    rent: float
    learning_rate: float
    train_size: int
    widths: tuple[int, ...]
    host_parameters: int


@register("step_taken", version=2)
@dataclass(frozen=True, slots=True)
class StepTaken(NetworkEvent):
    """A decision, and how the network stood after the minibatches that followed it.

    `metric` is what growth is about, in its own units: accuracy on validation data, unless the run's metadata
    ``metric`` name another figure. The *score* is that figure or, where ``higher_is_better`` is false, the share of
    its ``reference`` that is gone. Contributions are differences of scores; `objective` is J, the whole network's score
    less rent. `loss` is on validation data, in nats where it is a cross-entropy; `added` are the seeds' parameters over
    the host's. Tuples have an entry per slot. Of a model that grows alone, the figures are those that the decision was
    made on.
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
    """How much the network depends on each seed: its score less that with the seed switched off (leave-one-out). Of
    seeds on trial where the metadata's ``evidence`` is ``refit``, less that of a fork that trains on without the seed.
    None without a seed, or where it was not measured."""
    slot: int | None = None
    blueprint: str | None = None
    """What was germinated."""
    choices: dict[str, str] = field(default_factory=dict[str, str])
    """Of the other heads that the operation reads, by head."""
    value: float | None = None
    """The policy's estimate of what it will still be paid; None for rules."""
    log_prob: float | None = None
    """Of the whole action, under the policy."""
    reward: float | None = None
    """None for a model that grows alone."""
    terms: dict[str, float] = field(default_factory=dict[str, float])
    """What the reward is the sum of, where it is not 0."""
    train_loss: float | None = None


@register("policy_looked")
@dataclass(frozen=True, slots=True)
class PolicyLooked(NetworkEvent):
    """What the policy saw before a decision, and how likely it found each choice; of watched networks only.

    The run's metadata ``features`` names the last axes of the observation.
    """

    globals: tuple[float, ...]
    slots: tuple[tuple[float, ...], ...]
    """One token per slot."""
    blueprints: tuple[tuple[tuple[float, ...], ...], ...]
    """Per slot and blueprint."""
    probabilities: dict[str, tuple[float, ...]]
    """Per head that the decision read, given the choices before it; 0 for what was not legal."""


@register("lifecycle_transition", version=2)
@dataclass(frozen=True, slots=True)
class LifecycleTransition(NetworkEvent):
    """A slot changed its stage."""

    slot: int
    before: str
    after: str
    blueprint: str | None
    """Of the seed that came, stayed or went; None in a cooldown."""
    cause: str
    """An operation, ``tick``, ``rollback``, ``start``, or ``finish``: judged at the end of growth."""
    reason: str
    """What the gate before the new stage said."""
    contribution: float | None = None
    """The seed's contribution, as in ``step_taken``, as it was known then."""


@register("gate_judged")
@dataclass(frozen=True, slots=True)
class GateJudged(NetworkEvent):
    """The gate ahead of a seed changed its verdict."""

    slot: int
    gate: str
    passed: bool
    reason: str


@register("rolled_back", version=3)
@dataclass(frozen=True, slots=True)
class RolledBack(NetworkEvent):
    """The governor returned a network to its last good state; loss and metric are as in ``step_taken``."""

    trouble: str
    loss_before: float
    metric_before: float
    loss_after: float
    metric_after: float
    pruned: tuple[int, ...]
    """Slots whose seeds are gone."""
    ended: bool
    """It was one too many: the episode is over."""


@register("episode_ended")
@dataclass(frozen=True, slots=True)
class EpisodeEnded(NetworkEvent):
    """An episode is over: what was committed, on validation data, and what the controller was paid in all."""

    objective: float
    accuracy: float
    added: float
    paid: float
    kept: tuple[str | None, ...]
    """Blueprint of the fossil in each slot."""
