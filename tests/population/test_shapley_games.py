"""Shapley values and interactions of games with known answers, and their axioms on random ones."""

from itertools import chain, combinations, permutations
from math import factorial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.errors import ConfigError
from esper.numerics.arrays import Bools, Floats
from esper.population.shapley import (
    MOST_EXACT,
    ValueFunction,
    compute_shapley_interactions,
    compute_shapley_values,
    draw_antithetic_orders,
    list_coalitions,
    solve_by_pairs,
    solve_by_sampling,
    solve_exactly,
    solve_game,
)

SEEDS = st.integers(0, 2**32 - 1)
PLAYERS = st.integers(1, 6)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def table(worths: Floats) -> ValueFunction:
    """A game of n players whose worths ``[..., 2**n]`` are known."""

    def worth(coalitions: Bools) -> Floats:
        return worths[..., coalitions @ (1 << np.arange(coalitions.shape[1]))]

    return worth


def random_worths(players: int, seed: int, *games: int) -> Floats:
    return rng(seed).normal(size=(*games, 2**players))


def planted(players: int, seed: int = 0) -> tuple[Floats, Floats, ValueFunction]:
    """``v = a x + sum over i < j of b_ij x_i x_j``."""
    alone = rng(seed).normal(size=players)
    upper = np.triu(rng(seed + 1).normal(size=(players, players)), 1)

    def worth(coalitions: Bools) -> Floats:
        x = coalitions.astype(float)
        return x @ alone + np.einsum("vi,ij,vj->v", x, upper, x)

    return alone, upper + upper.T, worth


def by_permutations(worths: Floats) -> Floats:
    """Shapley's own definition: every order in which the players may join."""
    players = len(worths).bit_length() - 1
    values, orders = np.zeros(players), list(permutations(range(players)))
    for order in orders:
        coalition = 0
        for player in order:
            values[player] += worths[coalition | 1 << player] - worths[coalition]
            coalition |= 1 << player
    return values / len(orders)


def by_coalitions(worths: Floats) -> Floats:
    """The interaction index by its definition (Grabisch and Roubens, 1999), over sets of players."""
    players = len(worths).bit_length() - 1

    def worth(coalition: frozenset[int]) -> float:
        return float(worths[sum(1 << player for player in coalition)])

    index = np.zeros((players, players))
    for i, j in permutations(range(players), 2):
        others = [player for player in range(players) if player not in (i, j)]
        for chosen in chain.from_iterable(combinations(others, size) for size in range(len(others) + 1)):
            members = frozenset(chosen)
            weight = factorial(len(members)) * factorial(players - len(members) - 2) / factorial(players - 1)
            together = worth(members | {i, j}) - worth(members | {i}) - worth(members | {j}) + worth(members)
            index[i, j] += weight * together
    return index


@given(st.integers(2, 5), SEEDS)
def test_interactions_are_the_mean_second_difference_over_all_coalitions(players: int, seed: int) -> None:
    worths = random_worths(players, seed)
    np.testing.assert_allclose(compute_shapley_interactions(worths), by_coalitions(worths), atol=1e-12)


@pytest.mark.parametrize("players", [1, 2, 5, 9])
def test_pairs_are_enough_where_players_interact_in_pairs(players: int) -> None:
    alone, together, worth = planted(players)
    solution = solve_by_pairs(lambda coalitions: worth(coalitions) + 3.0, players)
    np.testing.assert_allclose(solution.interactions, together, atol=1e-12)
    np.testing.assert_allclose(solution.values, alone + together.sum(axis=1) / 2, atol=1e-12)
    assert np.isnan(solution.errors).all()
    assert (solution.empty_value, solution.grand_value) == (3.0, pytest.approx(3.0 + solution.values.sum()))


@given(st.integers(2, 7), SEEDS)
def test_pairs_are_second_differences_in_the_company_of_all(players: int, seed: int) -> None:
    worths, everyone = random_worths(players, seed, 2), 2**players - 1
    asked: list[Bools] = []

    def worth(coalitions: Bools) -> Floats:
        asked.append(coalitions)
        return table(worths)(coalitions)

    solution = solve_by_pairs(worth, players)
    for i, j in permutations(range(players), 2):
        without_i, without_j = worths[:, everyone - 2**i], worths[:, everyone - 2**j]
        expected = worths[:, -1] - without_i - without_j + worths[:, everyone - 2**i - 2**j]
        np.testing.assert_allclose(solution.interactions[:, i, j], expected, atol=1e-12)
    assert len(np.concatenate(asked)) == players * (players + 1) // 2 + 2


def test_without_a_generator_pairs_are_taken_where_there_are_too_many_for_all_coalitions() -> None:
    for players in (MOST_EXACT, MOST_EXACT + 1):
        worths = random_worths(players, 1)
        solution = solve_game(table(worths), players, None)
        expected = (solve_exactly if players == MOST_EXACT else solve_by_pairs)(table(worths), players)
        np.testing.assert_array_equal(solution.values, expected.values)
        np.testing.assert_array_equal(solution.interactions, expected.interactions)


@pytest.mark.parametrize("players", [1, 2, 3, 5, 6])
def test_in_an_additive_game_everyone_earns_what_he_adds(players: int) -> None:
    alone = rng().normal(size=players)
    solution = solve_game(lambda coalitions: coalitions @ alone + 3.0, players, rng())
    np.testing.assert_allclose(solution.values, alone, atol=1e-12)
    np.testing.assert_allclose(solution.interactions, np.zeros((players, players)), atol=1e-12)
    assert (solution.errors == 0).all()
    assert (solution.empty_value, solution.grand_value) == (3.0, pytest.approx(3.0 + alone.sum()))


@given(PLAYERS, SEEDS)
def test_values_are_the_mean_over_all_orders(players: int, seed: int) -> None:
    worths = random_worths(min(players, 5), seed)
    np.testing.assert_allclose(compute_shapley_values(worths), by_permutations(worths), atol=1e-12)


@given(st.integers(2, 6), SEEDS, st.data())
def test_a_dummy_earns_exactly_nothing_and_changes_nothing(players: int, seed: int, data: st.DataObject) -> None:
    dummy = data.draw(st.integers(0, players - 1))
    others = [player for player in range(players) if player != dummy]
    smaller = random_worths(players - 1, seed)
    worths = table(smaller)(list_coalitions(players)[:, others])
    values, interactions = compute_shapley_values(worths), compute_shapley_interactions(worths)
    assert values[dummy] == 0
    assert (interactions[dummy] == 0).all()
    np.testing.assert_allclose(values[others], compute_shapley_values(smaller), atol=1e-12)
    np.testing.assert_allclose(interactions[np.ix_(others, others)], compute_shapley_interactions(smaller), atol=1e-12)


@pytest.mark.parametrize("players", [7, 8])
def test_estimates_lie_within_their_errors(players: int) -> None:
    worths = random_worths(players, 3, 5)
    found = solve_game(table(worths), players, rng(1))
    assert (found.errors > 0).all()
    assert found.interactions is None
    assert (np.abs(found.values - compute_shapley_values(worths)) < 4 * found.errors).all()


def test_the_standard_error_is_what_repetitions_scatter_by() -> None:
    players, repetitions = 7, 400
    worths = random_worths(players, 3)
    found = [solve_game(table(worths), players, rng(seed), pairs=16) for seed in range(repetitions)]
    values = np.stack([one.values for one in found])
    errors = np.stack([one.errors for one in found])
    np.testing.assert_allclose(np.sqrt((errors**2).mean(0)), values.std(axis=0, ddof=1), rtol=0.15)
    within = (np.abs(values - compute_shapley_values(worths)) < 2 * errors).mean()
    assert 0.90 < within < 0.97  # Student's t of 15 degrees of freedom: 0.936


def test_values_add_up_order_by_order() -> None:
    worths = random_worths(8, 4, 2)
    for pairs in (2, 5):
        values = solve_game(table(worths), 8, rng(), pairs).values
        np.testing.assert_allclose(values.sum(-1), worths[:, -1] - worths[:, 0], atol=1e-12)


def test_an_order_and_its_reverse_are_exact_where_players_interact_in_pairs() -> None:
    alone, together, worth = planted(9)
    found = solve_game(worth, 9, rng(), pairs=2)
    np.testing.assert_allclose(found.values, alone + together.sum(axis=1) / 2, atol=1e-12)
    np.testing.assert_allclose(found.errors, 0, atol=1e-12)


def test_sampling_gives_dummies_exactly_nothing() -> None:
    worths = table(random_worths(7, 5))
    found = solve_by_sampling(lambda coalitions: worths(coalitions[:, 1:]), 8, rng(), 4)
    assert (found.values[0], found.errors[0]) == (0, 0)
    assert (found.values[1:] != 0).all()


def test_every_order_has_its_reverse_and_any_is_as_likely() -> None:
    orders = draw_antithetic_orders(3, 6000, rng())
    np.testing.assert_array_equal(orders[1::2], orders[::2, ::-1])
    _, counts = np.unique(orders[::2], axis=0, return_counts=True)
    assert len(counts) == 6
    assert (np.abs(counts - 1000) < 150).all()


def test_the_generator_alone_decides_and_is_left_alone_where_values_are_exact() -> None:
    worths = random_worths(7, 6)
    first, second, third = (solve_game(table(worths), 7, rng(seed)).values for seed in (1, 1, 2))
    assert (first == second).all()
    assert (first != third).any()
    used = rng(1)
    solve_game(table(random_worths(MOST_EXACT, 6)), MOST_EXACT, used)
    assert used.random() == rng(1).random()


def test_no_standard_error_without_two_pairs() -> None:
    for players in (3, 7):
        with pytest.raises(ConfigError, match="1 pairs of orders give no standard error: set at least 2"):
            solve_game(table(random_worths(players, 0)), players, rng(), pairs=1)


def test_without_players_nothing_is_earned() -> None:
    found = solve_game(lambda coalitions: np.full(len(coalitions), 0.5), 0, rng())
    assert found.values.shape == (0,)
    assert found.empty_value == found.grand_value == 0.5
