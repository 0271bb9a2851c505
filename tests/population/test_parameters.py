"""Rows: values, buffers and optimizer state are born, kept and die together."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor, nn

from esper.population.parameters import FlatParameters, ParameterLayout, Piece, StackedParameters, pad_to_shape

MOMENTS = ("mean", "square")
CPU = torch.device("cpu")


class Module(nn.Linear):
    """A linear layer with a buffer."""

    def __init__(self) -> None:
        super().__init__(2, 3, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.float64))


def shape() -> ParameterLayout:
    return ParameterLayout.from_module(Module())


@dataclass
class Row:
    """What a row of the block must hold."""

    owner: int
    values: float
    moment: float
    steps: float
    rate: float
    seen: float
    """The buffer."""


def joined(*blocks: StackedParameters) -> StackedParameters:
    """The rows of all blocks as one, which is that of a new vector."""
    pieces = [Piece(number, 0, np.arange(len(block))) for number, block in enumerate(blocks)]
    return FlatParameters.gather([FlatParameters.from_blocks([block]) for block in blocks], [pieces], MOMENTS).blocks[0]


class Blocks(RuleBasedStateMachine):
    """A block beside a plain list of rows. Every number in a row is its own, so that a mix-up shows."""

    def __init__(self) -> None:
        super().__init__()
        self.block = StackedParameters.empty(Module(), MOMENTS, torch.float64, CPU)
        self.rows: list[Row] = []
        self.born = 0

    def fresh(self, owner: int) -> Row:
        self.born += 1
        return Row(owner, values=self.born, moment=0.0, steps=0.0, rate=self.born / 100, seen=-self.born)

    def tensors(self, rows: list[Row]) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        values = torch.tensor([[row.values] * shape().size for row in rows], dtype=torch.float64)
        buffers = {"seen": torch.tensor([[row.seen] * 2 for row in rows], dtype=torch.float64).view(len(rows), 2)}
        rates = torch.tensor([row.rate for row in rows], dtype=torch.float64)
        return values.view(len(rows), shape().size), buffers, rates

    @rule(owners=st.lists(st.integers(0, 9), min_size=0, max_size=3, unique=True))
    def extend(self, owners: list[int]) -> None:
        new = [self.fresh(owner) for owner in owners if owner not in {row.owner for row in self.rows}]
        values, buffers, rates = self.tensors(new)
        before, old = self.block, _copies(self.block)
        numbers = torch.tensor([row.owner for row in new], dtype=torch.int64)
        self.block = joined(self.block, self.block.make_rows(values, buffers, rates, numbers))
        self.rows = self.rows + new
        _assert_same(before, old)

    @rule(owners=st.lists(st.integers(0, 9), max_size=4))
    def drop(self, owners: list[int]) -> None:
        before, old = self.block, _copies(self.block)
        self.block = self.block.without(torch.tensor(owners, dtype=torch.int64))
        self.rows = [row for row in self.rows if row.owner not in owners]
        _assert_same(before, old)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        places = data.draw(st.lists(st.integers(0, len(self.rows) - 1), min_size=1, unique=True))
        new = [self.fresh(self.rows[place].owner) for place in places]
        before, old = self.block, _copies(self.block)
        self.block = self.block.reset_rows(torch.tensor(places), *self.tensors(new))
        for place, row in zip(places, new, strict=True):
            self.rows[place] = row
        _assert_same(before, old)

    @rule()
    def learn(self) -> None:
        """As an optimizer does: in place, all of a row at once."""
        for index, row in enumerate(self.rows):
            self.block.values.detach()[index] += row.rate
            for moment in self.block.moments.values():
                moment[index] += row.rate
            self.block.steps[index] += 1
            row.values, row.moment, row.steps = row.values + row.rate, row.moment + row.rate, row.steps + 1

    @invariant()
    def everything_is_aligned(self) -> None:
        block, count = self.block, len(self.rows)
        assert len(block) == count
        values, buffers, rates = self.tensors(self.rows)
        torch.testing.assert_close(block.buffers["seen"], buffers["seen"])
        torch.testing.assert_close(block.values.detach(), values)
        torch.testing.assert_close(block.learning_rates, rates)
        assert block.moments.keys() == set(MOMENTS)
        moments = torch.tensor([row.moment for row in self.rows], dtype=torch.float64)
        for moment in block.moments.values():
            torch.testing.assert_close(moment, moments[:, None].expand(count, shape().size))
        assert block.steps.tolist() == [row.steps for row in self.rows]
        assert block.owners.tolist() == [row.owner for row in self.rows]
        assert all(leaf.is_leaf and leaf.requires_grad for leaf in block.parameters.values())
        # They are views: learning in place, since they were first asked for, shows in them.
        parameters = torch.cat([parameter.detach().flatten(1) for parameter in block.parameters.values()], 1)
        torch.testing.assert_close(parameters, values)


def _copies(block: StackedParameters) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in _tensors(block)]


def _tensors(block: StackedParameters) -> list[Tensor]:
    return [
        block.values,
        *block.buffers.values(),
        *block.moments.values(),
        block.steps,
        block.learning_rates,
        block.owners,
    ]


def _assert_same(block: StackedParameters, copies: list[Tensor]) -> None:
    """A change makes a new block; the old one is as it was, so that whoever fails half-way still has it."""
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(_tensors(block), copies, strict=True))


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


def test_a_row_is_the_module_s_parameters_in_order() -> None:
    module = nn.Linear(2, 3).double()
    row = shape().flatten_module(module)
    assert torch.equal(row, torch.cat([module.weight.flatten(), module.bias]))
    named = shape().unflatten(torch.stack([row, row + 1]))
    assert torch.equal(named["weight"], torch.stack([module.weight, module.weight + 1]))
    assert torch.equal(named["bias"], torch.stack([module.bias, module.bias + 1]))


def test_a_narrower_module_is_padded_with_zeros() -> None:
    narrow = nn.Linear(1, 2)
    parameters = shape().unflatten(shape().flatten_module(narrow).unsqueeze(0))
    assert torch.equal(parameters["weight"][0, :2, :1], narrow.weight)
    assert torch.equal(parameters["bias"][0, :2], narrow.bias)
    assert parameters["weight"].count_nonzero() == narrow.weight.count_nonzero()


def test_modules_of_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="do not match"):
        shape().flatten_module(nn.Linear(2, 3, bias=False))
    with pytest.raises(ValueError, match=r"shape \(4, 2\) does not fit into \(3, 2\)"):
        shape().flatten_module(nn.Linear(2, 4))


def make_vector(rows: dict[int, list[int]], generator: torch.Generator) -> FlatParameters:
    """Random rows of blocks of modules of some widths, each with these owners."""
    blocks: list[StackedParameters] = []
    for width, owners in rows.items():
        empty = StackedParameters.empty(nn.BatchNorm1d(width, dtype=torch.float64), MOMENTS, torch.float64, CPU)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        count = len(owners)
        buffers = {name: draw(count, *buffer.shape[1:]) for name, buffer in empty.buffers.items()}
        block = empty.make_rows(draw(count, 2 * width), buffers, draw(count), torch.tensor(owners))
        moments = {name: draw(count, 2 * width) for name in MOMENTS}
        blocks.append(replace(block, moments=moments, steps=draw(count)))
    return FlatParameters.from_blocks(blocks)


def test_rows_of_several_vectors_are_gathered_with_all_that_belongs_to_them() -> None:
    generator = torch.Generator().manual_seed(0)
    sources = [make_vector({3: [0, 1, 2], 1: [2, 0]}, generator), make_vector({5: [7], 1: [4, 5], 3: [9]}, generator)]
    plan = [
        [Piece(0, 0, np.array([2, 0])), Piece(1, 2, np.array([0]))],
        [Piece(1, 0, np.array([0]))],
        [Piece(1, 1, np.array([1])), Piece(0, 1, np.array([0, 1]))],
    ]
    found = FlatParameters.gather(sources, plan, MOMENTS)
    for block, pieces in zip(found.blocks, plan, strict=True):
        parts = [sources[piece.source].blocks[piece.block].select(torch.from_numpy(piece.rows)) for piece in pieces]
        _assert_same(block, [torch.cat(columns) for columns in zip(*map(_tensors, parts), strict=True)])
    assert torch.equal(found.values, torch.cat([block.values.flatten() for block in found.blocks]))
    assert torch.equal(found.owners, torch.cat([block.owners for block in found.blocks]))
    assert torch.equal(found.learning_rates, torch.cat([block.learning_rates for block in found.blocks]))
    found.values.zero_()
    assert not any(block.values.any() for block in found.blocks), "blocks are views of the vector"


def test_what_is_summed_by_network_and_split_by_rows_is_that_of_its_rows() -> None:
    vector = make_vector({3: [0, 1, 2], 2: [2, 0], 1: [0]}, torch.Generator().manual_seed(0))
    sums = torch.zeros(3, dtype=torch.float64)
    for block in vector.blocks:
        for row, owner in enumerate(block.owners.tolist()):
            sums[owner] += block.values[row].sum()
    torch.testing.assert_close(vector.sum_by_network(vector.values), sums)
    rows = torch.cat([part.sum(1) for part in vector.split_rows(vector.values)])
    torch.testing.assert_close(rows, torch.cat([block.values.sum(1) for block in vector.blocks]))
    lengths = [block.layout.size for block in vector.blocks for _ in range(len(block))]
    assert torch.equal(vector.row_of_value.bincount(), torch.tensor(lengths))


@pytest.mark.parametrize(("small", "large"), [((), ()), ((2,), (5,)), ((2, 3, 1), (2, 4, 3))])
def test_padding_adds_zeros_at_the_end_of_every_axis(small: tuple[int, ...], large: tuple[int, ...]) -> None:
    tensor = torch.randn(small, generator=torch.Generator().manual_seed(0))
    padded = pad_to_shape(tensor, large)
    assert padded.shape == large
    assert torch.equal(padded[tuple(slice(extent) for extent in small)], tensor)
    assert padded.count_nonzero() == tensor.count_nonzero()
