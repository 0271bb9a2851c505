"""Plain figures are what they say, and Holm's correction bounds the chance of any false alarm."""

import numpy as np
import pytest

from esper.lab.analysis import holm, interquartile_mean, probability_of_improvement


def test_ties_count_half():
    first, second = np.array([[1.0, 1.0, 0.0, 0.0]]), np.array([[0.0, 1.0, 1.0, 0.0]])
    assert probability_of_improvement(first, second, paired=True) == 0.5
    assert probability_of_improvement(first + 2, first, paired=True) == 1


def test_paired_seeds_meet_each_other_and_unpaired_ones_everyone():
    first, second = np.array([[1.0], [3.0]]), np.array([[0.0], [2.0]])
    assert probability_of_improvement(first, second, paired=True) == 1
    assert probability_of_improvement(first, second, paired=False) == 0.75
    assert probability_of_improvement(first, second[1:], paired=True) == 0.5


def test_holm_is_the_textbook_example():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.7, 0.6]) == [1.0, 1.0]
    assert holm([]) == []


def test_the_interquartile_mean_ignores_the_tails():
    values = np.array([[-1e6, 0.0, 1.0, 2.0], [3.0, 1e6, 1.5, 1.5]])
    assert interquartile_mean(values) == pytest.approx(np.mean([1.0, 1.5, 1.5, 2.0]))
