"""How a plan divides a step, and tables that it refuses."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from model_runner.batch import Batch, StateTables
from model_runner.contract import BlockCopy
from model_runner.kv_cache import Move
from model_runner.recurrence.backend import has_silu
from model_runner.recurrence.plan import Segment, make_plan
from model_runner.recurrence.states import ConvShape, ScanShape, StateCache
from tests.model_runner.recurrence.streams import GDN


def batch(start: int, count: int, states: StateTables | None) -> Batch:
    """Known tokens of one choice."""
    nothing = np.zeros(count, dtype=np.int64)
    positions = np.arange(start, start + count)
    return Batch(nothing, positions, nothing, [[]], nothing, nothing, nothing[:0], [], [], states=states)


def test_divides_at_blocks() -> None:
    plan = make_plan(batch(40, 60, StateTables([[-1, 5, 3, 9]], [(1, 7)], [[(2, 4)]])))
    assert plan.anchors == [7]
    assert plan.segments == [
        Segment(0, 24, block=5, offset=8, is_folded=True),
        Segment(24, 32, block=3, is_folded=True, page=4),
        Segment(56, 4, block=9),
    ]
    assert plan.slots[[0, 59]].tolist() == [5 * 32 + 8, 9 * 32 + 3]
    assert plan.written == [(4, 3)]
    inputs = plan.inputs_of(4)
    assert inputs[0].tolist() == [2 * (5 * 32 + 5), 2 * (5 * 32 + 6), 2 * (5 * 32 + 7)]
    assert inputs[2].tolist() == [2 * (5 * 32 + 7), 1, 3]


def test_finds_inputs_in_pages_and_before_the_start() -> None:
    plan = make_plan(batch(32, 2, StateTables([[-1, 5]], [(1, 7)], [[]])))
    assert plan.inputs_of(4).tolist() == [[-2 - 21, -2 - 22, -2 - 23], [-2 - 22, -2 - 23, 1]]
    plan = make_plan(batch(0, 2, StateTables([[5]], [(0, -1)], [[]])))
    assert plan.inputs_of(3).tolist() == [[-1, -1], [-1, 1]]


@pytest.mark.parametrize(
    ("states", "reason"),
    [
        (None, "no tables"),
        (StateTables([[0, 1, 2]], [(2, 0)], [[]]), "covers 64 positions"),
        (StateTables([[0, -1, 2]], [(1, 0)], [[]]), "no rows block"),
        (StateTables([[-1, 1]], [(0, -1)], [[]]), "no rows block"),
        (StateTables([[0]], [(0, -1)], [[]]), "no rows block"),
        (StateTables([[0, 1, 2]], [(0, -1)], [[(1, 3)]]), "cannot be written"),
        (StateTables([[-1, 1, 2]], [(1, 0)], [[(0, 3)]]), "cannot be written"),
    ],
)
def test_refuses_tables_that_do_not_fit(states: StateTables | None, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make_plan(batch(40, 10, states))


def test_a_batch_of_some_choices_has_their_tables() -> None:
    states = StateTables([[0], [1], [2]], [(0, -1), (1, 5), (2, 6)], [[], [(1, 2)], []])
    nothing = np.zeros(3, dtype=np.int64)
    whole = Batch(nothing, nothing, np.arange(3), [[], [], []], nothing, nothing, nothing[:0], [], [], states=states)
    assert whole.only([1, 2]).states == StateTables([[1], [2]], [(1, 5), (2, 6)], [[(1, 2)], []])
    assert replace(whole, states=None).only([1]).states is None


def test_rows_of_the_group_are_copied_and_moved() -> None:
    scan, conv = ScanShape(20, 3), ConvShape(8, 4)
    cache = StateCache([GDN, GDN], [conv], 3, 1, torch.device("cpu"), group=2, scans=[scan, scan])
    memory, scanned = cache.recurrent[1], cache.scan[1]
    of_positions = [scanned.steps, scanned.values, scanned.inputs, cache.conv[0].inputs]
    tensors = [memory.keys, memory.decays, memory.updates, *(tensor[:, None] for tensor in of_positions)]
    for number, tensor in enumerate(tensors, 1):
        tensor[0, :, 7] = number
    cache.move([Move(0, 7, 1, 2, 2), Move(0, 8, 1, 3, 1)])
    cache.copy_blocks([BlockCopy(1, 2, 2), BlockCopy(0, 1)])
    for number, tensor in enumerate(tensors, 1):
        assert (tensor[2, :, 2] == number).all()
        assert tensor[2].sum() == tensor[2, :, 2].sum()
        assert tensor[1].sum() == number * tensor[1, :, 2].numel()
    assert not cache.recurrent[0].keys.any()
    assert not cache.scan[0].steps.any()
    total = sum(shape.rows_bytes for shape in (GDN, GDN, scan, scan, conv))
    assert cache._rows.nbytes == 3 * total
    cache.add_scratch(2)
    shapes = [tensor.shape[1:] for tensor in (memory.keys, memory.decays, memory.updates)]
    assert [part.shape for part in cache.scratch(shapes)] == [(2, *shape) for shape in shapes]
    assert cache._scratch.nbytes == 2 * max(shape.rows_bytes for shape in (GDN, scan, conv))


def test_refuses_other_convolutions() -> None:
    with pytest.raises(ValueError, match="34 positions"):
        ConvShape(8, 34)
    with pytest.raises(ValueError, match="'gelu'"):
        has_silu("gelu")
