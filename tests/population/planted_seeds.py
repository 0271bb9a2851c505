"""Trained networks that have a useful, a useless and a harmful seed each."""

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from esper.lifecycle.actions import Op, make_action, make_wait_actions
from esper.population.learning import Batch, stack_data, train
from esper.population.population import Actions, Population
from open_rules import open_rules
from population.scenes import SUITE, good_measurements, networks, plan

CPU = torch.device("cpu")
Slots = NDArray[np.int64]


class Planted(NamedTuple):
    """A population, validation data, and the slot of each kind of seed in each network, ``[E]``."""

    population: Population
    batch: Batch
    useful: Slots
    useless: Slots
    harmful: Slots


@cache
def planted_seeds() -> Planted:
    """Three networks that cannot tell the order of tokens, each with its seeds in other slots.

    The useful seed mixes tokens and learns with its host. The others are perceptrons, born late and not trained: one
    contributes nothing yet, the other has got weights that ruin the features.
    """
    drawn = SUITE.sample(600, "train", np.random.default_rng(5))
    chosen = [one for one in drawn if one.variant == "near_10_10_10" and one.train_size == 768][:3]
    population = Population(plan(open_rules(), dtype=torch.float32), networks(chosen))
    useful, useless, harmful = np.stack([np.roll([0, 1, 2], network) for network in range(3)], axis=1)
    data = stack_data([SUITE.data(one, "train") for one in chosen], CPU)
    generator = torch.Generator().manual_seed(0)

    def decide(actions: Actions) -> None:
        population.measurements = good_measurements(population)
        population.decide(actions)

    def minibatch() -> Batch:
        drawn = torch.randint(data.labels.shape[1], (32,), generator=generator)
        return Batch(data.inputs[:, drawn], data.labels[:, drawn])

    decide(_germinate(useful, "token_mix"))
    for _ in range(5):
        decide(make_wait_actions(3))
        train(population, [minibatch() for _ in range(20)])
    decide(_germinate(useless, "mlp"))
    decide(_germinate(harmful, "mlp"))
    for _ in range(5):
        decide(make_wait_actions(3))
    assert (population.table.blended & (population.table.alpha == 1)).all()
    for kind, bank in population.banks.items():
        for row in np.flatnonzero(harmful[bank.block.owners.numpy()] == kind.slot):
            with torch.no_grad():
                bank.block.values[row].normal_(std=1.0, generator=generator)
    validation = stack_data([SUITE.data(one, "validation") for one in chosen], CPU)
    return Planted(population, validation, useful, useless, harmful)


def _germinate(slots: Slots, blueprint: str) -> Actions:
    return np.stack([make_action(Op.GERMINATE, slot, SUITE.blueprints.index(blueprint)) for slot in slots])
