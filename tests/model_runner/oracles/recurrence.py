"""Recurrences and convolutions in plain torch for any device, which the native backends are tested against.

Every token is computed alone, by operations whose shapes follow from its position only. So its bits do not depend on
what else is in the batch.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_runner.batch import Batch
from model_runner.recurrence.backend import RecurrenceBackend, has_silu
from model_runner.recurrence.plan import Plan, Segment, make_plan
from model_runner.recurrence.states import BLOCK, RecurrentMemory, ScanMemory, StateCache

TINY = 2.0**-100
"""Smaller products of decays and numbers of states count as zero: subnormal numbers would slow a processor down."""


@dataclass(slots=True)
class ReferenceMetadata:
    """A plan, and what layers have in common of it, on the device."""

    plan: Plan
    block_of: Tensor  # [T] rows block of each token's row
    offset_of: Tensor  # [T]
    conv_inputs: dict[int, Tensor] = field(default_factory=dict)
    """By kernel size, `Plan.inputs_of`."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a block up to some position, of all heads: n rows, H heads."""

    keys: Tensor  # [n, H, key_dim]
    factors: Tensor  # [n, H, 1 or key_dim] product of the decays after each row
    from_start: Tensor  # [H, 1 or key_dim] product of all decays
    updates: Tensor  # [n, H, value_dim]


class ReferenceRecurrence(RecurrenceBackend[ReferenceMetadata]):
    """One row after another."""

    def __init__(self, cache: StateCache) -> None:
        self.cache = cache

    def prepare(self, batch: Batch) -> ReferenceMetadata:
        plan = make_plan(batch)
        slots = self._to_device(plan.slots)
        return ReferenceMetadata(plan, slots // BLOCK, slots % BLOCK)

    def recur(
        self,
        index: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        beta: Tensor | None,
        metadata: ReferenceMetadata,
    ) -> Tensor:
        plan, memory, shape = metadata.plan, self.cache.recurrent[index], self.cache.recurrences[index]
        memory.put(metadata.block_of, metadata.offset_of, key, log_decay)
        layer = _Layer(self.cache, index)
        output = torch.empty_like(value)
        for choice, page in enumerate(plan.anchors):
            state = layer.state(page)
            for segment in plan.segments[plan.first_segment[choice] : plan.first_segment[choice + 1]]:
                read = state
                for path in plan.paths[segment.first_fold : segment.first_fold + segment.num_folds]:
                    read = layer.fold(read, path)
                for token, slots in _tokens(plan, segment):
                    gain = None if beta is None else beta[token].float()
                    output[token] = layer.step(read, slots, query[token].float(), value[token].float(), gain)
                if segment.is_folded:
                    state = layer.fold(state, _block(segment.block))
                if segment.page >= 0:
                    memory.states[segment.page, :, : shape.key_dim, : shape.value_dim] = state
        return output

    def scan(
        self,
        index: int,
        step: Tensor,
        value: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        metadata: ReferenceMetadata,
    ) -> Tensor:
        plan, memory = metadata.plan, self.cache.scan[index]
        memory.put(metadata.block_of, metadata.offset_of, step, value, b)
        scan = _Scan(memory, a.float(), c.float())
        output = torch.empty(value.shape, dtype=torch.float32, device=value.device)
        for choice, page in enumerate(plan.anchors):
            state = scan.state(page)
            for segment in plan.segments[plan.first_segment[choice] : plan.first_segment[choice + 1]]:
                read = state
                for path in plan.paths[segment.first_fold : segment.first_fold + segment.num_folds]:
                    read = scan.advance(read, path)
                for token, slots in _tokens(plan, segment):
                    output[token] = scan.output(scan.advance(read, slots), token)
                if segment.is_folded:
                    state = scan.advance(state, _block(segment.block))
                if segment.page >= 0:
                    memory.states[segment.page, :, : scan.channels] = state
        return output.to(value.dtype)

    def convolve(
        self,
        index: int,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        metadata: ReferenceMetadata,
    ) -> Tensor:
        memory, kernel = self.cache.conv[index], self.cache.convolutions[index].kernel
        rows, weights = x.float(), weight.float()
        memory.inputs[metadata.block_of, metadata.offset_of] = rows
        if kernel not in metadata.conv_inputs:
            metadata.conv_inputs[kernel] = self._to_device(metadata.plan.inputs_of(kernel))
        total = torch.zeros_like(rows)
        for tap, sources in enumerate(metadata.conv_inputs[kernel].unbind(1)):
            earlier = torch.zeros_like(rows)
            in_step, in_pages = (sources >= 0) & (sources % 2 == 1), sources < -1
            in_rows = (sources >= 0) & ~in_step
            slots = sources[in_rows] // 2
            earlier[in_step] = rows[sources[in_step] // 2]
            earlier[in_rows] = memory.inputs[slots // BLOCK, slots % BLOCK]
            of_page = -2 - sources[in_pages]
            earlier[in_pages] = memory.last[of_page // (kernel - 1), of_page % (kernel - 1)]
            total += weights[:, tap] * earlier
        total += weights[:, -1] * rows
        if bias is not None:
            total += bias.float()
        if has_silu(activation):
            total /= total.neg().exp_().add_(1)
        for page, block in metadata.plan.written:
            memory.last[page] = memory.inputs[block, BLOCK + 1 - kernel :]
        return total.to(x.dtype)

    def _to_device(self, array: NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self.cache.device)


class _Layer:
    """The arithmetic of one recurrence."""

    def __init__(self, cache: StateCache, index: int) -> None:
        self._memory: RecurrentMemory = cache.recurrent[index]
        self._shape = cache.recurrences[index]
        self._device = cache.device

    def state(self, page: int) -> Tensor:
        """[H, key_dim, value_dim] of a page; -1 for zero."""
        shape = self._shape
        if page < 0:
            return torch.zeros(shape.heads, shape.key_dim, shape.value_dim, device=self._device)
        return self._memory.states[page, :, : shape.key_dim, : shape.value_dim].clone()

    def step(
        self, state: Tensor, slots: NDArray[np.int32], query: Tensor, value: Tensor, beta: Tensor | None
    ) -> Tensor:
        """Write u of the last of these rows, and return its output [H, value_dim]."""
        rows = self._rows(slots)
        decayed = rows.keys * rows.factors
        update, earlier = value, rows.updates[:-1]
        if beta is not None:
            key = rows.keys[-1]
            seen = _read(state, rows.from_start * key) + _weighted((decayed[:-1] * key).sum(-1), earlier)
            update = beta.unsqueeze(-1) * (value - seen)
        last = int(slots[-1])
        self._memory.updates[last // BLOCK, :, last % BLOCK, : self._shape.value_dim] = update
        query = self._of_heads(query)
        updates = torch.cat([earlier, update.unsqueeze(0)])
        return _read(state, rows.from_start * query) + _weighted((decayed * query).sum(-1), updates)

    def fold(self, state: Tensor, slots: NDArray[np.int32]) -> Tensor:
        """The state after a block of rows."""
        rows = self._rows(slots)
        state = state * rows.from_start.unsqueeze(-1)
        for key, update in zip(rows.keys * rows.factors, rows.updates, strict=True):
            state += key.unsqueeze(-1) * update.unsqueeze(-2)
        return torch.where(state.abs() < TINY, 0, state)

    def _rows(self, slots: NDArray[np.int32]) -> _Rows:
        index = torch.from_numpy(slots.astype(np.int64)).to(self._device)
        places, shape = (index // BLOCK, slice(None), index % BLOCK), self._shape
        keys = self._of_heads(self._memory.keys[places][..., : shape.key_dim])
        decays = self._memory.decays[places]
        decays = decays[..., : shape.key_dim] if shape.per_channel else decays.unsqueeze(-1)
        products = decays.flip(0).cumprod(0).flip(0)  # from each row to the last
        products = torch.where(products < TINY, 0, products)
        factors = torch.cat([products[1:], torch.ones_like(products[:1])])
        return _Rows(keys, factors, products[0], self._memory.updates[places][..., : shape.value_dim])

    def _of_heads(self, of_key_heads: Tensor) -> Tensor:
        """[.., H, dim] from [.., key_heads, dim]."""
        return of_key_heads.repeat_interleave(self._shape.heads // self._shape.key_heads, -2)


class _Scan:
    """The arithmetic of one selective scan."""

    def __init__(self, memory: ScanMemory, a: Tensor, c: Tensor) -> None:
        """`a` is [channels, states], and `c` [T, states]."""
        self._memory, self._a, self._c = memory, a.T, c
        self.channels = len(a)

    def state(self, page: int) -> Tensor:
        """[states, channels] of a page; -1 for zero."""
        return torch.zeros_like(self._a) if page < 0 else self._memory.states[page, :, : self.channels].clone()

    def advance(self, state: Tensor, slots: NDArray[np.int32]) -> Tensor:
        """The state after rows, one after another."""
        index = torch.from_numpy(slots.astype(np.int64)).to(state.device)
        places, memory = (index // BLOCK, index % BLOCK), self._memory
        rows = (memory.steps[places], memory.values[places], memory.inputs[places])
        for step, value, b in zip(*rows, strict=True):
            decay = (step[: self.channels] * self._a).exp()
            state = decay * state + b.unsqueeze(-1) * value[: self.channels]
            state = torch.where(state.abs() < TINY, 0, state)
        return state

    def output(self, state: Tensor, token: int) -> Tensor:
        """[channels] of a token, from the state after it."""
        return (self._c[token].unsqueeze(-1) * state).sum(0)


def _tokens(plan: Plan, segment: Segment) -> list[tuple[int, NDArray[np.int32]]]:
    """Each token of a segment, and the slots of its rows."""
    tokens = plan.order[segment.first : segment.first + segment.num_tokens].tolist()
    if segment.paths >= 0:
        paths = plan.paths[segment.paths : segment.paths + segment.num_tokens]
    else:
        paths = np.broadcast_to(_block(segment.block), (len(tokens), BLOCK))
    return [(token, path[: plan.num_rows[token]]) for token, path in zip(tokens, paths, strict=True)]


def _block(block: int) -> NDArray[np.int32]:
    """The slots of a rows block."""
    return np.arange(block * BLOCK, (block + 1) * BLOCK, dtype=np.int32)


def _read(state: Tensor, vectors: Tensor) -> Tensor:
    """S^T x of each head: [H, value_dim]."""
    return (state * vectors.unsqueeze(-1)).sum(1)


def _weighted(weights: Tensor, updates: Tensor) -> Tensor:
    """Weighted sum of [n, H, value_dim] with weights [n, H]."""
    return (weights.unsqueeze(-1) * updates).sum(0)
