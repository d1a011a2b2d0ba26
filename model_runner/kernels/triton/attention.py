"""Attention over the paged KV cache: prompts, single tokens and draft trees in one launch.

The rows of a tile are the heads of one group (which share a key-value head) of consecutive tokens: row r is head
r % GROUP of token r // GROUP. Keys are processed in tiles of BLOCK_N consecutive positions, and SPLIT consecutive
positions are a split. Both start at multiples of their size, whatever the batch. Within a split the softmax is computed
online (FlashAttention-2, arXiv:2307.08691) from an empty state; then the split is merged into the previous splits, in
order. So, bit for bit, one program may process all splits of a tile, or several programs one each (as in
Flash-Decoding) with another kernel merging them by the same formula in the same order. How work is divided may
therefore depend on the batch. Keys that a row does not see are exactly neutral: weights of zero, and a split with the
highest score -inf.

Scores are in units of log2, because the hardware computes exp2. `enable_fp_fusion=False` keeps the compiler from
contracting the formulas of the two kernels differently.

A non-finite value must not reach a row that does not see it, although zero times NaN is NaN. This can only happen where
the rows of a tile do not see the same keys. Such tiles of keys are processed by a variant that removes these values and
makes the sums of rows that see them NaN. Types with scales need no such care: only scales can be NaN.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_N = 64
"""Keys in a tile."""
SPLIT = 256
"""Keys in a split. With 8 heads of 128 values, a program reads 128 KiB per split, far more than its partial sums."""
MERGED_ROWS = 4
"""Rows per work unit of the merging kernel."""

HEADER = 8
"""Values at the start of a plan: number of items, number of merges, offsets of merges, paths, tables and lasts.

Lasts are the last position that each token sees in layers that see spans. A plan may have none."""
ITEM = 9
"""Values of a work item, in this order.

First token, number of tokens, position of the first, start of its choice's block table, first position on the path
(which is stored elsewhere), index of that position in the paths, first split, last split (exclusive), and the row of
the first partial sum, or -1 if the item is a whole tile."""
MERGE = 6
"""Values of a merge: first token, number of tokens, position of the first, number of splits, row of the first partial
sum, and first row of the tile to merge."""

_BLOCK_N, _SPLIT = tl.constexpr(BLOCK_N), tl.constexpr(SPLIT)
_HEADER, _ITEM, _MERGE = tl.constexpr(HEADER), tl.constexpr(ITEM), tl.constexpr(MERGE)
_LOG2_E = 1.4426950408889634
_LOG2_OF_E = tl.constexpr(_LOG2_E)
_EVERYTHING = 2**30
"""A window that reaches back to the first position."""


@dataclass(frozen=True, slots=True)
class Step:
    """Inputs of a launch: a plan in device memory, laid out as HEADER describes, and buffers for partial sums."""

    plan: Tensor  # [...] int32
    block_m: int
    """Rows of a tile."""
    programs: int
    """Programs per key-value head."""
    has_merges: bool
    """Whether tiles may be split between programs."""
    has_lasts: bool
    """Whether the plan has lasts."""
    part_rows: int
    """Rows of partial sums per key-value head."""
    sums: Tensor  # [kv_heads * rows * padded(value_dim)] float32, weighted values of rows in a split
    peaks: Tensor  # [kv_heads * rows, 2] float32, highest score and sum of weights


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Keys and values of a layer of a KVCache."""

    keys: Tensor  # [blocks, kv_heads, block_size, key_dim]
    values: Tensor  # [blocks, kv_heads, block_size, value_dim]
    key_scales: Tensor | None  # [blocks, kv_heads, block_size] float32
    value_scales: Tensor | None


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """How the scores of a row's keys are found, and which keys it sees."""

    scale: float
    """Factor on the products."""
    window: int | None = None
    """Number of last positions a row sees; None for all."""
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap)."""
    chunk: int | None = None
    """A row at position p sees no position before p // chunk * chunk; None for no such limit."""
    sinks: Tensor | None = None  # [heads] logits without a value, in a float type
    sees_spans: bool = False
    """Whether a row sees positions up to its last in the plan, instead of up to its own."""


def attend(query: Tensor, layer: LayerKV, step: Step, scoring: ScoreOptions, out: Tensor) -> None:
    """Write attention output for all items of a plan.

    Args:
        query: [tokens, heads, key_dim]; the last dimension is contiguous.
        layer: keys and values, in the type of the query or a type with scales.
        step: the plan and its buffers. Items of tokens beyond the query are ignored.
        scoring: how scores are found. The sinks are on the same device.
        out: [tokens, heads, value_dim], contiguous. Rows without an item are unchanged.
    """
    num_tokens, heads, key_dim = query.shape
    _, kv_heads, block_size, value_dim = layer.values.shape
    if not num_tokens:
        return
    shape = {"GROUP": heads // kv_heads, "VALUE_DIM": value_dim, "DV": padded(value_dim)}
    scales = (layer.values if s is None else s for s in (layer.key_scales, layer.value_scales))  # unused without scales
    softmax = scoring.window or _EVERYTHING, scoring.chunk, scoring.sinks
    softcap, grid = scoring.softcap, (step.programs, kv_heads)
    spans = {"SPANS": scoring.sees_spans and step.has_lasts}
    _attend_kernel[grid](
        query,
        layer.keys,
        layer.values,
        *scales,
        out,
        step.sums,
        step.peaks,
        step.plan,
        num_tokens,
        *query.stride()[:2],
        step.part_rows,
        scoring.scale * _LOG2_E if softcap is None else scoring.scale / softcap * 2 * _LOG2_E,
        0.0 if softcap is None else softcap * _LOG2_E,
        *softmax,
        **shape | spans,
        KEY_DIM=key_dim,
        DK=padded(key_dim),
        BLOCK_SIZE=block_size,
        BLOCK_M=step.block_m,
        CAPPED=softcap is not None,
        SCALED=layer.key_scales is not None,
        PRECISION="ieee" if query.dtype == torch.float32 else None,
        **_launch_options(query.dtype, max(key_dim, value_dim), step.block_m),
    )
    if step.has_merges:
        _merge_kernel[grid](
            out,
            step.sums,
            step.peaks,
            step.plan,
            num_tokens,
            step.part_rows,
            *softmax,
            **shape | spans | {"ROWS": MERGED_ROWS, "num_warps": 1, "enable_fp_fusion": False},
        )


def padded(dim: int) -> int:
    """Padded width of a vector in the kernels: a power of two, and large enough for tensor cores."""
    return max(16, 1 << (dim - 1).bit_length())


def _launch_options(dtype: torch.dtype, dim: int, block_m: int) -> dict[str, int | bool]:
    """Warps and stages that fit the registers and shared memory of an H200's SM, twice where possible.

    Two sums of 64 rows by 128 values take half of the registers of four warps, so some bytes are spilled. float32 has
    no tensor cores that keep its precision: it spills much, is slow, and only one stage fits.
    """
    wide = dtype == torch.float32 or dim > 128
    stages = 1 if dtype == torch.float32 else 2 if wide else 3
    return {"num_warps": 8 if wide or block_m > 64 else 4, "num_stages": stages, "enable_fp_fusion": False}


@triton.jit
def _nothing(M: tl.constexpr, DV: tl.constexpr):
    """Softmax state over no keys: highest score [M], sum of weights [M], weighted values [M, DV]."""
    return tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32), tl.zeros([M, DV], tl.float32)


@triton.jit
def _before(sinks, is_taken, head, rows, GROUP: tl.constexpr, DV: tl.constexpr):
    """Softmax state of rows [M] before the first split: over their sinks, or over nothing where none are taken."""
    top, total, summed = _nothing(rows.shape[0], DV)
    if sinks is not None:
        is_sink = (rows >= 0) & is_taken
        sink = tl.load(sinks + head * GROUP + rows % GROUP, mask=is_sink, other=float("-inf"))
        top, total = sink.to(tl.float32) * _LOG2_OF_E, is_sink.to(tl.float32)
    return top, total, summed


@triton.jit
def _first_seen(position, window, chunk):
    """The first position that rows at these positions see."""
    first = tl.maximum(position - window + 1, 0)
    if chunk is not None:
        first = tl.maximum(first, position // chunk * chunk)
    return first


@triton.jit
def _merge(one, other):
    """Merge two softmax states. A state over no keys changes nothing."""
    top, total, summed = one
    other_top, other_total, other_summed = other
    new_top = tl.maximum(top, other_top)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    factor, other_factor = tl.exp2(top - base), tl.exp2(other_top - base)
    total = total * factor + other_total * other_factor
    return new_top, total, summed * factor[:, None] + other_summed * other_factor[:, None]


@triton.jit
def _write_output(out, token, num_tokens, rows, is_row, state, GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, DV):
    """Write the rows of a tile whose first token is `token`. Rows without keys, which are padding, become zeros."""
    _, total, summed = state
    result = summed / tl.where(total == 0.0, 1.0, total)[:, None]
    tokens, dims = token + rows // GROUP, tl.arange(0, DV)
    heads = (tokens.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * GROUP + rows % GROUP
    mask = (is_row & (tokens < num_tokens))[:, None] & (dims < VALUE_DIM)[None, :]
    tl.store(out + heads[:, None] * VALUE_DIM + dims[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _write_partial(sums, peaks, at, is_row, state, DV: tl.constexpr):
    """Store a softmax state in the rows `at`."""
    top, total, summed = state
    tl.store(peaks + at * 2, top, mask=is_row)
    tl.store(peaks + at * 2 + 1, total, mask=is_row)
    tl.store(sums + at[:, None] * DV + tl.arange(0, DV)[None, :], summed, mask=is_row[:, None])


@triton.jit
def _read_partial(sums, peaks, at, is_row, DV: tl.constexpr):
    """Load the softmax state that _write_partial stored."""
    top = tl.load(peaks + at * 2, mask=is_row, other=float("-inf"))
    total = tl.load(peaks + at * 2 + 1, mask=is_row, other=0.0)
    return top, total, tl.load(sums + at[:, None] * DV + tl.arange(0, DV)[None, :], mask=is_row[:, None], other=0.0)


@triton.jit
def _scores(products, rescale, cap, CAPPED):
    """Turn products into scores in units of log2, capped as cap * tanh(x / 2) after `rescale` made them x * log2(e)."""
    scores = products * rescale
    if CAPPED:
        scores = cap * (1.0 - 2.0 / (1.0 + tl.exp2(scores)))
    return scores


@triton.jit
def _rows_of_keys(where, positions, is_key, head, BLOCK_SIZE: tl.constexpr):
    """Rows [BLOCK_N] of a layer's [blocks, kv_heads, block_size] that hold the keys at these positions."""
    table, path, start = where
    on_path = positions >= start
    blocks = tl.load(table + positions // BLOCK_SIZE, mask=is_key & (positions < start), other=0)
    slots = tl.load(path + positions - start, mask=is_key & on_path, other=0)
    blocks = tl.where(on_path, slots // BLOCK_SIZE, blocks)
    offsets = tl.where(on_path, slots, positions) % BLOCK_SIZE
    return (blocks * tl.num_programs(1) + head) * BLOCK_SIZE + offsets


@triton.jit
def _load_vectors(base, rows, is_key, DIM: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr):
    """Keys or values [BLOCK_N, PADDED], zero beyond DIM and where there is no key. Without MASKED, all are keys."""
    dims = tl.arange(0, PADDED)
    at = base + rows.to(tl.int64)[:, None] * DIM + dims[None, :]
    if MASKED:
        return tl.load(at, mask=is_key[:, None] & (dims < DIM)[None, :], other=0.0)
    if PADDED > DIM:
        return tl.load(at, mask=(dims < DIM)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def _only_finite(value):
    """Values [BLOCK_N, DV] with zeros for non-finite numbers, and which rows [BLOCK_N] had any."""
    is_finite = tl.abs(value.to(tl.float32)) < float("inf")
    return tl.where(is_finite, value, 0.0), tl.min(is_finite.to(tl.int32), 1) == 0


@triton.jit
def _add_tile(split, scores, value, value_scales, spoils, seen, MASKED: tl.constexpr, SCALED: tl.constexpr, PRECISION):
    """One step of the online softmax: add scores [M, BLOCK_N] and values [BLOCK_N, DV] to a split's state."""
    top, total, summed = split
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    factor = tl.exp2(top - base)
    weights = tl.exp2(scores - base[:, None])
    if MASKED and not SCALED:
        weights = tl.where(seen & spoils[None, :], float("nan"), weights)
    total = total * factor + tl.sum(weights, 1)
    if SCALED:
        weights *= value_scales[None, :]
        if MASKED:
            weights = tl.where(seen, weights, 0.0)
    summed = tl.dot(weights.to(value.dtype), value, summed * factor[:, None], input_precision=PRECISION)
    return new_top, total, summed


@triton.jit
def _walk(
    state, first, last, queries, row_positions, row_lasts, where, end, head, layer, scoring, limits,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DV: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    CAPPED: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Process key tiles `first` to `last` (exclusive). The state is a pair: previous splits, and the current one.

    Positions from `end` on have no keys. Without MASKED, all rows see all keys of these tiles.
    """
    whole, split = state
    keys, values, key_scales, value_scales = layer
    rescale, cap = scoring
    for tile in tl.range(first, last, disable_licm=True):
        if tile * _BLOCK_N % _SPLIT == 0:
            whole = _merge(whole, split)
            split = _nothing(queries.shape[0], DV)
        positions = tile * _BLOCK_N + tl.arange(0, _BLOCK_N)
        is_key = positions < end
        at = _rows_of_keys(where, positions, is_key, head, BLOCK_SIZE)
        key = _load_vectors(keys, at, is_key, KEY_DIM, queries.shape[1], MASKED)
        value = _load_vectors(values, at, is_key, VALUE_DIM, DV, MASKED)
        scales_of_values, spoils = 1.0, False
        if SCALED:  # via float32, because the interpreter cannot convert integers to bfloat16 directly
            key, value = key.to(tl.float32).to(queries.dtype), value.to(tl.float32).to(queries.dtype)
            scales_of_values = tl.load(value_scales + at, mask=is_key, other=0.0)
        elif MASKED:  # here, while register pressure is low
            value, spoils = _only_finite(value)
        products = tl.dot(queries, tl.trans(key), input_precision=PRECISION)
        if SCALED:
            products *= tl.load(key_scales + at, mask=is_key, other=0.0)[None, :]
        first_seen = _first_seen(row_positions, limits[0], limits[1])  # here, so that it takes no registers elsewhere
        seen = (positions[None, :] <= row_lasts[:, None]) & (positions[None, :] >= first_seen[:, None])
        scores = _scores(products, rescale, cap, CAPPED)
        split = _add_tile(split, scores, value, scales_of_values, spoils, seen, MASKED, SCALED, PRECISION)
    return whole, split


@triton.jit
def _attend_item(
    item, paths, tables, lasts, query, out, sums, peaks, num_tokens, token_stride, head_stride, part_rows, layer,
    scoring, softmax,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, CAPPED: tl.constexpr, SCALED: tl.constexpr,
    PRECISION: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """Process one work item: write a tile's output, or the partial sums of one of its splits."""
    head = tl.program_id(1)
    token, count, position = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    where = tables + tl.load(item + 3), paths + tl.load(item + 5), tl.load(item + 4)
    first, last, part = tl.load(item + 6), tl.load(item + 7), tl.load(item + 8)

    rows = tl.arange(0, BLOCK_M)
    is_row = rows < count * GROUP
    tokens = token + rows // GROUP
    dims = tl.arange(0, DK)
    at = tokens.to(tl.int64) * token_stride + (head * GROUP + rows % GROUP) * head_stride
    mask = (is_row & (tokens < num_tokens))[:, None] & (dims < KEY_DIM)[None, :]
    queries = tl.load(query + at[:, None] + dims[None, :], mask=mask, other=0.0)

    # Key tiles that some row sees, and among them those that all rows see completely.
    window, chunk, sinks = softmax
    row_positions = position + rows // GROUP
    row_lasts, end = row_positions, position + count
    for_all = position  # the last position that all rows see
    if SPANS:
        row_lasts = tl.load(lasts + tokens, mask=is_row, other=0)
        for_all, end = tl.load(lasts + token), tl.load(lasts + token + count - 1) + 1
    last_tile = tl.minimum(last * _SPLIT // _BLOCK_N, tl.cdiv(end, _BLOCK_N))
    first_tile = tl.maximum(first * _SPLIT // _BLOCK_N, _first_seen(position, window, chunk) // _BLOCK_N)
    all_from = tl.maximum(first_tile, tl.cdiv(_first_seen(position + count - 1, window, chunk), _BLOCK_N))
    all_to = tl.minimum(last_tile, (for_all + 1) // _BLOCK_N)
    all_from = tl.minimum(all_from, last_tile)
    all_to = tl.maximum(all_from, all_to)

    # The kernel that merges partial sums begins with the sinks.
    state = _before(sinks, part < 0, head, rows, GROUP, DV), _nothing(BLOCK_M, DV)
    bounds = first_tile, all_from, all_to, last_tile
    for phase in tl.static_range(3):
        state = _walk(
            state, bounds[phase], bounds[phase + 1], queries, row_positions, row_lasts, where, end, head, layer,
            scoring, (window, chunk), KEY_DIM, VALUE_DIM, DV, BLOCK_SIZE, CAPPED, SCALED, PRECISION, phase != 1,
        )  # fmt: skip
    result = _merge(state[0], state[1])
    if part < 0:
        _write_output(out, token, num_tokens, rows, is_row, result, GROUP, VALUE_DIM, DV)
    elif first_tile < last_tile:
        at = head.to(tl.int64) * part_rows + part + first * count * GROUP + rows
        _write_partial(sums, peaks, at, is_row, result, DV)


@triton.jit(do_not_specialize=["num_tokens", "window", "chunk"], do_not_specialize_on_alignment=["plan"])
def _attend_kernel(
    query, keys, values, key_scales, value_scales, out, sums, peaks, plan, num_tokens, token_stride,
    head_stride, part_rows, rescale, cap, window, chunk, sinks,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, CAPPED: tl.constexpr, SCALED: tl.constexpr,
    PRECISION: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """Process the items; program p of P for a key-value head takes items p, p + P and so on."""
    layer = keys, values, key_scales, value_scales
    scoring, softmax = (rescale, cap), (window, chunk, sinks)
    paths, tables, lasts = plan + tl.load(plan + 3), plan + tl.load(plan + 4), plan + tl.load(plan + 5)
    for index in tl.range(tl.program_id(0), tl.load(plan), tl.num_programs(0), disable_licm=True):
        _attend_item(
            plan + _HEADER + index * _ITEM, paths, tables, lasts, query, out, sums, peaks, num_tokens, token_stride,
            head_stride, part_rows, layer, scoring, softmax, GROUP, KEY_DIM, VALUE_DIM, DK, DV, BLOCK_SIZE, BLOCK_M,
            CAPPED, SCALED, PRECISION, SPANS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "window", "chunk"], do_not_specialize_on_alignment=["plan"])
def _merge_kernel(
    out, sums, peaks, plan, num_tokens, part_rows, window, chunk, sinks,
    GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """Merge the partial sums of ROWS rows at a time, in the order of the splits."""
    head = tl.program_id(1)
    merges = plan + tl.load(plan + 2)
    for index in tl.range(tl.program_id(0), tl.load(plan + 1), tl.num_programs(0)):
        merge = merges + index * _MERGE
        token, count, position = tl.load(merge), tl.load(merge + 1), tl.load(merge + 2)
        num_splits, part = tl.load(merge + 3), tl.load(merge + 4)
        if not SPANS:  # the plan's number is of the rows' lasts
            num_splits = tl.minimum(num_splits, tl.cdiv(position + count, _SPLIT))
        rows = tl.load(merge + 5) + tl.arange(0, ROWS)
        is_row = rows < count * GROUP
        result = _before(sinks, True, head, rows, GROUP, DV)
        first = _first_seen(position, window, chunk) // _SPLIT
        for split in tl.range(first, num_splits, loop_unroll_factor=8):
            at = head.to(tl.int64) * part_rows + part + split * count * GROUP + rows
            result = _merge(result, _read_partial(sums, peaks, at, is_row, DV))
        _write_output(out, token, num_tokens, rows, is_row, result, GROUP, VALUE_DIM, DV)
