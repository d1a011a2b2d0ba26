"""Random queries, keys and values of a few sequences, and ways to compute their attention."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from model_runner.attention.backend import AttentionBackend, AttentionOptions, IndexOptions
from model_runner.kv_cache import LARGEST, KVCache, KVShape
from tests.model_runner.batches import Chunk, make_batch
from tests.model_runner.oracles.attention import ReferenceAttention

BLOCK = 16
NUM_BLOCKS = 24
CPU = torch.device("cpu")

OPTIONS = [
    AttentionOptions(0.25),
    AttentionOptions(0.25, window=5),
    AttentionOptions(0.25, window=16),
    AttentionOptions(0.25, window=40, softcap=2.0),
]

SINKS = AttentionOptions(0.25, sinks=torch.tensor([1.5, -2.0, 0.5, 4.0, -0.5, 2.5, 1.0, -30.0, 3.0]))
"""For layers with 9 heads; `sinks_of` cuts the sinks for layers with fewer."""
WINDOW_AND_SINKS = replace(SINKS, window=20, softcap=2.0)
CHUNKS = AttentionOptions(0.25, chunk=32)
SMALL_CHUNKS_AND_SINKS = replace(SINKS, chunk=11)
LIMITED = [SINKS, WINDOW_AND_SINKS, CHUNKS, SMALL_CHUNKS_AND_SINKS]


@dataclass(frozen=True, slots=True, eq=False)
class Indexed(AttentionOptions):
    """For a layer with an indexer, with attention's own queries, and the first head's keys."""

    index: IndexOptions = field(kw_only=True)
    by_head: bool = False
    """Whether there is an index head for each key-value head, which selects for it, instead of one for each query."""

    def numbers(self, query: Any, key: Any) -> tuple[Any, Any, Any]:
        """Queries, keys and weights of the indexer for [n, heads, key_dim] and [n, kv_heads, key_dim]."""
        if self.by_head:
            return query[:, : key.shape[1]], key[:, :1], None
        return query, key[:, :1], query[..., 0]


INDEXED = [
    Indexed(0.25, index=IndexOptions(12)),
    Indexed(0.25, softcap=2.0, index=IndexOptions(3, block=4, pools="last")),
    Indexed(0.25, index=IndexOptions(3, block=8, local=1), by_head=True),
    Indexed(0.25, index=IndexOptions(2, block=24, local=1), by_head=True),
    Indexed(0.25, sinks=SINKS.sinks, index=IndexOptions(1)),
]


def sinks_of(options: AttentionOptions, heads: int, device: torch.device = CPU) -> AttentionOptions:
    """The options for a layer with this number of heads, on a device."""
    return options if options.sinks is None else replace(options, sinks=options.sinks[:heads].to(device))


def selected(query: np.ndarray, key: np.ndarray, options: Indexed, rounded: np.ndarray | None = None) -> np.ndarray:
    """[kv_heads, n, n] whether a position sees another, by the indexer in float64.

    `rounded` are the queries as the indexer rounds them; its weights are not rounded.
    """
    queries, keys, weights = options.numbers(query, key)
    if rounded is not None:
        queries, *_ = options.numbers(rounded, key)
    products = np.einsum("thd,sd->hts", queries, keys[:, 0])
    if weights is not None:
        products = np.einsum("th,hts->ts", weights, products.clip(0))[None]
    index, count = options.index, len(query)
    seen = np.zeros((len(products), count, count), dtype=np.bool_)
    for head, position in np.ndindex(*seen.shape[:2]):
        scores = products[head, position, : position + 1]
        starts = range(0, position + 1, index.block)
        if index.pools == "last":
            full = (position + 1) // index.block
            seen[head, position, full * index.block : position + 1] = not index.entries
            of_blocks = [scores[start + index.block - 1] for start in starts[:full]]
        else:
            of_blocks = [scores[start : start + index.block].max() for start in starts]
            of_blocks[len(starts) - index.local :] = [np.inf] * index.local
        for block in sorted(range(len(of_blocks)), key=lambda block: (-of_blocks[block], block))[: index.top]:
            first, end = block * index.block, (block + 1) * index.block
            seen[head, position, end - 1 if index.entries else first : end] = True
    return np.broadcast_to(seen, (key.shape[1], count, count))


def lowest_seen(position: int, options: AttentionOptions) -> int:
    """The first position that a query at this position sees."""
    by_window = 0 if options.window is None else position - options.window + 1
    by_chunk = 0 if options.chunk is None else position // options.chunk * options.chunk
    return max(0, by_window, by_chunk)


LENGTHS = [83, 40, 1, 17]
CROWD = [
    [(0, 0, 7), (3, 0, 1)],
    [(0, 7, 50), (1, 0, 16), (2, 0, 1)],
    [(1, 16, 40), (0, 50, 51)],
    *([(0, p, p + 1)] for p in range(51, 60)),
    *([(0, p, p + 1), (3, p - 59, p - 58)] for p in range(60, 76)),
    [(0, 76, 83)],
]
"""Steps in which sequences of these lengths are computed in pieces, side by side."""

Step = Sequence[tuple[Any, ...]]
"""Each (sequence, start, end) or, for a tree, (sequence, start, end, parents)."""
Make = Callable[[KVCache], AttentionBackend[Any]]


@dataclass(frozen=True)
class Sizes:
    """Sizes of one layer's attention."""

    heads: int
    kv_heads: int
    key_dim: int = 24
    value_dim: int = 32


@dataclass(frozen=True)
class Storage:
    """Where keys and values are kept."""

    dtype: torch.dtype = torch.float32
    block_size: int = BLOCK
    seed: int = 0
    """Blocks are dealt out in an order that depends on this."""
    background: float = 0.0
    """Value that the cache is filled with at first."""
    num_blocks: int = NUM_BLOCKS
    device: torch.device = CPU
    whole_keys: bool | None = None
    """KVCache's argument of this name."""

    def cache(self, *shapes: KVShape) -> KVCache:
        """A cache of layers with these shapes."""
        sizes = self.num_blocks, self.block_size
        cache = KVCache(shapes, *sizes, self.dtype, self.device, whole_keys=self.whole_keys)
        for numbers in (*cache.keys, *cache.values) if self.dtype not in LARGEST else ():
            numbers.fill_(self.background)
        for scales in (*cache.key_scales, *cache.value_scales):
            scales.fill_(self.background)
        return cache

    def tables(self, lengths: Sequence[int]) -> list[list[int]]:
        """Blocks for sequences of these lengths."""
        free = np.random.default_rng(self.seed).permutation(self.num_blocks).tolist()
        return [[free.pop() for _ in range(-(-n // self.block_size))] for n in lengths]


@dataclass(frozen=True)
class Sequences:
    """Queries, keys and values of some sequences, including trees, in storage order."""

    query: list[torch.Tensor]  # each [length, heads, key_dim]
    key: list[torch.Tensor]  # each [length, kv_heads, key_dim]
    value: list[torch.Tensor]  # each [length, kv_heads, value_dim]

    @classmethod
    def random(cls, lengths: Sequence[int], sizes: Sizes, seed: int = 0) -> "Sequences":
        """Normally distributed."""
        generator = torch.Generator().manual_seed(seed)
        return cls(
            [torch.randn(n, sizes.heads, sizes.key_dim, generator=generator) for n in lengths],
            [torch.randn(n, sizes.kv_heads, sizes.key_dim, generator=generator) for n in lengths],
            [torch.randn(n, sizes.kv_heads, sizes.value_dim, generator=generator) for n in lengths],
        )

    def to(self, dtype: torch.dtype) -> "Sequences":
        """The same rounded to a type."""
        return Sequences(*([t.to(dtype) for t in tensors] for tensors in (self.query, self.key, self.value)))

    @property
    def shape(self) -> KVShape:
        """Shape of keys and values."""
        return KVShape(self.key[0].shape[1], self.key[0].shape[2], self.value[0].shape[2])

    def branch(self, sequence: int, tokens: Sequence[int]) -> "Sequences":
        """Only these tokens of one sequence."""
        return Sequences(*([t[sequence][list(tokens)]] for t in (self.query, self.key, self.value)))

    def attend(
        self,
        steps: Sequence[Step],
        options: AttentionOptions,
        make: Make = ReferenceAttention,
        storage: Storage = Storage(),
    ) -> list[torch.Tensor]:
        """Outputs of all rows when the steps run one after the other; NaN for those that none computes."""
        index_shapes = [KVShape(1, self.shape.key_dim, 0)] if isinstance(options, Indexed) else []
        attention = make(storage.cache(self.shape, *index_shapes))
        options = sinks_of(options, self.query[0].shape[1], storage.device)
        tables = storage.tables([len(q) for q in self.query])
        outputs = [q.new_full((*q.shape[:2], self.shape.value_dim), torch.nan) for q in self.query]
        for step in steps:
            chunks = [Chunk(range(a, b), a, tables[s], *parents) for s, a, b, *parents in step]
            metadata = attention.prepare(make_batch(chunks, storage.block_size))
            q, k, v = (self._rows(t, step).to(storage.device) for t in (self.query, self.key, self.value))
            if isinstance(options, Indexed):
                selection = attention.select(1, *options.numbers(q, k), options.index, metadata)
                options = replace(options, selection=selection)
            rows = attention.forward(0, q, k, v, options, metadata)
            for (s, a, b, *_), part in zip(step, rows.cpu().split([len(c.tokens) for c in chunks]), strict=True):
                outputs[s][a:b] = part
        return outputs

    @staticmethod
    def _rows(tensors: Sequence[torch.Tensor], step: Step) -> torch.Tensor:
        return torch.cat([tensors[s][a:b] for s, a, b, *_ in step])

    def alone(self, options: AttentionOptions, make: Make = ReferenceAttention, storage: Storage = Storage()):
        """Outputs of all rows when each sequence runs by itself and whole."""
        wholes = [[(s, 0, len(q))] for s, q in enumerate(self.query)]
        return [self.attend([step], options, make, storage)[s] for s, step in enumerate(wholes)]

    def definition(self, sequence: int, options: AttentionOptions, dtype: torch.dtype = torch.float32) -> np.ndarray:
        """softmax(cap(scale q k), sink) (v, 0) in float64 over the visible positions; keys and values as stored."""
        values = stored_as(self.value[sequence], dtype)
        result = np.zeros((*self.query[sequence].shape[:2], values.shape[2]))
        group = result.shape[1] // values.shape[1]
        for position, head, scores, sink in self._scores(sequence, options, dtype):
            weights = np.exp(scores - max(scores.max(), sink))
            total = weights.sum() + np.exp(sink - max(scores.max(), sink))
            result[position, head] = weights @ values[: position + 1, head // group] / total
        return result

    def log_sums(self, sequence: int, options: AttentionOptions) -> np.ndarray:
        """[n, heads] the logarithm of the softmax's divisor."""
        result = np.zeros(self.query[sequence].shape[:2])
        for position, head, scores, sink in self._scores(sequence, options, torch.float32):
            result[position, head] = np.logaddexp.reduce([*scores, sink])
        return result

    def _scores(
        self, sequence: int, options: AttentionOptions, dtype: torch.dtype
    ) -> Iterator[tuple[int, int, np.ndarray, float]]:
        """For each position that sees any and each head: scores up to the position, -inf where unseen, and the sink."""
        q, k = self.query[sequence].double().numpy(), stored_as(self.key[sequence], dtype)
        group = q.shape[1] // k.shape[1]
        seen = selected(q, k, options) if isinstance(options, Indexed) else np.ones((k.shape[1], len(q), len(q)), bool)
        for position, head in np.ndindex(*q.shape[:2]):
            scores = k[: position + 1, head // group] @ q[position, head] * options.scale
            if options.softcap is not None:
                scores = options.softcap * np.tanh(scores / options.softcap)
            scores[: lowest_seen(position, options)] = -np.inf
            scores[~seen[head // group, position, : position + 1]] = -np.inf
            if np.isfinite(scores).any():
                yield position, head, scores, -np.inf if options.sinks is None else float(options.sinks[head])

    def rounded_definition(self, sequence: int, options: AttentionOptions, block_size: int) -> np.ndarray:
        """The definition with queries and weights in bfloat16, as in native attention with a bfloat16 cache.

        An indexer's queries are rounded, too. A weight is rounded as 2 to the power of its score minus the highest
        score up to the end of its block.
        """
        factor = 1.0 if options.softcap else 1.44269504
        scaled = self.query[sequence] * torch.tensor(options.scale) * torch.tensor(factor)
        q = stored_as(scaled, torch.bfloat16)
        k, v = (stored_as(t[sequence], torch.bfloat16) for t in (self.key, self.value))
        group = q.shape[1] // k.shape[1]
        result = np.zeros((*q.shape[:2], v.shape[2]))
        visible = np.ones((k.shape[1], len(q), len(q)), dtype=np.bool_)
        if isinstance(options, Indexed):
            query = self.query[sequence]
            visible = selected(query.double().numpy(), k, options, stored_as(query, torch.bfloat16))
        for position, head in np.ndindex(*q.shape[:2]):
            low = lowest_seen(position, options)
            powers = k[: position + 1, head // group] @ q[position, head]
            if options.softcap is not None:
                powers = options.softcap * np.tanh(powers / options.softcap) / np.log(2)
            powers[~visible[head // group, position, : position + 1]] = -np.inf
            highest, total = -np.inf, 0.0
            if options.sinks is not None:
                highest, total = float(options.sinks[head]) / np.log(2), 1.0
            for start in range(low - low % block_size, position + 1, block_size):
                seen = slice(max(low, start), min(position + 1, start + block_size))
                if not np.isfinite(powers[seen]).any():
                    continue
                before, highest = highest, max(highest, powers[seen].max())
                weights = stored_as(torch.from_numpy(np.exp2(powers[seen] - highest)), torch.bfloat16)
                total = total * np.exp2(before - highest) + weights.sum()
                result[position, head] *= np.exp2(before - highest)
                result[position, head] += weights @ v[seen, head // group]
            result[position, head] /= total
        return result


def check_trees(sequences: Sequences, options: AttentionOptions, make: Make, storage: Storage) -> None:
    """Two trees, after 43 and 3 tokens, give the tokens of every branch what they get in a plain chain.

    A third sequence without a tree is in the same step, and the chains are in other blocks of a clean cache.
    """
    clean = replace(storage, background=0.0)
    starts = (43, 3)
    trees = [random_tree(len(sequences.query[s]) - start, seed=s) for s, start in enumerate(starts)]
    verify = [(s, start, len(sequences.query[s]), trees[s]) for s, start in enumerate(starts)]
    steps = [[(0, 0, 43), (1, 0, 3)], [verify[0], (2, 0, len(sequences.query[2])), verify[1]]]
    outputs = sequences.attend(steps, options, make, replace(storage, seed=storage.seed + 1))
    assert torch.equal(outputs[2], sequences.alone(options, make, clean)[2])
    for s, start in enumerate(starts):
        paths = Chunk(trees[s], start, [], trees[s]).paths()
        for leaf in set(range(len(paths))).difference(trees[s]):
            tokens = [start + token for token in paths[leaf]]
            chain = sequences.branch(s, [*range(start), *tokens])
            assert torch.equal(outputs[s][tokens], chain.alone(options, make, clean)[0][start:])


def random_tree(size: int, seed: int) -> list[int]:
    """Parents of a tree with long branches: most tokens follow one of the last three."""
    generator = np.random.default_rng(seed)
    return [max(-1, token - int(generator.choice([1, 1, 2, 3, 9]))) for token in range(size)]


def stored_as(vectors: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    """Vectors [..., dim] after storage in a cache of that type, in float64."""
    if dtype not in LARGEST:
        return vectors.to(dtype).double().numpy()
    largest, single = np.float32(127 if dtype == torch.int8 else 448), vectors.float().numpy()
    highest = np.abs(single).max(-1, keepdims=True)
    scaled = torch.from_numpy(single * (largest / highest))
    numbers = (scaled.round() if dtype == torch.int8 else scaled).to(dtype).double().numpy()
    return numbers * (highest / largest)
