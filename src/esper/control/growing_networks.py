"""What controllers look at: a population of networks, or one model in somebody's own training loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from esper.growth.blueprints.registry import Blueprint
from esper.growth.site import Layout
from esper.lifecycle.table import Evidence, SeedTable
from esper.numerics.arrays import Bools, Floats, Ints
from esper.population.budget import Charge, Costs


class Offers(Protocol):
    """What E networks are, and the K blueprints on offer at each of their S slots."""

    @property
    def kinds(self) -> Sequence[type[Blueprint]]:
        """The K blueprints."""
        ...

    @property
    def costs(self) -> Costs:
        """What seeds would cost."""
        ...

    @property
    def compatible(self) -> Bools:
        """Whether a blueprint serves a slot, ``[E, S, K]``."""
        ...

    @property
    def widths(self) -> Ints:
        """Channels at each slot, ``[E, S]``."""
        ...

    @property
    def learning_rates(self) -> Floats:
        """``[E]``."""
        ...


class GrowingNetworks(Protocol):
    """E networks that grow."""

    @property
    def specs(self) -> Offers:
        """Who they are."""
        ...

    @property
    def table(self) -> SeedTable:
        """The state of every slot."""
        ...

    @property
    def evidence(self) -> Evidence:
        """What was measured of the seeds."""
        ...

    @property
    def host_parameters(self) -> Ints:
        """Parameters before any growth, ``[E]``."""
        ...

    @property
    def budget_left(self) -> Floats:
        """The share of the scarcest cap that is not spent yet, ``[E]``."""
        ...

    def slots_of_layout(self, layout: Layout) -> Bools:
        """Whether the slot's features have this layout, ``[E, S]``."""
        ...

    @property
    def charge(self) -> Charge:
        """What rent is paid on."""
        ...
