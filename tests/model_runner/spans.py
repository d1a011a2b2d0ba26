"""Attention where the rows of an image see each other, also later ones, and its definition."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from model_runner.attention.backend import AttentionOptions
from tests.model_runner.batches import Chunk, make_batch
from tests.model_runner.sequences import Make, Sequences, Step, Storage, stored_as

Spans = Mapping[int, Sequence[tuple[int, int]]]
"""First place and end of each span, by sequence."""
OPTIONS = AttentionOptions(0.25, sees_spans=True)


def last_of(spans: Spans, sequence: int, place: int) -> int:
    """The last position that a row sees."""
    return next((end - 1 for first, end in spans.get(sequence, ()) if first <= place < end), place)


def attend(
    make: Make, sequences: Sequences, spans: Spans, steps: Sequence[Step], options: AttentionOptions, storage: Storage
) -> list[torch.Tensor]:
    """Outputs of all rows when the steps run one after the other."""
    attention: Any = make(storage.cache(sequences.shape))
    tables = storage.tables([len(query) for query in sequences.query])
    outputs = [q.new_full((*q.shape[:2], sequences.shape.value_dim), torch.nan) for q in sequences.query]
    for step in steps:
        batch = make_batch([Chunk(range(a, b), a, tables[s]) for s, a, b in step], storage.block_size)
        last = np.array([last_of(spans, s, place) for s, a, b in step for place in range(a, b)])
        tensors = sequences.query, sequences.key, sequences.value
        rows = (Sequences._rows(t, step).to(storage.device) for t in tensors)
        output = attention.forward(0, *rows, options, attention.prepare(replace(batch, span_last=last)))
        for (s, a, b), part in zip(step, output.cpu().split([b - a for _, a, b in step]), strict=True):
            outputs[s][a:b] = part
    return outputs


def definition(
    sequences: Sequences, spans: Spans, sequence: int, options: AttentionOptions, dtype: torch.dtype
) -> np.ndarray:
    """In float64, over the positions from the window's first to the span's last."""
    q = sequences.query[sequence].double().numpy()
    k, v = (stored_as(t[sequence], dtype) for t in (sequences.key, sequences.value))
    group = q.shape[1] // k.shape[1]
    result = np.zeros((*q.shape[:2], v.shape[2]))
    for position, head in np.ndindex(*q.shape[:2]):
        last = last_of(spans, sequence, position) if options.sees_spans else position
        seen = slice(max(0, position - options.window + 1) if options.window else 0, last + 1)
        scores = k[seen, head // group] @ q[position, head] * options.scale
        weights = np.exp(scores - scores.max())
        result[position, head] = weights @ v[seen, head // group] / weights.sum()
    return result
