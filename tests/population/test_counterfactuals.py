"""Leave-one-out measurements: the fused pass equals separate passes, whatever the host."""

import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from esper.engine.measurements import Evaluation
from esper.lifecycle.actions import Op, make_action, make_wait_actions
from esper.lifecycle.rules import Isolation
from esper.lifecycle.table import SeedTable, Stage
from esper.population.evaluation import evaluate, evaluate_committed
from esper.population.forward import append_branches
from esper.population.learning import Batch, compute_accuracies, compute_losses, train
from esper.population.population import Population, Strategy
from esper.tasks.token_suite import TokenLayer
from factories import Chain, InputSkip, Residual, make_small_population
from population.scenes import draw_small, grow_small, grown, record_measurements
from reference_population import ReferencePopulation

TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}


def separately(slow: ReferencePopulation, table: SeedTable, batch: Batch) -> Evaluation:
    """One pass for the networks as they are, and one for each slot toggled."""

    def measured(alphas: dict[tuple[int, int], float]) -> tuple[Tensor, Tensor, Tensor]:
        logits = slow.logits(batch.inputs, alphas)
        return compute_losses(logits, batch.labels), compute_accuracies(logits, batch.labels), logits

    def error_of_difference(network: int, first: Tensor, second: Tensor, figure: Callable[..., Tensor]) -> float:
        """Example by example, each as a minibatch of its own."""
        differences: list[float] = []
        for example in range(batch.labels.shape[1]):
            one = slice(example, example + 1)
            labels = batch.labels[network, None, one]
            pair = [float(figure(logits[network, None, one], labels)) for logits in (first, second)]
            differences.append(pair[0] - pair[1])
        return statistics.stdev(differences) / math.sqrt(len(differences))

    loss, accuracy, logits = measured({})
    by_accuracy, by_loss, accuracy_error, loss_error = (np.full(table.stage.shape, np.nan) for _ in range(4))
    for slot in range(table.slots):
        own = [network for network in range(table.environments) if table.owning[network, slot]]
        toggled = {(network, slot): 0.0 if table.blended[network, slot] else 1.0 for network in own}
        other_loss, other_accuracy, other_logits = measured(toggled)
        for network in own:
            sign = 1 if table.blended[network, slot] else -1
            by_loss[network, slot] = sign * float(other_loss[network] - loss[network])
            by_accuracy[network, slot] = sign * float(accuracy[network] - other_accuracy[network])
            accuracy_error[network, slot] = error_of_difference(network, logits, other_logits, compute_accuracies)
            loss_error[network, slot] = error_of_difference(network, logits, other_logits, compute_losses)
    everywhere = np.ones(table.stage.shape, np.bool_)
    return Evaluation(loss.numpy(), accuracy.numpy(), by_accuracy, by_loss, accuracy_error, loss_error, everywhere)


FIGURES = ("loss", "accuracy", "accuracy_contribution", "loss_contribution", "accuracy_error", "loss_error", "fresh")


def assert_same(actual: Evaluation, expected: Evaluation) -> None:
    assert actual.progress is expected.progress is None
    for name in FIGURES:
        np.testing.assert_allclose(getattr(actual, name), getattr(expected, name), **TOLERANCE, err_msg=name)


@pytest.mark.parametrize("strategy", ["stacked", "looped"])
@pytest.mark.parametrize("isolation", list(Isolation))
def test_the_fused_pass_equals_separate_passes(isolation: Isolation, strategy: Strategy) -> None:
    fast, slow, batch = grown(isolation, strategy)
    assert fast.shares_prefixes
    expected = separately(slow, fast.table, batch)
    assert np.nanmax(np.abs(expected.loss_contribution)) > 1e-3, "the test means to measure something"
    assert (np.isfinite(expected.loss_contribution) == fast.table.owning).all()
    assert_same(evaluate(fast, batch), expected)
    fast.shares_prefixes = False
    assert_same(evaluate(fast, batch), expected)


def test_committed_networks_have_fossils_only() -> None:
    fast, slow, batch = grown(Isolation.NONE, "stacked")
    fossils = fast.table.stage == Stage.FOSSILIZED
    assert fossils.any()
    assert (fast.table.blended & ~fossils).any()
    off = {where: 0.0 for where in slow.seeds if not fossils[where]}
    expected = compute_accuracies(slow.logits(batch.inputs, off), batch.labels)
    np.testing.assert_allclose(evaluate_committed(fast, batch).accuracy, expected.numpy(), **TOLERANCE)


@pytest.mark.parametrize("measure", [evaluate, evaluate_committed])
def test_evaluating_keeps_nothing_for_gradients(
    measure: Callable[[Population, Batch], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[bool] = []

    def watched(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
        kept.append(not logits.is_inference())
        return cross_entropy(logits, labels, **options)

    cross_entropy = torch.nn.functional.cross_entropy
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", watched)
    fast, _, batch = grown(Isolation.NONE, "stacked")
    kept.clear()
    measure(fast, batch)
    assert kept == [False]


def test_evaluating_changes_nothing() -> None:
    fast, _, batch = grown(Isolation.NONE, "stacked")
    before = [block.values.detach().clone() for block in fast.flat.blocks]
    first = evaluate(fast, batch)
    assert_same(evaluate(fast, batch), first)
    assert all(
        torch.equal(block.values.detach(), values) for block, values in zip(fast.flat.blocks, before, strict=True)
    )


@pytest.mark.parametrize("isolation", [Isolation.NONE, Isolation.SHADOW])
def test_only_what_is_due_is_measured(isolation: Isolation) -> None:
    fast, _, batch = grown(isolation, "stacked")
    whole, owning = evaluate(fast, batch), fast.table.owning
    due = np.random.default_rng(3).random(owning.shape) < 0.5
    assert (owning & due).any()
    assert (owning & ~due).any()
    found = evaluate(fast, batch, due)
    np.testing.assert_allclose(found.loss, whole.loss, **TOLERANCE)
    for name in ("accuracy_contribution", "loss_contribution", "accuracy_error", "loss_error"):
        np.testing.assert_allclose(
            vars(found)[name], np.where(due, vars(whole)[name], np.nan), **TOLERANCE, err_msg=name
        )
    assert (found.fresh == due).all()
    assert whole.fresh.all()
    known = np.full(owning.shape, 7.0)
    completed = found.fill_missing(accuracy_contribution=known, loss_contribution=-known)
    np.testing.assert_array_equal(completed.loss_contribution, np.where(due, found.loss_contribution, -7.0))
    np.testing.assert_array_equal(completed.accuracy_contribution, np.where(due, found.accuracy_contribution, 7.0))


@pytest.mark.parametrize(
    ("slots", "passed"),
    [((0, 1, 2), [1, 2, 3]), ((), [1, 1, 1]), ((0,), [1, 2, 2]), ((1,), [1, 1, 2]), ((2,), [1, 1, 1])],
)
@pytest.mark.few(1)
def test_a_slot_costs_what_lies_behind_it_if_it_is_due(
    slots: tuple[int, ...], passed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in examples that pass the host's three layers, one before each slot, in units of the batch."""
    fast, _, batch = grown(Isolation.NONE, "stacked")
    assert fast.table.owning.any(axis=0).all()
    due = np.zeros(fast.table.stage.shape, np.bool_)
    due[:, slots] = True
    seen: list[int] = []
    activate = TokenLayer.activate

    def counted(layer: TokenLayer, x: Tensor) -> Tensor:
        seen.append(x.shape[-3])
        return activate(layer, x)

    monkeypatch.setattr(TokenLayer, "activate", counted)
    evaluate(fast, batch, due)
    assert seen == [blocks * batch.labels.shape[1] for blocks in passed]


@pytest.mark.parametrize("parents", [(), (1,), (0, 0), (2, 0)])
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1)])
def test_branches_are_copies_laid_out_as_what_they_branch_from(
    parents: tuple[int, ...], order: tuple[int, int, int]
) -> None:
    shape = np.array((2, 6, 5))[list(order)].tolist()
    batch = torch.arange(60.0).reshape(shape).permute(order)
    before = batch.clone()
    found = append_branches(batch, parents, 2)
    assert torch.equal(found, torch.cat([batch, *(batch[:, 2 * one : 2 * one + 2] for one in parents)], dim=1))
    assert sorted(range(3), key=lambda axis: -found.stride(axis)) == list(order)
    found.zero_()
    assert torch.equal(batch, before)


@pytest.mark.parametrize(
    ("kind", "slots", "shares"),
    [
        (Chain, ("first", "second"), True),
        (Chain, ("second", "first"), False),  # slots that are not passed in their order
        (Residual, ("first", "second"), False),
        (InputSkip, ("first", "second"), False),
    ],
)
def test_connections_across_slots_are_found_and_measured_exactly(
    kind: type[Chain], slots: tuple[str, ...], shares: bool
) -> None:
    shared, hosts = make_small_population(kind, 3)
    fast, slow = grow_small(replace(shared, slots=slots), hosts)
    assert fast.shares_prefixes is shares
    batch = draw_small(40, 9)
    assert_same(evaluate(fast, batch), separately(slow, fast.table, batch))


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("due", [True, False])
def test_slots_without_seeds_are_not_a_number(finite: bool, due: bool) -> None:
    """A newborn is probed whether it is due or not, and contributes nothing."""
    shared, hosts = make_small_population(Chain, 2)
    population = Population(replace(shared, blueprints=("mlp",)), hosts)
    population.decide(np.stack([make_action(Op.GERMINATE, 1, 0), make_wait_actions(1)[0]]))
    batch = Batch(torch.zeros(2, 6, 4, dtype=torch.float64), torch.zeros(2, 6, dtype=torch.int64))
    result = evaluate(population, batch)
    assert np.isfinite(result.loss_contribution).tolist() == [[False, True], [False, False]]
    assert result.loss_contribution[0, 1] == 0
    report = train(population, [batch])
    if not finite:
        with torch.no_grad():
            for bank in population.banks.values():
                bank.block.values.fill_(torch.nan)
    record_measurements(population, report, evaluate(population, batch, np.full(population.table.stage.shape, due)))
    assert population.measurements.probed.tolist() == [[False, finite], [False, False]]
    assert np.isfinite(population.measurements.contribution).tolist() == [[False, finite and due], [False, False]]
