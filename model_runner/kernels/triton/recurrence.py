"""Recurrent layers by rows and pages on a GPU; recurrence/backend.py has the formulas, recurrence/plan.py the segments.

A program does one head of one choice, for some channels of its values, and keeps its part of the state in registers.
It computes the 32 rows of a block together, even if one of them is wanted. Products are IEEE float32, of one
shape, and rows are added in the order of positions. So a row's bits do not depend on which rows are computed with it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

_ROWS = 32
"""Rows of a block."""
_SEGMENT_FIELDS = 9
_VALUE_TILE = 16
"""Values' channels per program, so that a state of keys with 256 channels fits in registers."""
_SCANNED = 32
"""Channels of a selective scan per program."""
_CHANNELS = 256
"""Channels of a convolution per program."""


class RecurrenceSizes(NamedTuple):
    """As in RecurrentShape."""

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    delta: bool
    per_channel: bool


def recur(
    sizes: RecurrenceSizes,
    memory: Sequence[Tensor],
    plan: Tensor,
    starts: tuple[int, ...],
    rows: tuple[Tensor, Tensor, Tensor | None],
    output: Tensor,
) -> None:
    """Compute outputs and updates of a step's tokens, whose keys and decays are stored, and write pages.

    Args:
        sizes: of the recurrence.
        memory: its keys, decays, updates and states, as in RecurrentMemory.
        plan: int32 numbers of the plan, in order: segments, first segments, anchors, order, numbers of rows, paths.
        starts: where each of these begins, then the number of choices.
        rows: query [T, key_heads, key_dim], value [T, heads, value_dim], beta [T, heads] or None; contiguous float32.
        output: [T, heads, value_dim], receives the outputs.
    """
    query, value, beta = rows
    *parts, num_choices = starts
    _recur_kernel[(num_choices, sizes.heads, triton.cdiv(sizes.value_dim, _VALUE_TILE))](
        *memory,
        memory[0].stride(0),
        memory[3].stride(0),
        *(plan[start:] for start in parts),
        query,
        value,
        query if beta is None else beta,
        output,
        HEADS=sizes.heads,
        KEY_HEADS=sizes.key_heads,
        KEY_DIM=sizes.key_dim,
        VALUE_DIM=sizes.value_dim,
        STORED_VALUE=_stored(sizes.value_dim),
        DELTA=sizes.delta,
        PER_CHANNEL=sizes.per_channel,
        KEY_TILE=triton.next_power_of_2(_stored(sizes.key_dim)),
        VALUE_TILE=_VALUE_TILE,
        ROWS=_ROWS,
        FIELDS=_SEGMENT_FIELDS,
        num_warps=8,
        enable_fp_fusion=False,
    )


def scan(
    memory: Sequence[Tensor],
    plan: Tensor,
    starts: tuple[int, ...],
    parameters: tuple[Tensor, Tensor],
    output: Tensor,
) -> None:
    """Compute a selective scan of a step's tokens, whose rows are stored, and write pages.

    Args:
        memory: steps, values, inputs and states, as in ScanMemory.
        plan: int32 numbers of the plan, as in `recur`.
        starts: where their parts begin, then the number of choices.
        parameters: A [channels, states], and C [T, states]; contiguous float32.
        output: [T, channels], receives the outputs.
    """
    a, c = parameters
    channels, states = a.shape
    *parts, num_choices = starts
    _scan_kernel[(num_choices, triton.cdiv(channels, _SCANNED))](
        *memory,
        memory[0].stride(0),
        memory[3].stride(0),
        *(plan[start:] for start in parts),
        a,
        c,
        output,
        CHANNELS=channels,
        STATES=states,
        STATE_TILE=triton.next_power_of_2(states),
        TILE=_SCANNED,
        ROWS=_ROWS,
        FIELDS=_SEGMENT_FIELDS,
        num_warps=1,
        enable_fp_fusion=False,
    )


def convolve(
    memory: Sequence[Tensor],
    sources: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    output: Tensor,
    *,
    silu: bool,
) -> None:
    """Convolve x [T, channels], whose rows are stored, with weight [channels, kernel].

    Args:
        memory: inputs and last inputs, as in ConvMemory.
        sources: [T, kernel - 1] int32, as `Plan.inputs_of` returns them.
        x: contiguous float32.
        weight: contiguous float32.
        bias: [channels] or None.
        output: [T, channels], receives the outputs.
        silu: whether the outputs y become y / (1 + exp(-y)).
    """
    count, channels = x.shape
    _convolve_kernel[(count, triton.cdiv(channels, _CHANNELS))](
        *memory,
        *(part.stride(0) for part in memory),
        sources,
        x,
        weight,
        weight if bias is None else bias,
        output,
        CHANNELS=channels,
        KERNEL=weight.shape[1],
        HAS_BIAS=bias is not None,
        SILU=silu,
        TILE=_CHANNELS,
        ROWS=_ROWS,
        num_warps=4,
        enable_fp_fusion=False,
    )


@triton.jit
def _fields(segment):
    """The fields of an SwSegment, in their order."""
    first_token, num_tokens, paths_at = tl.load(segment), tl.load(segment + 1), tl.load(segment + 2)
    block, offset, is_folded = tl.load(segment + 3), tl.load(segment + 4), tl.load(segment + 5)
    page, first_fold, num_folds = tl.load(segment + 6), tl.load(segment + 7), tl.load(segment + 8)
    return first_token, num_tokens, paths_at, block, offset, is_folded, page, first_fold, num_folds


@triton.jit
def _flushed(x):
    """Decays and states so small that subnormal numbers would follow count as zero."""
    return tl.where(tl.abs(x) < 7.888609052210118e-31, 0.0, x)  # 2^-100


@triton.constexpr_function
def _stored(dim):
    """The stored size of a vector."""
    return (dim + 15) // 16 * 16


@triton.jit
def _row(tile, j, ROWS: tl.constexpr):
    """Row j of a tile [ROWS, n]. It must not be picked out of memory, where it may not be yet."""
    return tl.sum(tl.where(tl.arange(0, ROWS)[:, None] == j, tile, 0.0), 0)


@triton.jit
def _place(slots, head, ROWS: tl.constexpr, stride):
    """Where rows of a head are, counted in rows from the first block; and in numbers, where their blocks begin."""
    return head * ROWS + slots % ROWS, (slots // ROWS).to(tl.int64) * stride


@triton.jit
def _keys(keys, slots, is_present, key_head, stride, KEY_DIM: tl.constexpr, KEY_TILE: tl.constexpr, ROWS: tl.constexpr):
    """[ROWS, KEY_TILE], with zeros for rows that are not present."""
    row, start = _place(slots, key_head, ROWS, stride)
    d = tl.arange(0, KEY_TILE)
    at = start[:, None] + row[:, None] * _stored(KEY_DIM) + d[None, :]
    return tl.load(keys + at, mask=is_present[:, None] & (d < KEY_DIM)[None, :], other=0.0)


@triton.jit
def _decay(
    decays, slots, j, last, head, stride, KEY_DIM: tl.constexpr, KEY_TILE: tl.constexpr, ROWS: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
):  # fmt: skip
    """The decays [n] of row j, n = 1 or KEY_TILE; 1 for rows from `last` on."""
    slot = tl.sum(tl.where(tl.arange(0, ROWS) == j, slots, 0), 0)
    row, start = _place(slot, head, ROWS, stride)
    d = tl.arange(0, KEY_TILE if PER_CHANNEL else 1)
    size: tl.constexpr = _stored(KEY_DIM) if PER_CHANNEL else 1
    return tl.load(decays + start + row * size + d, mask=(d < KEY_DIM) & (j < last), other=1.0)


@triton.jit
def _updates(
    updates, slots, is_present, head, stride, STORED_VALUE: tl.constexpr, VALUE_TILE: tl.constexpr, ROWS: tl.constexpr
):
    """Addresses and mask of u [ROWS, VALUE_TILE]."""
    row, start = _place(slots, head, ROWS, stride)
    c = tl.program_id(2) * VALUE_TILE + tl.arange(0, VALUE_TILE)
    at = updates + start[:, None] + row[:, None] * STORED_VALUE + c[None, :]
    return at, is_present[:, None] & (c < STORED_VALUE)[None, :]


@triton.jit
def _fold(
    state, keys, decays, updates, slots, head, key_head, stride, KEY_DIM: tl.constexpr, STORED_VALUE: tl.constexpr,
    PER_CHANNEL: tl.constexpr, KEY_TILE: tl.constexpr, VALUE_TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The state after a block whose rows are at `slots`."""
    rows = tl.arange(0, ROWS)
    is_present = rows >= 0
    k = _keys(keys, slots, is_present, key_head, stride, KEY_DIM, KEY_TILE, ROWS)
    factors = tl.full([ROWS, KEY_TILE if PER_CHANNEL else 1], 1.0, tl.float32)
    from_start = tl.full([1, KEY_TILE if PER_CHANNEL else 1], 1.0, tl.float32)
    for step in range(ROWS):
        j = ROWS - 1 - step
        factors = tl.where((rows == j)[:, None], from_start, factors)
        a = _decay(decays, slots, j, ROWS, head, stride, KEY_DIM, KEY_TILE, ROWS, PER_CHANNEL)
        from_start = _flushed(from_start * a[None, :])
    at, mask = _updates(updates, slots, is_present, head, stride, STORED_VALUE, VALUE_TILE, ROWS)
    added = tl.dot(tl.trans(k * factors), tl.load(at, mask=mask, other=0.0), input_precision="ieee")
    return _flushed(state * tl.trans(from_start) + added)


@triton.jit
def _weights(
    k, q, keys, decays, slots, last, head, key_head, stride, KEY_DIM: tl.constexpr, DELTA: tl.constexpr,
    PER_CHANNEL: tl.constexpr, KEY_TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Weights [ROWS, ROWS] of u_j in u_i and in o_i, and the decays from the start to each row."""
    rows = tl.arange(0, ROWS)
    of_keys = tl.zeros([ROWS, ROWS], tl.float32)
    of_queries = tl.zeros([ROWS, ROWS], tl.float32)
    decay = tl.full([ROWS, KEY_TILE if PER_CHANNEL else 1], 1.0, tl.float32)
    if not PER_CHANNEL:
        if DELTA:
            of_keys = tl.dot(k, tl.trans(k), input_precision="ieee")
        of_queries = tl.dot(q, tl.trans(k), input_precision="ieee")
    for step in range(ROWS):
        j = ROWS - 1 - step
        is_column = (rows == j)[None, :]
        if PER_CHANNEL:
            other = decay * _row(k, j, ROWS)[None, :]
            if DELTA:
                of_keys = tl.where(is_column, tl.sum(k * other, 1)[:, None], of_keys)
            of_queries = tl.where(is_column, tl.sum(q * other, 1)[:, None], of_queries)
        else:
            of_keys = tl.where(is_column, of_keys * decay, of_keys)
            of_queries = tl.where(is_column, of_queries * decay, of_queries)
        a = _decay(decays, slots, j, last, head, stride, KEY_DIM, KEY_TILE, ROWS, PER_CHANNEL)
        decay = tl.where((rows >= j)[:, None], _flushed(decay * a[None, :]), decay)
    return of_keys, of_queries, decay


@triton.jit
def _compute(
    state, keys, decays, updates, query, value, beta, output, slots, first, last, tokens, head, key_head, stride,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    STORED_VALUE: tl.constexpr, DELTA: tl.constexpr, PER_CHANNEL: tl.constexpr, KEY_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute rows `first` to `last` - 1 of a block, which belong to these tokens; those before are stored."""
    rows, d = tl.arange(0, ROWS), tl.arange(0, KEY_TILE)
    c = tl.program_id(2) * VALUE_TILE + tl.arange(0, VALUE_TILE)
    is_new = (rows >= first) & (rows < last)
    k = _keys(keys, slots, rows < last, key_head, stride, KEY_DIM, KEY_TILE, ROWS)
    of_token = (tokens.to(tl.int64) * KEY_HEADS + key_head)[:, None] * KEY_DIM + d[None, :]
    q = tl.load(query + of_token, mask=is_new[:, None] & (d < KEY_DIM)[None, :], other=0.0)
    of_keys, of_queries, decay = _weights(
        k, q, keys, decays, slots, last, head, key_head, stride, KEY_DIM, DELTA, PER_CHANNEL, KEY_TILE, ROWS
    )
    at = (tokens.to(tl.int64) * HEADS + head)[:, None] * VALUE_DIM + c[None, :]
    mask = is_new[:, None] & (c < VALUE_DIM)[None, :]
    left = tl.load(value + at, mask=mask, other=0.0)
    if PER_CHANNEL:
        result = tl.dot(decay * q, state, input_precision="ieee")
        if DELTA:
            left -= tl.dot(decay * k, state, input_precision="ieee")
    else:
        result = decay * tl.dot(q, state, input_precision="ieee")
        if DELTA:
            left -= decay * tl.dot(k, state, input_precision="ieee")
    if DELTA:
        gains = tl.load(beta + tokens.to(tl.int64) * HEADS + head, mask=is_new, other=0.0)
    update_at, is_stored = _updates(updates, slots, rows < first, head, stride, STORED_VALUE, VALUE_TILE, ROWS)
    stored = tl.load(update_at, mask=is_stored, other=0.0)
    for j in range(last):
        u = _row(left, j, ROWS)
        if DELTA:
            u *= tl.sum(tl.where(rows == j, gains, 0.0), 0)
        u = tl.where(j < first, _row(stored, j, ROWS), u)
        stored = tl.where((rows == j)[:, None], u[None, :], stored)
        is_column = (rows == j)[None, :]
        if DELTA:
            weight = tl.sum(tl.where(is_column, of_keys, 0.0), 1)
            left = tl.where((rows > j)[:, None], left - weight[:, None] * u[None, :], left)
        weight = tl.sum(tl.where(is_column, of_queries, 0.0), 1)
        result = tl.where((rows >= j)[:, None], result + weight[:, None] * u[None, :], result)
    tl.store(update_at, stored, mask=is_new[:, None] & (c < STORED_VALUE)[None, :])
    tl.store(output + at, result, mask=mask)


@triton.jit(do_not_specialize=["rows_stride", "page_stride"])
def _recur_kernel(
    keys, decays, updates, states, rows_stride, page_stride, segments, first_segment, anchors, order, num_rows, paths,
    query, value, beta, output, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, STORED_VALUE: tl.constexpr, DELTA: tl.constexpr, PER_CHANNEL: tl.constexpr,
    KEY_TILE: tl.constexpr, VALUE_TILE: tl.constexpr, ROWS: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    choice, head = tl.program_id(0), tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    rows, d = tl.arange(0, ROWS), tl.arange(0, KEY_TILE)
    c = tl.program_id(2) * VALUE_TILE + tl.arange(0, VALUE_TILE)
    in_state = (head * _stored(KEY_DIM) + d)[:, None] * STORED_VALUE + c[None, :]
    is_stored = (d < KEY_DIM)[:, None] & (c < STORED_VALUE)[None, :]
    anchor = tl.load(anchors + choice)
    state = tl.load(states + anchor.to(tl.int64) * page_stride + in_state, mask=is_stored & (anchor >= 0), other=0.0)
    for index in range(tl.load(first_segment + choice), tl.load(first_segment + choice + 1)):
        first_token, num_tokens, paths_at, block, offset, is_folded, page, first_fold, num_folds = _fields(
            segments + index * FIELDS
        )
        is_draft = paths_at >= 0
        read = state
        for fold in range(num_folds):
            slots = tl.load(paths + (first_fold + fold) * ROWS + rows)
            read = _fold(
                read, keys, decays, updates, slots, head, key_head, rows_stride, KEY_DIM, STORED_VALUE, PER_CHANNEL,
                KEY_TILE, VALUE_TILE, ROWS,
            )  # fmt: skip
        # All known tokens at once, each draft by itself: its path has its own rows.
        for item in range(tl.where(is_draft, num_tokens, tl.minimum(num_tokens, 1))):
            slots = tl.load(paths + (paths_at + item) * ROWS + rows, mask=is_draft & (rows >= 0), other=0)
            slots = tl.where(is_draft, slots, block * ROWS + rows)
            token = tl.load(order + first_token + item)
            first = tl.load(num_rows + token) - 1
            last = tl.where(is_draft, first + 1, offset + num_tokens)
            is_new = (rows >= first) & (rows < last)
            tokens = tl.load(order + first_token + item + rows - first, mask=is_new, other=0)
            _compute(
                read, keys, decays, updates, query, value, beta, output, slots, first, last, tokens, head, key_head,
                rows_stride, HEADS, KEY_HEADS, KEY_DIM, VALUE_DIM, STORED_VALUE, DELTA, PER_CHANNEL, KEY_TILE,
                VALUE_TILE, ROWS,
            )  # fmt: skip
            tl.debug_barrier()  # later rows read the updates, which other threads have stored
        if is_folded != 0:
            state = _fold(
                state, keys, decays, updates, block * ROWS + rows, head, key_head, rows_stride, KEY_DIM, STORED_VALUE,
                PER_CHANNEL, KEY_TILE, VALUE_TILE, ROWS,
            )  # fmt: skip
            tl.store(states + page.to(tl.int64) * page_stride + in_state, state, mask=is_stored & (page >= 0))


@triton.jit
def _take_up(
    state, steps, values, inputs, decays, slot, stride, CHANNELS: tl.constexpr, STATES: tl.constexpr,
    STATE_TILE: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The state [STATE_TILE, TILE] of a selective scan after the row at a slot."""
    channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
    n = tl.arange(0, STATE_TILE)
    block, offset = (slot // ROWS).to(tl.int64) * stride, slot % ROWS
    at = block + offset * _stored(CHANNELS) + channel
    step = tl.load(steps + at, mask=channel < CHANNELS, other=0.0)
    value = tl.load(values + at, mask=channel < CHANNELS, other=0.0)
    b = tl.load(inputs + block + offset * STATES + n, mask=n < STATES, other=0.0)
    return _flushed(tl.exp(step[None, :] * decays) * state + b[:, None] * value[None, :])


@triton.jit(do_not_specialize=["rows_stride", "page_stride"])
def _scan_kernel(
    steps, values, inputs, states, rows_stride, page_stride, segments, first_segment, anchors, order, num_rows, paths,
    a, c, output, CHANNELS: tl.constexpr, STATES: tl.constexpr, STATE_TILE: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    choice = tl.program_id(0)
    channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
    n = tl.arange(0, STATE_TILE)
    is_there = (n < STATES)[:, None] & (channel < CHANNELS)[None, :]
    decays = tl.load(a + channel[None, :] * STATES + n[:, None], mask=is_there, other=0.0)
    in_state = n[:, None] * _stored(CHANNELS) + channel[None, :]
    anchor = tl.load(anchors + choice)
    state = tl.load(states + anchor.to(tl.int64) * page_stride + in_state, mask=is_there & (anchor >= 0), other=0.0)
    for index in range(tl.load(first_segment + choice), tl.load(first_segment + choice + 1)):
        first_token, num_tokens, paths_at, block, offset, is_folded, page, first_fold, num_folds = _fields(
            segments + index * FIELDS
        )
        is_draft = paths_at >= 0
        read = state
        for row in range(num_folds * ROWS):
            slot = tl.load(paths + first_fold * ROWS + row)
            read = _take_up(
                read, steps, values, inputs, decays, slot, rows_stride, CHANNELS, STATES, STATE_TILE, TILE, ROWS
            )
        # All known tokens in one pass over their block, each draft by a pass over the rows of its path.
        for item in range(tl.where(is_draft, num_tokens, 1)):
            last = tl.where(is_folded != 0, ROWS, offset + num_tokens)
            if is_draft:
                last = tl.load(num_rows + tl.load(order + first_token + item))
            reached = read
            for row in range(last):
                slot = block * ROWS + row
                if is_draft:
                    slot = tl.load(paths + (paths_at + item) * ROWS + row)
                reached = _take_up(
                    reached, steps, values, inputs, decays, slot, rows_stride, CHANNELS, STATES, STATE_TILE, TILE, ROWS
                )
                of_segment = tl.where(is_draft, item, row - offset)
                is_new = tl.where(is_draft, row == last - 1, (of_segment >= 0) & (of_segment < num_tokens))
                if is_new:
                    token = tl.load(order + first_token + of_segment).to(tl.int64)
                    weights = tl.load(c + token * STATES + n, mask=n < STATES, other=0.0)
                    y = tl.sum(weights[:, None] * reached, 0)
                    tl.store(output + token * CHANNELS + channel, y, mask=channel < CHANNELS)
            if is_folded != 0:
                state = reached
        tl.store(states + page.to(tl.int64) * page_stride + in_state, state, mask=is_there & (page >= 0))


@triton.jit(do_not_specialize=["rows_stride", "page_stride"])
def _convolve_kernel(
    inputs, last, rows_stride, page_stride, sources, x, weight, bias, output, CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_there = channel < CHANNELS
    total = tl.zeros([TILE], tl.float32)
    if HAS_BIAS:
        total = tl.load(bias + channel, mask=is_there, other=0.0)
    for tap in tl.static_range(KERNEL - 1):
        source = tl.load(sources + token * (KERNEL - 1) + tap)
        of_page = -2 - source
        in_step = (source >= 0) & (source % 2 == 1)
        slot = source // 2
        row = (slot // ROWS).to(tl.int64) * rows_stride + slot % ROWS * CHANNELS
        in_page = (of_page // (KERNEL - 1)).to(tl.int64) * page_stride + of_page % (KERNEL - 1) * CHANNELS
        earlier = tl.load(inputs + row + channel, mask=is_there & (source >= 0) & ~in_step, other=0.0)
        earlier += tl.load(x + slot.to(tl.int64) * CHANNELS + channel, mask=is_there & in_step, other=0.0)
        earlier += tl.load(last + in_page + channel, mask=is_there & (source < -1), other=0.0)
        total += tl.load(weight + channel * KERNEL + tap, mask=is_there, other=0.0) * earlier
    newest = tl.load(x + token * CHANNELS + channel, mask=is_there, other=0.0)
    total += tl.load(weight + channel * KERNEL + KERNEL - 1, mask=is_there, other=0.0) * newest
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    tl.store(output + token * CHANNELS + channel, total, mask=is_there)
