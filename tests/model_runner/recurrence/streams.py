"""Drives a recurrence and a convolution as the engine does: tables, anchors, pages, drafts and moves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model_runner.batch import Batch, StateTables
from model_runner.contract import BlockCopy
from model_runner.kv_cache import Move
from model_runner.recurrence.backend import RecurrenceBackend
from model_runner.recurrence.states import BLOCK, ConvShape, RecurrentShape, ScanShape, StateCache
from tests.model_runner.batches import tree_paths

MakeBackend = Callable[[StateCache], RecurrenceBackend]
GDN = RecurrentShape(4, 2, 16, 16, delta=True, per_channel=False)
KDA = RecurrentShape(2, 2, 16, 32, delta=True, per_channel=True)
SSD = RecurrentShape(6, 2, 32, 16, delta=False, per_channel=False)
ODD = RecurrentShape(3, 1, 20, 12, delta=True, per_channel=False)
ODD_KDA = RecurrentShape(2, 1, 20, 12, delta=True, per_channel=True)
SCAN = ScanShape(80, 16)
ODD_SCAN = ScanShape(20, 5)
SHAPES = {"gdn": GDN, "kda": KDA, "ssd": SSD, "odd": ODD, "odd_kda": ODD_KDA, "scan": SCAN, "odd_scan": ODD_SCAN}
CONV = ConvShape(20, 4)


@dataclass(frozen=True, eq=False)
class Inputs:
    """Inputs of both layers, one row for each token.

    For a selective scan, query is C and key is B, both [n, 1, states], and log_decay [n, channels] is the negated step.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    beta: Tensor
    x: Tensor

    @classmethod
    @cache
    def random(cls, shape: RecurrentShape | ScanShape, count: int, seed: int) -> "Inputs":
        """Normalised keys, and decays of all strengths: some forget all within a block."""
        if isinstance(shape, ScanShape):
            shape = RecurrentShape(shape.channels, 1, shape.states, 1, delta=False, per_channel=False)
        g = torch.Generator().manual_seed(seed)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=g, dtype=torch.float64)

        query, key = (normal(count, shape.key_heads, shape.key_dim) for _ in range(2))
        decayed = (shape.heads, shape.key_dim) if shape.per_channel else (shape.heads,)
        numbers = (
            query / query.norm(dim=-1, keepdim=True),
            key / key.norm(dim=-1, keepdim=True),
            normal(count, shape.heads, shape.value_dim),
            -(normal(count, *decayed) - 2).exp() - (normal(count, *decayed) > 2.5) * 50,
            torch.sigmoid(normal(count, shape.heads)),
            normal(count, CONV.channels),
        )
        return cls(*(t.float() for t in numbers))

    def __getitem__(self, rows: slice | list[int]) -> "Inputs":
        return Inputs(*(getattr(self, f.name)[rows] for f in fields(self)))

    def __len__(self) -> int:
        return len(self.query)


def joined(parts: Sequence[Inputs]) -> Inputs:
    """One after another."""
    return Inputs(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Inputs)))


@dataclass
class Stream:
    """A choice: where its rows are, its anchor, and how many tokens were computed."""

    rows: list[int] = field(default_factory=list)
    anchor: tuple[int, int] = (0, -1)
    computed: int = 0


@dataclass(frozen=True)
class Part:
    """A step's tokens of one stream."""

    stream: Stream
    known: Inputs | None = None
    drafts: Inputs | None = None
    parents: Sequence[int] = ()
    pages: Sequence[int] | None = None
    """Blocks after which pages are written; by default the last one that known tokens fill, the new anchor."""


@dataclass(frozen=True)
class Outputs:
    """Outputs of the recurrence [n, heads * value_dim] and of the convolution [n, channels]."""

    recurrent: Tensor
    conv: Tensor

    def __getitem__(self, rows: slice | list[int]) -> "Outputs":
        return Outputs(self.recurrent[rows], self.conv[rows])


class World:
    """A cache full of NaN, with blocks and pages handed out in random order."""

    def __init__(
        self, shape: RecurrentShape | ScanShape, make: MakeBackend, seed: int = 0, num_blocks: int = 24
    ) -> None:
        self.shape = shape
        # A second layer of the same shape and one of another: a layer must find its own memory.
        convolutions = [CONV, ConvShape(4, 3), CONV]
        cpu = torch.device("cpu")
        if isinstance(shape, ScanShape):
            scans = [shape, ScanShape(16, 3), shape]
            self.cache = StateCache([GDN], convolutions, num_blocks, num_blocks, cpu, scans=scans)
        else:
            shapes = [shape, GDN if shape != GDN else SSD, shape]
            self.cache = StateCache(shapes, convolutions, num_blocks, num_blocks, cpu)
        for memory in (self.cache._rows, self.cache._pages):
            memory.fill_(torch.nan)
        rng = np.random.default_rng(seed)
        self.free, self.free_pages = (list(map(int, rng.permutation(num_blocks))) for _ in range(2))
        self.backend = make(self.cache)
        g = torch.Generator().manual_seed(7)
        self.weight, self.bias = (
            torch.randn(*s, generator=g) for s in ((CONV.channels, CONV.kernel), (CONV.channels,))
        )
        self.page_of: dict[tuple[int, int], int] = {}
        """By the identity of the stream, and block: pages that were written."""

    def step(self, parts: Sequence[Part], layer: int = 2) -> list[Outputs]:
        """Compute a step; anchors move, and known tokens count as computed."""
        batch, counts = self._batch(parts)
        inputs = joined([i for part in parts for i in (part.known, part.drafts) if i is not None])
        metadata = self.backend.prepare(batch)
        recurrent = self._mix(layer, inputs, metadata)
        conv = self.backend.convolve(layer, inputs.x, self.weight, self.bias, "silu", metadata)
        assert batch.states is not None
        for part, pages in zip(parts, batch.states.pages, strict=True):
            part.stream.computed += len(part.known or ())
            if pages:
                block, page = pages[-1]
                part.stream.anchor = (block + 1, page)
        split = zip(recurrent.split(counts), conv.split(counts), strict=True)
        return [Outputs(*both) for both in split]

    def _mix(self, layer: int, inputs: Inputs, metadata: Any) -> Tensor:
        """[n, heads * value_dim], or [n, channels]."""
        if isinstance(self.shape, ScanShape):
            rows = (inputs.key.squeeze(1), inputs.query.squeeze(1))
            values = inputs.value.squeeze(2)
            return self.backend.scan(layer, -inputs.log_decay, values, scanned_decays(self.shape), *rows, metadata)
        beta = inputs.beta if self.shape.delta else None
        numbers = (inputs.query, inputs.key, inputs.value, inputs.log_decay, beta)
        return self.backend.recur(layer, *numbers, metadata).flatten(1)

    def accept(self, stream: Stream, nodes: Sequence[int]) -> None:
        """Move these drafts of the last step, a path, behind the known tokens."""
        first = stream.computed
        places = [(first + node, first + depth) for depth, node in enumerate(nodes)]
        moves = [Move(*self._at(stream, old), *self._at(stream, new)) for old, new in places if old != new]
        self.cache.move(moves)
        stream.computed += len(nodes)

    def begin_at(self, stream: Stream, block: int) -> Stream:
        """Another stream with the same beginning, from the page after a block."""
        page = self.page_of[id(stream), block]
        return Stream([-1] * (block + 1), (block + 1, page), (block + 1) * BLOCK)

    def fork(self, stream: Stream) -> Stream:
        """A stream that shares the anchor and has a copy of the rows after it."""
        rows = [self.free.pop() if block >= stream.anchor[0] else -1 for block in range(len(stream.rows))]
        self.cache.copy_blocks([BlockCopy(*pair) for pair in zip(stream.rows, rows, strict=True) if pair[1] >= 0])
        return Stream(rows, stream.anchor, stream.computed)

    def _at(self, stream: Stream, place: int) -> tuple[int, int]:
        return stream.rows[place // BLOCK], place % BLOCK

    def _batch(self, parts: Sequence[Part]) -> tuple[Batch, list[int]]:
        positions, paths, pages, counts = [], [], [], []
        for part in parts:
            stream, known, drafts = part.stream, len(part.known or ()), len(part.drafts or ())
            start = stream.computed
            end = start + known
            while len(stream.rows) * BLOCK < end + drafts:
                stream.rows.append(self.free.pop())
            for block in range(stream.anchor[0]):
                if stream.rows[block] >= 0:
                    self.free.insert(0, stream.rows[block])
                    stream.rows[block] = -1
            own: list[list[int]] = []
            for node, parent in enumerate(part.parents):
                own.append([*(own[parent] if parent >= 0 else ()), end + node])
            positions += [*range(start, end), *(end + len(path) - 1 for path in own)]
            paths += [[] for _ in range(known)] + own
            counts.append(known + drafts)
            full = end // BLOCK
            wanted = part.pages if part.pages is not None else [full - 1] if full > stream.anchor[0] else []
            pages.append([(block, self.free_pages.pop()) for block in wanted])
            self.page_of |= {(id(stream), block): page for block, page in pages[-1]}
        states = StateTables([part.stream.rows for part in parts], [part.stream.anchor for part in parts], pages)
        count, nothing = len(positions), np.zeros(len(positions), dtype=np.int64)
        choice_of = np.repeat(np.arange(len(parts)), counts)
        at = np.array(positions, dtype=np.int64)
        found = tree_paths(paths, at) if any(paths) else None
        empty = nothing[:0]
        return Batch(
            np.arange(count), at, choice_of, [[]] * len(parts), nothing, nothing, empty, [], [], found, states=states
        ), counts


def run(
    inputs: Sequence[Inputs], cuts: Sequence[Sequence[int]], world: World, pages: Sequence[Sequence[int]] | None = None
) -> list[Outputs]:
    """Streams side by side, stream i in chunks of cuts[i] tokens."""
    streams, done = [Stream() for _ in inputs], [0] * len(inputs)
    outputs: list[list[Outputs]] = [[] for _ in inputs]
    for turn in range(max(map(len, cuts))):
        parts, who = [], []
        for index, cut in enumerate(cuts):
            if turn < len(cut):
                known = inputs[index][done[index] : done[index] + cut[turn]]
                wanted = (
                    None
                    if pages is None
                    else [b for b in pages[index] if streams[index].anchor[0] <= b < (done[index] + cut[turn]) // BLOCK]
                )
                parts.append(Part(streams[index], known, pages=wanted))
                who.append(index)
                done[index] += cut[turn]
        for index, output in zip(who, world.step(parts), strict=True):
            outputs[index].append(output)
    return [concatenated(of) for of in outputs]


def concatenated(outputs: Sequence[Outputs]) -> Outputs:
    """One after another."""
    return Outputs(torch.cat([o.recurrent for o in outputs]), torch.cat([o.conv for o in outputs]))


def assert_same(one: Outputs, other: Outputs) -> None:
    """The same bits."""
    assert one.recurrent.isfinite().all()
    assert one.conv.isfinite().all()
    assert torch.equal(one.recurrent, other.recurrent)
    assert torch.equal(one.conv, other.conv)


def cut_evenly(count: int, size: int) -> list[int]:
    """Chunks of `size`, the last one smaller."""
    return [min(size, count - start) for start in range(0, count, size)]


def scanned_decays(shape: ScanShape) -> Tensor:
    """A of a selective scan [channels, states]: around -1 to -states, as models begin."""
    g = torch.Generator().manual_seed(5)
    return -torch.arange(1, shape.states + 1) * torch.rand(shape.channels, 1, generator=g).add(0.5)


def definition(shape: RecurrentShape | ScanShape, inputs: Inputs) -> np.ndarray:
    """The recurrence in float64, [n, heads * value_dim], or the selective scan [n, channels]."""
    q, k, v, g, beta = (
        t.double().numpy() for t in (inputs.query, inputs.key, inputs.value, inputs.log_decay, inputs.beta)
    )
    if isinstance(shape, ScanShape):
        a, h, outputs = scanned_decays(shape).double().numpy(), np.zeros((shape.channels, shape.states)), []
        for step, value, b, c in zip(-g, v, k, q, strict=True):
            h = np.exp(step[:, None] * a) * h + value * b
            outputs.append(h @ c[0])
        return np.array(outputs)
    group = shape.heads // shape.key_heads
    output = np.zeros_like(v)
    for head in range(shape.heads):
        state = np.zeros((shape.key_dim, shape.value_dim))
        for t in range(len(q)):
            key, query = k[t, head // group], q[t, head // group]
            state *= np.exp(g[t, head])[..., None]
            u = beta[t, head] * (v[t, head] - state.T @ key) if shape.delta else v[t, head]
            state += np.outer(key, u)
            output[t, head] = state.T @ query
    return output.reshape(len(q), -1)


def conv_definition(world: World, x: Tensor) -> np.ndarray:
    """The convolution in float64, with SiLU: [n, channels]."""
    kernel, weight = CONV.kernel, world.weight.double().numpy()
    padded = np.concatenate([np.zeros((kernel - 1, CONV.channels)), x.double().numpy()])
    y = sum(weight[:, tap] * padded[tap : tap + len(x)] for tap in range(kernel)) + world.bias.double().numpy()
    return y / (1 + np.exp(-y))
