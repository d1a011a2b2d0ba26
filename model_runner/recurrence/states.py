"""The memory of recurrent layers: rows of blocks of positions, and pages with the states after full blocks."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from model_runner.contract import BlockCopy
from model_runner.kernels.memory import huge_pages
from model_runner.kv_cache import Move

BLOCK = 32
"""Positions in a block. Results depend on it."""
LANES = 16
"""Head dimensions and a scan's channels are stored with zeros up to a multiple of this."""

Memory = TypeVar("Memory", bound="StateMemory")


def padded(dim: int) -> int:
    """A head dimension, or a number of a scan's channels, as it is stored."""
    return -(-dim // LANES) * LANES


class StateShape(ABC):
    """Shape of what a layer keeps."""

    __slots__ = ()
    token_dim: ClassVar[int] = 0
    """The dimension of a rows block that is over its positions."""

    @property
    @abstractmethod
    def rows(self) -> Sequence[Sequence[int]]:
        """Shapes of the parts of a rows block."""

    @property
    @abstractmethod
    def page(self) -> Sequence[int]:
        """Shape of a page."""

    @property
    def rows_bytes(self) -> int:
        """Memory of a rows block."""
        return sum(map(math.prod, self.rows)) * torch.float32.itemsize

    @property
    def page_bytes(self) -> int:
        """Memory of a page."""
        return math.prod(self.page) * torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class RecurrentShape(StateShape):
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
    token_dim: ClassVar[int] = 1

    @property
    def is_whole(self) -> bool:
        """Whether head dimensions are stored without zeros behind them."""
        return (padded(self.key_dim), padded(self.value_dim)) == (self.key_dim, self.value_dim)

    @property
    def rows(self) -> Sequence[Sequence[int]]:
        """Shapes of keys, decays and updates."""
        keys, values = padded(self.key_dim), padded(self.value_dim)
        decays = (self.heads, BLOCK, keys) if self.per_channel else (self.heads, BLOCK)
        return (self.key_heads, BLOCK, keys), decays, (self.heads, BLOCK, values)

    @property
    def page(self) -> Sequence[int]:
        """The shape of the state."""
        return self.heads, padded(self.key_dim), padded(self.value_dim)


@dataclass(frozen=True, slots=True)
class ScanShape(StateShape):
    """Shape of a layer's selective scan."""

    channels: int
    states: int
    """States of a channel."""

    @property
    def rows(self) -> Sequence[Sequence[int]]:
        """Shapes of steps, values and inputs."""
        channels = padded(self.channels)
        return (BLOCK, channels), (BLOCK, channels), (BLOCK, self.states)

    @property
    def page(self) -> Sequence[int]:
        """The shape of the state."""
        return self.states, padded(self.channels)


@dataclass(frozen=True, slots=True)
class ConvShape(StateShape):
    """Shape of a causal depthwise convolution: y_p = sum over i of w_i x_(p - kernel + 1 + i), per channel."""

    channels: int
    kernel: int
    """Inputs per output, at most 33: the newest block holds all that a later token needs."""

    def __post_init__(self) -> None:
        if not 1 <= self.kernel <= BLOCK + 1:
            raise ValueError(f"a convolution over {self.kernel} positions is not supported; use 1 to {BLOCK + 1}")

    @property
    def rows(self) -> Sequence[Sequence[int]]:
        """The shape of inputs."""
        return ((BLOCK, self.channels),)

    @property
    def page(self) -> Sequence[int]:
        """The shape of the last inputs before the block's end."""
        return self.kernel - 1, self.channels


@dataclass(frozen=True, slots=True)
class StateMemory:
    """Rows and pages of one layer, or with a dimension of layers after the first, of all of the same shape.

    The fields are the parts of rows [blocks, ...], then the page [pages, ...].
    """

    @property
    def parts(self) -> list[Tensor]:
        """All fields."""
        return [getattr(self, one.name) for one in fields(self)]

    def layer(self, index: int) -> Self:
        """The memory of one of the layers."""
        own: Any = type(self)
        layer: Self = own(*(part[:, index] for part in self.parts))
        return layer


@dataclass(frozen=True, slots=True)
class RecurrentMemory(StateMemory):
    """Rows and pages of a recurrence."""

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


@dataclass(frozen=True, slots=True)
class ScanMemory(StateMemory):
    """Rows and pages of a selective scan."""

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


@dataclass(frozen=True, slots=True)
class ConvMemory(StateMemory):
    """Rows and pages of a convolution."""

    inputs: Tensor  # [blocks, BLOCK, channels]
    last: Tensor  # [pages, kernel - 1, channels] inputs before the end of the page's block


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
        self._shapes = [*recurrences, *convolutions, *scans]
        rows_bytes, page_bytes = state_bytes(self._shapes)
        self._rows = _zeros(num_rows_blocks, rows_bytes, device)
        self._pages = _zeros(num_pages, page_bytes, device)
        self._scratch = _zeros(0, 0, device)
        self._of_tokens: list[Tensor] = []
        """Parts of rows [blocks, BLOCK, layers, ...], each of all layers of the same shape."""
        rows, pages = _Pieces(self._rows), _Pieces(self._pages)
        self.recurrent = self._lay_out(RecurrentMemory, self.recurrences, rows, pages)
        """Memory of each recurrence."""
        self.scan = self._lay_out(ScanMemory, self.scans, rows, pages)
        """Memory of each selective scan."""
        self.conv = self._lay_out(ConvMemory, self.convolutions, rows, pages)
        """Memory of each convolution."""

    def _lay_out(
        self, memory: Callable[..., Memory], shapes: Sequence[StateShape], rows: "_Pieces", pages: "_Pieces"
    ) -> list[Memory]:
        groups: dict[StateShape, Memory] = {}
        for shape in dict.fromkeys(shapes):
            parts = [rows.take(shapes.count(shape), *part) for part in shape.rows]
            self._of_tokens += [part.movedim(2 + shape.token_dim, 1) for part in parts]
            groups[shape] = memory(*parts, pages.take(shapes.count(shape), *shape.page))
        return [groups[shape].layer(shapes[:index].count(shape)) for index, shape in enumerate(shapes)]

    def add_scratch(self, count: int) -> None:
        """Allocate scratch blocks, which follow the rows blocks. Only native kernels take them."""
        self._scratch = _zeros(count, scratch_bytes(self._shapes), self.device)

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
        for rows in self._of_tokens:
            rows[new_block, new] = rows[old_block, old]


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


def state_bytes(shapes: Sequence[StateShape]) -> tuple[int, int]:
    """Memory of a rows block and of a page."""
    return sum(shape.rows_bytes for shape in shapes), sum(shape.page_bytes for shape in shapes)


def scratch_bytes(shapes: Sequence[StateShape]) -> int:
    """Memory of a scratch block, which has the rows of one layer, the largest."""
    return max((shape.rows_bytes for shape in shapes), default=0)
