"""The suite of language models: what its languages are, and that no host reads what is still to come."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch

import esper
from esper.errors import TaskError
from esper.tasks.instance import PARTS, Instance
from esper.tasks.language_suite import (
    ALPHABET,
    FAVOURED,
    FULL,
    LENGTH,
    POSITIONS,
    SYMBOLS,
    Block,
    Sampler,
    Shape,
    TextName,
    list_windows,
    read_text,
    sample_brackets,
    sample_chain,
    sample_counts,
    sample_keyed_chain,
    sample_repetition,
    sample_sums,
    sample_text,
    sample_topics,
)
from esper.tasks.registry import get_suite

SUITE = get_suite("language")
COUNT = 40


def draw_instances() -> list[Instance]:
    rng = np.random.default_rng(0)
    families = SUITE.families + SUITE.transfer_families
    return [SUITE.draw(family, variant, 1, rng) for family in families for variant in SUITE.variants(family)]


def sample(sampler: Sampler) -> list[list[int]]:
    sequences = sampler(COUNT, np.random.default_rng(0), np.random.default_rng(1))
    assert sequences.shape == (COUNT, LENGTH)
    assert sequences.min() >= 0
    assert sequences.max() < SYMBOLS
    return sequences.tolist()


def hidden_names() -> list[int]:
    """The order in which the languages of `sample` use symbols."""
    return np.random.default_rng(0).permutation(SYMBOLS).tolist()


# Hosts


@pytest.mark.parametrize("blueprint", [None, *SUITE.blueprints])
@pytest.mark.few(2)
def test_no_logit_depends_on_a_later_symbol(blueprint: str | None) -> None:
    for instance in {SUITE.parameters(one): one for one in draw_instances()}.values():
        inputs = SUITE.data(instance, "validation").inputs[:3].double()
        model = esper.attach(SUITE.host(instance).double(), dict.fromkeys(SUITE.sites, SUITE.blueprints), inputs)
        assert all(model.slots[site].site.causal for site in SUITE.sites)
        if blueprint is not None:
            for site in SUITE.sites:
                seed = model.slots[site].germinate(blueprint, torch.Generator().manual_seed(0))
                seed.alpha.fill_(1.0)
                for parameter in seed.parameters():  # nothing is the identity any more
                    parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)).double()
        before = model(inputs)
        for place in (0, POSITIONS // 2, POSITIONS - 1):
            changed = inputs.clone()
            changed[:, place:] = inputs[:, place:].roll(1, -1)
            after = model(changed)
            assert torch.equal(after[:, :place], before[:, :place])
            assert not torch.allclose(after[:, place], before[:, place])


def test_hosts_have_two_to_four_blocks_and_thousands_of_parameters() -> None:
    depths: set[int] = set()
    for instance in draw_instances():
        host, tokens = SUITE.host(instance), torch.randn(2, POSITIONS, instance.widths[0])
        blocks = [host.get_submodule(site) for site in SUITE.sites]
        depths.add(sum(not torch.equal(block(tokens), tokens) for block in blocks))
        assert 5_000 < SUITE.parameters(instance) < 50_000
    assert depths == {2, 3, 4}


def test_a_block_of_zeros_is_the_identity_and_stays_so() -> None:
    absent = Block(Shape(32, (0,), (0,)), 0, torch.Generator())
    assert sum(parameter.numel() for parameter in absent.parameters()) == 0
    padded = Block(FULL, 0, torch.Generator())
    for parameter in padded.parameters():
        parameter.data.zero_()
    tokens = torch.randn(2, POSITIONS, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(padded(tokens), tokens)
    assert torch.equal(absent(tokens), tokens)
    padded(tokens).square().sum().backward()
    assert not any(parameter.grad.any() for parameter in padded.parameters())


# Languages


def test_labels_are_the_next_symbols() -> None:
    for instance in draw_instances():
        data = SUITE.data(instance, "test")
        assert torch.equal(data.inputs.argmax(-1)[:, 1:], data.labels[:, :-1])


def test_at_most_three_symbols_follow_a_context_of_a_chain() -> None:
    follows: dict[tuple[int, int], set[int]] = {}
    for sequence in sample(partial(sample_chain, order=2, symbols=4)):
        for first, second, third in zip(sequence, sequence[1:], sequence[2:], strict=False):
            follows.setdefault((first, second), set()).add(third)
    assert max(map(len, follows.values())) <= 3
    assert len(follows) == 16


@pytest.mark.parametrize("periods", [(5,), (2, 3, 4)])
def test_sequences_repeat_with_a_period_of_their_own(periods: tuple[int, ...]) -> None:
    found: set[int] = set()
    for sequence in np.array(sample(partial(sample_repetition, periods=periods))):
        agreement = {period: float((sequence[period:] == sequence[:-period]).mean()) for period in range(2, 7)}
        best = max(agreement, key=lambda period: agreement[period])
        assert agreement[best] > 0.5
        found.add(best)
    assert found == set(periods)


def test_brackets_close_the_last_one_open() -> None:
    kinds, deepest = 3, 2
    names = hidden_names()
    depths: set[int] = set()
    for sequence in sample(partial(sample_brackets, kinds=kinds, deepest=deepest)):
        stack: list[int] = []
        for symbol in map(names.index, sequence):
            if symbol < kinds:
                stack.append(symbol)
            else:
                assert symbol == kinds + stack.pop()
            depths.add(len(stack))
    assert depths == set(range(deepest + 1))


def test_most_digits_are_the_sum_of_the_two_before() -> None:
    names, right = hidden_names(), 0
    for sequence in sample(partial(sample_sums, base=5)):
        digits = [names.index(symbol) for symbol in sequence]
        assert max(digits) < 5
        right += sum((a + b) % 5 == c for a, b, c in zip(digits, digits[1:], digits[2:], strict=False))
    assert right / (COUNT * (LENGTH - 2)) > 0.9


def test_words_that_count_have_as_many_of_each_letter() -> None:
    names = hidden_names()
    found: set[int] = set()
    for sequence in sample(partial(sample_counts, letters=3, most=4)):
        symbols = [names.index(symbol) for symbol in sequence]
        ends = [place for place, symbol in enumerate(symbols) if symbol == SYMBOLS - 1]
        for start, end in pairwise([-1, *ends]):
            word = symbols[start + 1 : end]
            kind, times = word[0] // 3, len(word) // 3
            assert word == sorted([3 * kind, 3 * kind + 1, 3 * kind + 2] * times)
            found.add(times)
    assert found == {1, 2, 3, 4}


def test_the_first_symbol_chooses_the_successors() -> None:
    follows: dict[tuple[int, int], set[int]] = {}
    for key, *chain in sample(partial(sample_keyed_chain, keys=2, symbols=4)):
        assert key not in chain
        for first, second in pairwise(chain):
            follows.setdefault((key, first), set()).add(second)
    assert len(follows) == 8
    assert max(map(len, follows.values())) <= 3
    first, second = sorted({key for key, _ in follows})
    assert any(follows[first, symbol] != follows[second, symbol] for key, symbol in follows if key == first)


def test_a_topic_favours_some_symbols() -> None:
    for sequence in sample(partial(sample_topics, topics=1)):
        expected = np.random.default_rng(0).permutation(SYMBOLS)[:FAVOURED]
        assert np.isin(sequence, expected).mean() > 0.4


@pytest.mark.parametrize("name", ["help", "sources"])
def test_windows_of_a_text_come_in_its_order_and_only_once(name: TextName) -> None:
    windows = list_windows(name)
    assert not windows.flags.writeable
    assert len(np.unique(windows[:, :-1], axis=0)) == len(windows) > 5_000
    lowered = "".join(one if one in ALPHABET else "?" for one in read_text(name).lower())
    place = 0
    for window in sample(partial(sample_text, name=name)):
        shown = "".join([*ALPHABET, "?"][symbol] for symbol in window)
        place = lowered.index(shown, place) + LENGTH


def test_parts_of_a_text_are_from_stretches_of_their_own() -> None:
    places = {tuple(window): place for place, window in enumerate(list_windows("help")[:, :-1].tolist())}
    instance = next(one for one in draw_instances() if one.family == "prose")
    inputs = [SUITE.data(instance, part).inputs.argmax(-1) for part in PARTS]
    found = [[places[tuple(window)] for window in part.tolist()] for part in inputs]
    assert all(max(before) < min(after) for before, after in pairwise(found))


def test_a_python_without_sources_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setattr("esper.tasks.language_suite.asyncio.__file__", f"{tmp_path}/asyncio/__init__.pyc")
    with pytest.raises(TaskError, match="no sources in .*install"):
        read_text("sources")


def test_after_a_drift_another_language_is_spoken() -> None:
    for instance in draw_instances():
        if instance.drift_step is not None:
            assert not torch.equal(SUITE.data(instance, "test", 0).labels, SUITE.data(instance, "test", 1).labels)
            with pytest.raises(TaskError, match="no phase 2"):
                SUITE.data(instance, "test", 2)
            with pytest.raises(TaskError, match="no phase 1"):
                SUITE.data(replace(instance, family="chain", variant="second_full"), "test", 1)
