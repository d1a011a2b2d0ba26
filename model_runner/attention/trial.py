"""Startup check: attention must give a row the same bits whatever else is computed with it.

AttentionBackend guarantees this and exact mode relies on it. The kernels are written for it, but a compiler or
processor could break it, so the actual hardware is tested with random data in the empty cache.
"""

from array import array
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from model_runner.attention.backend import AttentionBackend, AttentionOptions, IndexOptions
from model_runner.batch import Batch, BatchChoice, BatchMaker, LogitRows, StepTokens
from model_runner.kv_cache import KVCache

_LENGTH = 300
"""Tokens of the tested choice: more than a split of keys (kernels/triton/attention.py) and many blocks."""
_OTHER_LENGTH = 20
"""Tokens of the other choice."""
_POSITIONS = (31, 256, 290)
"""Positions of the rows to compare."""
_BEFORE, _AFTER = 5, 3
"""Rows before and after a row in the middle of a prompt."""
_WINDOWS = (None, 100)
_INDEX = IndexOptions(top=20)
"""For layers of index keys."""


def first_difference(attention: AttentionBackend[Any], cache: KVCache, dtype: torch.dtype) -> str | None:
    """The case in which a row differs from decoding it alone, or None if there is none.

    Writes to the cache, so call it only at startup.

    Args:
        attention: backend on the cache.
        cache: one layer of each shape is tested. Layers of keys without values have indexers.
        dtype: of queries, keys and values.
    """
    layers = {shape: layer for layer, shape in reversed(list(enumerate(cache.shapes)))}
    for layer in layers.values():
        trial = _Trial(attention, cache, layer, dtype)
        for window in _WINDOWS:
            options = AttentionOptions(cache.shapes[layer].key_dim ** -0.5, window)
            for position in trial.positions:
                results = trial.results(position, options)
                _, expected = next(results)
                difference = next((how for how, found in results if not _same(found, expected)), None)
                if difference is not None:
                    return difference
    return None


def _same(found: Tensor, expected: Tensor) -> bool:
    """Whether two results are equal; a selection takes more numbers next to longer choices."""
    width = min(found.shape[-1], expected.shape[-1])
    return torch.equal(found[..., :width], expected[..., :width])


class _Trial:
    """Two choices with random queries, keys and values in one layer, stored in the first blocks."""

    def __init__(self, attention: AttentionBackend[Any], cache: KVCache, layer: int, dtype: torch.dtype) -> None:
        self._attention = attention
        self._layer = layer
        size = cache.block_size
        num_blocks = cache.num_blocks_of[layer]
        num_other = min(-(-_OTHER_LENGTH // size), num_blocks - 1)
        num_own = min(-(-_LENGTH // size), num_blocks - num_other)
        self._length, self._other_length = min(_LENGTH, num_own * size), min(_OTHER_LENGTH, num_other * size)
        self._maker = BatchMaker(size)
        tables = range(num_own), range(num_own, num_own + num_other)
        self._choices = [BatchChoice(blocks=array("i", table)) for table in tables]
        self.positions = sorted({min(position, self._length - 1) for position in _POSITIONS})
        shape, device, generator = cache.shapes[layer], cache.device, torch.Generator().manual_seed(0)

        def random(heads: int, dim: int) -> Tensor:
            numbers = torch.randn(self._length + self._other_length, heads, dim, generator=generator)
            return numbers.to(device, dtype)

        self._query = random(shape.num_heads * shape.group, shape.key_dim)
        self._key, self._value = random(shape.num_heads, shape.key_dim), random(shape.num_heads, shape.value_dim)
        everything = self._batch(range(self._length), range(self._other_length))
        places = (torch.from_numpy(of).to(device) for of in (everything.block_of, everything.offset_of))
        cache.write(layer, self._key, self._value, *places)

    def results(self, position: int, options: AttentionOptions) -> Iterator[tuple[str, Tensor]]:
        """A row of the first choice, computed in all cases, with a name for each. Decoding alone comes first."""
        row, nobody, others = range(position, position + 1), range(0), range(self._other_length)
        around = range(max(position - _BEFORE, 0), min(position + _AFTER + 1, self._length))
        cases = {
            "alone": (row, nobody),
            "in the middle of a prompt": (around, nobody),
            "with others": (row, others),
        }
        for how, (own, beside) in cases.items():
            tokens = [*own, *(self._length + other for other in beside)]
            for layout, metadata in self._attention.layouts(self._batch(own, beside)).items():
                rows = torch.tensor(tokens, device=self._query.device)
                query, key, value = (one.index_select(0, rows) for one in (self._query, self._key, self._value))
                if value.shape[-1]:
                    found = self._attention.forward(self._layer, query, key, value, options, metadata)
                else:
                    found = self._attention.select(self._layer, query, key, query[..., 0], _INDEX, metadata)
                yield f"{how}{layout and ', '}{layout}", found[tokens.index(position)]

    def _batch(self, own: range, others: range) -> Batch:
        """A step of these positions of the first choice, then of the second, which is left out if it has none."""
        tokens = StepTokens()
        for span in (own, others)[: 1 + bool(others)]:
            tokens.add([0] * len(span), span.start)
        return self._maker.make(self._choices[: len(tokens.starts)], tokens, LogitRows(()))
