"""The interface of recurrent layers, and the memory of their rows and pages.

One recurrence covers gated delta nets, KDA, Mamba 2 and lightning attention. A head has a state S [key_dim, value_dim];
for each token, with a decay a for the head or for each channel of its key:

    S <- Diag(a) S,  u = beta (v - S^T k) or u = v,  S <- S + k u^T,  o = S^T q

It is computed from anchors. The state after every full block of 32 positions depends on the state before the block and
on the block's rows (k, u, a). A token's output depends on the anchor before it and on the rows of its own block. So its
bits depend neither on chunks nor on drafts nor on where a cached prefix ended.

Mamba's selective scan has a decay for each pair of a channel and one of its N states, with a step dt of the channel:

    h[n] <- exp(dt A[n]) h[n] + dt x B[n],  y = sum over n of C[n] h[n]

Its rows are (dt, dt x, B). From the anchor on they are taken up one after another, for every token anew.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import torch
from torch import Tensor

from model_runner.batch import Batch
from model_runner.contract import BlockCopy
from model_runner.kernels.memory import huge_pages
from model_runner.kv_cache import Move

BLOCK = 32
"""Positions in a block. Results depend on it."""
LANES = 16
"""Head dimensions and a scan's channels are stored with zeros up to a multiple of this."""

Metadata = TypeVar("Metadata")


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """Shape of a layer's recurrence."""

    heads: int
    """Heads of values and states, a multiple of `key_heads`. Consecutive heads share a query and a key."""
    key_heads: int
    key_dim: int
    value_dim: int
    delta: bool
    """Whether u = beta (v - S^T k); otherwise u = v."""
    per_channel: bool
    """Whether every channel of a key has its own decay; otherwise every head has one."""

    @property
    def is_whole(self) -> bool:
        """Whether head dimensions are stored without zeros behind them."""
        return (padded(self.key_dim), padded(self.value_dim)) == (self.key_dim, self.value_dim)

    @property
    def keys(self) -> tuple[int, ...]:
        """Shape of a block's keys."""
        return self.key_heads, BLOCK, padded(self.key_dim)

    @property
    def decays(self) -> tuple[int, ...]:
        """Shape of a block's decays."""
        return (self.heads, BLOCK, padded(self.key_dim)) if self.per_channel else (self.heads, BLOCK)

    @property
    def updates(self) -> tuple[int, ...]:
        """Shape of a block's u."""
        return self.heads, BLOCK, padded(self.value_dim)

    @property
    def state(self) -> tuple[int, ...]:
        """Shape of a page's state."""
        return self.heads, padded(self.key_dim), padded(self.value_dim)

    @property
    def rows_bytes(self) -> int:
        """Memory of a rows block."""
        return sum(map(math.prod, (self.keys, self.decays, self.updates))) * torch.float32.itemsize

    @property
    def page_bytes(self) -> int:
        """Memory of a page."""
        return math.prod(self.state) * torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class ScanShape:
    """Shape of a layer's selective scan."""

    channels: int
    states: int
    """States of a channel."""

    @property
    def rows(self) -> tuple[int, int]:
        """Shape of a block's steps, and of its values."""
        return BLOCK, padded(self.channels)

    @property
    def state(self) -> tuple[int, int]:
        """Shape of a page's state."""
        return self.states, padded(self.channels)

    @property
    def rows_bytes(self) -> int:
        """Memory of a rows block."""
        return (2 * math.prod(self.rows) + BLOCK * self.states) * torch.float32.itemsize

    @property
    def page_bytes(self) -> int:
        """Memory of a page."""
        return math.prod(self.state) * torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class ConvShape:
    """Shape of a causal depthwise convolution: y_p = sum over i of w_i x_(p - kernel + 1 + i), per channel."""

    channels: int
    kernel: int
    """Inputs per output, at most 33: the newest block holds all that a later token needs."""

    def __post_init__(self) -> None:
        if not 1 <= self.kernel <= BLOCK + 1:
            raise ValueError(f"a convolution over {self.kernel} positions is not supported; use 1 to {BLOCK + 1}")

    @property
    def rows_bytes(self) -> int:
        """Memory of a rows block."""
        return BLOCK * self.channels * torch.float32.itemsize

    @property
    def page_bytes(self) -> int:
        """Memory of a page: the last inputs before the block's end."""
        return (self.kernel - 1) * self.channels * torch.float32.itemsize


def padded(dim: int) -> int:
    """A head dimension, or a number of a scan's channels, as it is stored."""
    return -(-dim // LANES) * LANES


@dataclass(frozen=True, slots=True)
class RecurrentMemory:
    """Rows and pages of one recurrence, or with a dimension of layers after the first, of all of the same shape."""

    keys: Tensor  # [blocks, key_heads, BLOCK, key_dim]
    decays: Tensor  # [blocks, heads, BLOCK] or [blocks, heads, BLOCK, key_dim]: factors, not logarithms
    updates: Tensor  # [blocks, heads, BLOCK, value_dim]
    states: Tensor  # [pages, heads, key_dim, value_dim]

    def put(self, blocks: Tensor, offsets: Tensor, key: Tensor, log_decay: Tensor) -> None:
        """Store keys and decays of T tokens, of one layer, at blocks and offsets [T]."""
        places = (blocks, slice(None), offsets)
        self.keys[(*places, slice(key.shape[-1]))] = key.float()
        decays = self.decays if log_decay.dim() == 2 else self.decays[..., : key.shape[-1]]
        decays[places] = log_decay.float().exp()

    def layer(self, index: int) -> "RecurrentMemory":
        """The memory of one of the layers."""
        return RecurrentMemory(*(part[:, index] for part in (self.keys, self.decays, self.updates, self.states)))


@dataclass(frozen=True, slots=True)
class ScanMemory:
    """Rows and pages of one selective scan, or with a dimension of layers after the first, of all of the same shape."""

    steps: Tensor  # [blocks, BLOCK, channels]
    values: Tensor  # [blocks, BLOCK, channels] inputs times steps
    inputs: Tensor  # [blocks, BLOCK, states] B
    states: Tensor  # [pages, states, channels]

    def put(self, blocks: Tensor, offsets: Tensor, step: Tensor, value: Tensor, b: Tensor) -> None:
        """Store the rows of T tokens, of one layer, at blocks and offsets [T]."""
        channels = slice(step.shape[-1])
        self.steps[blocks, offsets, channels] = step.float()
        self.values[blocks, offsets, channels] = value.float()
        self.inputs[blocks, offsets] = b.float()

    def layer(self, index: int) -> "ScanMemory":
        """The memory of one of the layers."""
        return ScanMemory(*(part[:, index] for part in (self.steps, self.values, self.inputs, self.states)))


@dataclass(frozen=True, slots=True)
class ConvMemory:
    """Rows and pages of one convolution, or with a dimension of layers after the first, of all of the same shape."""

    inputs: Tensor  # [blocks, BLOCK, channels]
    last: Tensor  # [pages, kernel - 1, channels] inputs before the end of the page's block

    def layer(self, index: int) -> "ConvMemory":
        """The memory of one of the layers."""
        return ConvMemory(self.inputs[:, index], self.last[:, index])


class StateCache:
    """Rows blocks and pages of all recurrent layers of a model, in float32.

    A rows block, and a page, is contiguous for all layers together.
    """

    def __init__(
        self,
        recurrences: Sequence[RecurrentShape],
        convolutions: Sequence[ConvShape],
        num_rows_blocks: int,
        num_pages: int,
        device: torch.device,
        group: int = 0,
        scans: Sequence[ScanShape] = (),
    ) -> None:
        """Allocate zeros. `group` is the number of the rows blocks' cache group."""
        self._group = group
        self.recurrences = tuple(recurrences)
        self.convolutions = tuple(convolutions)
        self.scans = tuple(scans)
        self.num_rows_blocks = num_rows_blocks
        self.num_pages = num_pages
        self.device = device
        rows_bytes, page_bytes = state_bytes(recurrences, convolutions, scans)
        self._rows = _zeros(num_rows_blocks, rows_bytes, device)
        self._pages = _zeros(num_pages, page_bytes, device)
        self._scratch = _zeros(0, scratch_bytes(recurrences, convolutions, scans), device)
        rows, pages = _Pieces(self._rows), _Pieces(self._pages)
        self._groups = {shape: self._take(shape, recurrences.count(shape), rows, pages) for shape in set(recurrences)}
        self._scan_groups = {shape: self._take_scans(shape, scans.count(shape), rows, pages) for shape in set(scans)}
        self._conv_groups = {
            shape: ConvMemory(
                rows.take(convolutions.count(shape), BLOCK, shape.channels),
                pages.take(convolutions.count(shape), shape.kernel - 1, shape.channels),
            )
            for shape in set(convolutions)
        }

    @cached_property
    def recurrent(self) -> list[RecurrentMemory]:
        """Memory of each recurrence."""
        layers = self.recurrences
        return [self._groups[shape].layer(layers[:index].count(shape)) for index, shape in enumerate(layers)]

    @cached_property
    def scan(self) -> list[ScanMemory]:
        """Memory of each selective scan."""
        layers = self.scans
        return [self._scan_groups[shape].layer(layers[:index].count(shape)) for index, shape in enumerate(layers)]

    @cached_property
    def conv(self) -> list[ConvMemory]:
        """Memory of each convolution."""
        layers = self.convolutions
        return [self._conv_groups[shape].layer(layers[:index].count(shape)) for index, shape in enumerate(layers)]

    def add_scratch(self, count: int) -> None:
        """Allocate scratch blocks, which follow the rows blocks. Only native kernels take them."""
        width = scratch_bytes(self.recurrences, self.convolutions, self.scans)
        self._scratch = _zeros(count, width, self.device)

    def scratch(self, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Parts [num_scratch, *shape] of the scratch blocks, whose memory every recurrence and convolution uses.

        A step writes all rows of a scratch block in a layer before it reads any.
        """
        pieces = _Pieces(self._scratch)
        return [pieces.take(*shape) for shape in shapes]

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy rows blocks. No destination may be a source."""
        for source, destination, group in copies:
            if group == self._group:
                self._rows[destination] = self._rows[source]

    def move(self, moves: Sequence[Move]) -> None:
        """Copy single tokens' rows to other places. All are read before any is written."""
        places = [move[:4] for move in moves if move.group == self._group]
        if not places:
            return
        old_block, old, new_block, new = torch.tensor(places, device=self.device).unbind(1)
        for group in self._groups.values():
            for rows in (group.keys, group.updates, group.decays):
                rows[new_block, :, :, new] = rows[old_block, :, :, old]
        of_scans = [part for scan in self._scan_groups.values() for part in (scan.steps, scan.values, scan.inputs)]
        for rows in (*of_scans, *(conv.inputs for conv in self._conv_groups.values())):
            rows[new_block, :, new] = rows[old_block, :, old]

    def _take(self, shape: RecurrentShape, layers: int, rows: "_Pieces", pages: "_Pieces") -> RecurrentMemory:
        keys, decays, updates = (rows.take(layers, *part) for part in (shape.keys, shape.decays, shape.updates))
        return RecurrentMemory(keys, decays, updates, pages.take(layers, *shape.state))

    def _take_scans(self, shape: ScanShape, layers: int, rows: "_Pieces", pages: "_Pieces") -> ScanMemory:
        steps, values = rows.take(layers, *shape.rows), rows.take(layers, *shape.rows)
        return ScanMemory(steps, values, rows.take(layers, BLOCK, shape.states), pages.take(layers, *shape.state))


class _Pieces:
    """Takes one piece after another out of the numbers of every block or page."""

    def __init__(self, memory: Tensor) -> None:
        """`memory` is [count, numbers]."""
        self._memory = memory
        self._taken = 0

    def take(self, *shape: int) -> Tensor:
        """[count, *shape], a view."""
        start, self._taken = self._taken, self._taken + math.prod(shape)
        return self._memory[:, start : self._taken].view(len(self._memory), *shape)


def _zeros(count: int, num_bytes: int, device: torch.device) -> Tensor:
    """[count, num_bytes / 4] float32; on CPU from zero pages, which take memory only when they are written."""
    if device.type == "cpu" and count:
        return huge_pages(count * num_bytes).view(torch.float32).view(count, num_bytes // torch.float32.itemsize)
    return torch.zeros(count, num_bytes // torch.float32.itemsize, device=device)


def state_bytes(
    recurrences: Sequence[RecurrentShape], convolutions: Sequence[ConvShape], scans: Sequence[ScanShape] = ()
) -> tuple[int, int]:
    """Memory of a rows block and of a page."""
    shapes: list[RecurrentShape | ConvShape | ScanShape] = [*recurrences, *convolutions, *scans]
    return sum(shape.rows_bytes for shape in shapes), sum(shape.page_bytes for shape in shapes)


def scratch_bytes(
    recurrences: Sequence[RecurrentShape], convolutions: Sequence[ConvShape], scans: Sequence[ScanShape] = ()
) -> int:
    """Memory of a scratch block, which has the rows of one layer, the largest."""
    shapes: list[RecurrentShape | ConvShape | ScanShape] = [*recurrences, *convolutions, *scans]
    return max((shape.rows_bytes for shape in shapes), default=0)


@dataclass(frozen=True, slots=True)
class GatedDeltaNetParameters:
    """Parameters of a gated delta net between its projections, with H heads."""

    conv_weight: Tensor  # [channels, kernel]
    conv_bias: Tensor | None
    a_log: Tensor  # [H]
    dt_bias: Tensor  # [H]
    norm: Tensor  # [value_dim]
    norm_eps: float
    gain: float = 1.0
    """Factor on sigmoid(b), the beta of the recurrence."""


@dataclass(frozen=True, slots=True)
class Mamba2Parameters:
    """Parameters of a Mamba 2 layer between its projections, with H heads."""

    conv_weight: Tensor  # [channels, kernel]
    conv_bias: Tensor | None
    a_log: Tensor  # [H]
    dt_bias: Tensor  # [H]
    d: Tensor  # [H]
    norm: Tensor | None  # [H * value_dim]
    norm_eps: float
    norm_groups: int
    """Parts of the output that have a norm each."""
    step_limits: tuple[float, float]


@dataclass(frozen=True, slots=True)
class ShortConvolutionParameters:
    """Parameters of a short convolution between its projections."""

    conv_weight: Tensor  # [channels, kernel]
    conv_bias: Tensor | None


MixerParameters = GatedDeltaNetParameters | Mamba2Parameters | ShortConvolutionParameters


class RecurrenceBackend(ABC, Generic[Metadata]):
    """Computes recurrences and convolutions of a step, and writes their rows and pages.

    Guarantee: an output row depends, bit for bit, only on the inputs of its own token and of those before it on its
    path. It does not depend on other rows, on how the prompt was chunked, on drafts, or on the blocks and pages used.
    """

    cache: StateCache

    @abstractmethod
    def prepare(self, batch: Batch) -> Metadata:
        """Data that all layers of a step share, from `batch.states`. Called once per step.

        Raises:
            ValueError: if the batch has no states, or they do not fit its tokens.
        """

    @abstractmethod
    def recur(
        self,
        index: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        beta: Tensor | None,
        metadata: Metadata,
    ) -> Tensor:
        """Write the rows of T tokens, pass through the recurrence, and write pages.

        Args:
            index: of the recurrence in the cache.
            query: [T, key_heads, key_dim], normalised and scaled as the layer does.
            key: [T, key_heads, key_dim].
            value: [T, heads, value_dim].
            log_decay: [T, heads] or [T, heads, key_dim], as `per_channel` says: the logarithm of a, not positive. The
                backend stores a itself and multiplies decays, which needs no exponential for each pair of tokens and
                does not overflow.
            beta: [T, heads], or None without `delta`.
            metadata: the result of `prepare` for this step.

        Returns:
            [T, heads, value_dim] in the type of `value`.
        """

    @abstractmethod
    def scan(
        self,
        index: int,
        step: Tensor,
        value: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        metadata: Metadata,
    ) -> Tensor:
        """Write the rows of T tokens, pass through the selective scan, and write pages.

        Args:
            index: of the scan in the cache.
            step: [T, channels] dt, not negative.
            value: [T, channels] inputs times their steps.
            a: [channels, states] A of the layer, not positive.
            b: [T, states].
            c: [T, states].
            metadata: the result of `prepare` for this step.

        Returns:
            [T, channels] in the type of `value`.
        """

    @abstractmethod
    def convolve(
        self, index: int, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, metadata: Metadata
    ) -> Tensor:
        """Write the inputs of T tokens as rows, apply a causal depthwise convolution, and write pages.

        Args:
            index: of the convolution in the cache.
            x: [T, channels].
            weight: [channels, kernel], the newest input last.
            bias: [channels], or None.
            activation: "silu" (or "swish") or None.
            metadata: the result of `prepare` for this step.

        Returns:
            [T, channels] in the type of `x`.

        Raises:
            ValueError: for another activation.
        """


def has_silu(activation: str | None) -> bool:
    """Whether a convolution ends with SiLU. Raises ValueError if the activation is not supported."""
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"a convolution with activation {activation!r} is not supported; use silu or none")
    return activation is not None
