"""What the growth engine needs of networks: a population of them as one program, or one model in a user's loop."""

from __future__ import annotations

from typing import Protocol

from esper.engine.governor import Restorable
from esper.engine.measurements import Evaluation, Measurement, TrainingReport
from esper.engine.observation import GrowingNetworks
from esper.growth.promise import Promises
from esper.lifecycle.legality import ActionMasks
from esper.lifecycle.table import SeedMeasurements
from esper.lifecycle.transitions import Step
from esper.numerics.arrays import Bools, Ints
from esper.numerics.deferred import Deferred


class ManagedNetworks(GrowingNetworks, Protocol):
    """E networks with the lifecycle of their slots, on which actions are carried out."""

    @property
    def measurements(self) -> SeedMeasurements:
        """What was measured of the modules; the engine sets it."""
        ...

    @measurements.setter
    def measurements(self, measured: SeedMeasurements) -> None: ...

    def legal_actions(self) -> ActionMasks:
        """The actions that rules, measurements and budget allow now."""
        ...

    def decide(self, actions: Ints) -> Step:
        """Take one action per network, int64 ``[E, 8]``, and let all other slots live on; all of it or nothing."""
        ...


class GrowthBackend(Restorable, Protocol):
    """E networks that the engine can measure, snapshot and restore. Training them is not its business."""

    @property
    def networks(self) -> ManagedNetworks:
        """The networks with their lifecycle tables."""
        ...

    @property
    def skills(self) -> int:
        """M, how many measures of skill a measurement has."""
        ...

    @property
    def chance_level(self) -> tuple[float, float]:
        """Loss and score of networks that guess, as far as they are known."""
        ...

    def start_measurement(
        self, training: Deferred[TrainingReport], due: Bools, *, check_finite: bool
    ) -> Deferred[Measurement]:
        """Measure the networks and the modules in the slots ``due``, bool ``[E, S]``, after that training.

        ``check_finite``: whether to look for parameters and moments that are not finite.
        """
        ...

    def evaluate(self, due: Bools) -> Evaluation:
        """Measure the networks as they are now, with the modules in the slots ``due``, bool ``[E, S]``."""
        ...

    def measure_promises(self, due: Bools) -> Promises:
        """Measure what blueprints promise in the slots ``due``, bool ``[E, S]``."""
        ...
