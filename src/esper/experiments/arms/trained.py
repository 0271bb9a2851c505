"""The policy of one training seed, what it does on a contest's instances, and the arms that follow from that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from esper.control.rules.simple import shuffle_actions
from esper.experiments.arms.fixed import FixedNetwork, train_fixed
from esper.experiments.arms.flops import TRAINING_PASSES, Prices, examples_per_decision
from esper.experiments.arms.outcome import ArmRecords, Outcome, Shown, shown
from esper.experiments.arms.search import search_sequence
from esper.experiments.evaluate import load_policy
from esper.experiments.play import Played, play, terms_of
from esper.experiments.run_directory import RunDirectory
from esper.experiments.settings import TrainSettings
from esper.experiments.summary import summarise
from esper.experiments.tallies import side_by_side
from esper.experiments.workers import Workers
from esper.tasks.instance import Instance
from esper.tasks.registry import get_suite
from esper.telemetry.reader import RunReader
from esper.training.roster import Fossils

SEQUENCE = "sequence"
STATIC = "static"
STATIC_EQUAL_FLOPS = "static_equal_flops"
NONE_EQUAL_FLOPS = "none_equal_flops"
_SHUFFLE_STREAM = 23


class Trained:
    """A run that is done, on the instances of a contest; ``spent`` is told the environment steps of searches.

    Raises:
        CheckpointError, RunError: the run has no usable policy, or its store is damaged.
    """

    def __init__(
        self,
        run: RunDirectory,
        settings: TrainSettings,
        instances: Sequence[Instance],
        workers: Workers,
        spent: Callable[[int], None],
    ) -> None:
        self._settings = settings
        self._suite = get_suite(settings.suite)
        self._terms = terms_of(settings)
        self._instances = instances
        self._workers = workers
        self._spent = spent
        self._policy = load_policy(run, settings)
        self.sha256 = self._policy.sha256
        """Of the policy's checkpoint."""
        with RunReader.open(run.store) as reader:
            self.environment_steps = summarise(reader).environment_steps
            """Of the policy's training, a start by imitation included."""

    @cached_property
    def _played(self) -> Played:
        return play(self._workers, [self._policy.controller], self._terms, self._instances)[0]

    @cached_property
    def _shown(self) -> Shown:
        return shown(self._played, self._suite)

    def policy(self) -> ArmRecords:
        """The policy itself."""
        return ArmRecords(self.environment_steps, self._shown.outcomes)

    def shuffled(self) -> ArmRecords:
        """The policy's own actions, each instance's played on another one."""
        rng = np.random.default_rng((self._settings.seed, _SHUFFLE_STREAM))
        controller = shuffle_actions(
            side_by_side(self._played.tallies), [instance.seed for instance in self._instances], rng
        )
        played = play(self._workers, [controller], self._terms, self._instances)[0]
        return ArmRecords(self.environment_steps, shown(played, self._suite).outcomes)

    def sequence(self) -> ArmRecords:
        """The best fixed sequence found with the policy's own budget."""
        found = search_sequence(self._terms, self.environment_steps, self._settings.seed, self._workers, self._spent)
        played = play(self._workers, [found.sequence], self._terms, self._instances)[0]
        return ArmRecords(found.environment_steps, shown(played, self._suite).outcomes)

    def static(self) -> ArmRecords:
        """The policy's final networks from scratch, for the same minibatches."""
        lengths = np.concatenate([np.sum(tally.running, axis=0) for tally in self._played.tallies])
        outcomes = self._fixed(STATIC, self._final_fossils, lengths.tolist())
        return ArmRecords(self.environment_steps, outcomes)

    def static_equal_flops(self) -> ArmRecords:
        """The policy's final networks from scratch, for as many FLOPs as the policy's networks took to train."""
        fossils = self._final_fossils
        outcomes = self._fixed(STATIC_EQUAL_FLOPS, fossils, self._affordable(fossils))
        return ArmRecords(self.environment_steps, outcomes)

    def none_equal_flops(self) -> ArmRecords:
        """Hosts that never grow, for as many FLOPs as the policy's networks took to train."""
        bare: list[Fossils] = [()] * len(self._instances)
        return ArmRecords(0, self._fixed(NONE_EQUAL_FLOPS, bare, self._affordable(bare)))

    @property
    def _final_fossils(self) -> list[Fossils]:
        return [fossils for slots in self._shown.slots for fossils in slots.fossils]

    def _affordable(self, fossils: Sequence[Fossils]) -> list[int]:
        """Decisions for which each network can be trained with what its instance cost the policy, to the nearest."""
        prices, examples = Prices(self._suite), examples_per_decision(self._suite)
        return [
            max(round(outcome.flops / (TRAINING_PASSES * examples * prices.network(instance, own))), 1)
            for outcome, instance, own in zip(self._shown.outcomes, self._instances, fossils, strict=True)
        ]

    def _fixed(self, arm: str, fossils: Sequence[Fossils], decisions: Sequence[int]) -> list[Outcome]:
        networks = [FixedNetwork(*one) for one in zip(self._instances, fossils, decisions, strict=True)]
        return train_fixed(self._workers, self._terms, arm, networks)
