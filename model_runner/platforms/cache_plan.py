"""Divides the memory of a model's caches between the choices' own blocks and the blocks of cache groups."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from model_runner.config import RunnerConfig, Sizes
from model_runner.contract import CacheGroup
from model_runner.kv_cache import KVShape

_HELD_WINDOWS = 2
"""Windows for each choice that can run: its own, and one in the prefix cache."""
_STATES_SHARE = 0.5
"""The most of the cache that the states of running choices take, unless their number is configured."""
_NAMED_SHARE = 0.2
"""Share of the rest for pages in the prefix cache."""
_NAMED_PAGES = 16
"""The most of these, for each choice that can run."""


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Memory of a model's recurrent states."""

    rows: int = 0
    """A rows block, for all layers together."""
    page: int = 0
    scratch: int = 0
    """A rows block for what a step computes and folds, which layers may share."""


NO_STATES = StateBytes()


@dataclass(frozen=True, slots=True)
class CacheDivision:
    """Numbers of blocks."""

    num_blocks: int
    """The choices' own blocks."""
    groups: tuple[CacheGroup, ...]
    max_num_seqs: int
    """Choices that can run at a time. Recurrent states may leave room for fewer than asked for."""
    num_bytes: int
    """Memory of all blocks."""
    state_bytes: int
    """Memory of rows and pages."""
    num_scratch: int
    """Rows blocks for what a step computes and folds, in addition to the blocks of the group."""


class CacheDivider:
    """How many blocks of each kind fit into some memory."""

    def __init__(
        self,
        kv: Sequence[KVShape],
        dtype: torch.dtype,
        states: StateBytes,
        max_model_len: int,
        config: RunnerConfig,
        sizes: Sizes,
    ) -> None:
        """`max_model_len` is what a request may need; windows at least as long are none."""
        bytes_of_window: Counter[int] = Counter()
        for shape in kv:
            window = shape.window if shape.window and shape.window < max_model_len else 0
            bytes_of_window[window] += shape.num_bytes(dtype) * config.block_size
        self._own_bytes = bytes_of_window.pop(0, 0)
        self._max_model_len = max_model_len
        self._block_size = config.block_size
        self._sizes = sizes
        self._least_seqs = config.max_num_seqs or 1
        self._states = states
        self._windows = [
            (window, num_bytes, self._held("window", _HELD_WINDOWS * sizes.max_num_seqs, window))
            for window, num_bytes in sorted(bytes_of_window.items())
        ]
        self._scratch = sizes.max_num_batched_tokens // config.block_size if states.rows else 0
        self._most = -(-max_model_len // config.block_size) * sizes.max_num_seqs

    @property
    def useful_bytes(self) -> int:
        """More memory than this is of no use."""
        pages = _NAMED_PAGES * self._sizes.max_num_seqs * self._states.page
        return self._kv_bytes(self._most) + self._running_bytes(self._sizes.max_num_seqs) + pages

    def bytes_for(self, num_tokens: int) -> int:
        """The memory with which a request of so many tokens fits."""
        states = self._running_bytes(self._least_seqs)
        return states + int(self._kv_bytes(-(-num_tokens // self._block_size)) / (1 - _NAMED_SHARE * (states > 0)))

    def divide(self, num_bytes: int) -> CacheDivision:
        """Divide so much memory. There are no own blocks if it is too little for one."""
        seqs, pages, rest = self._sizes.max_num_seqs, 0, num_bytes
        if self._states.page:
            fitting = bisect_right(range(seqs + 1), num_bytes * _STATES_SHARE, key=self._running_bytes) - 1
            seqs = max(fitting, self._least_seqs)
            rest = max(num_bytes - self._running_bytes(seqs), 0)
            pages = min(int(rest * _NAMED_SHARE) // self._states.page, _NAMED_PAGES * seqs)
            rest -= pages * self._states.page
        most = rest // self._own_bytes if self._own_bytes else self._most
        num_own = bisect_right(range(most + 1), rest, key=self._kv_bytes) - 1
        if rest == 0 < num_bytes:
            num_own = 0
        groups = [CacheGroup("window", min(num_own, held), window) for window, _, held in self._windows]
        state_bytes = 0
        if self._states.page:
            pages += self._held("page", seqs)
            groups += [CacheGroup("rows", self._held("rows", seqs)), CacheGroup("page", pages)]
            state_bytes = self._running_bytes(seqs) + (pages - self._held("page", seqs)) * self._states.page
        num_all = self._kv_bytes(num_own) + state_bytes
        return CacheDivision(num_own, tuple(groups), seqs, num_all, state_bytes, self._scratch)

    def _kv_bytes(self, num_own: int) -> int:
        """Memory of keys and values with so many own blocks."""
        return num_own * self._own_bytes + sum(min(num_own, held) * size for _, size, held in self._windows)

    def _running_bytes(self, seqs: int) -> int:
        """Memory of the states of so many running choices."""
        states = self._states
        rows = self._held("rows", seqs) * states.rows + self._scratch * states.scratch
        return rows + self._held("page", seqs) * states.page

    def _held(self, kind: Literal["window", "rows", "page"], seqs: int, window: int = 0) -> int:
        return CacheGroup(kind, 0, window).most_held(
            width=seqs,
            length=self._max_model_len,
            budget=self._sizes.max_num_batched_tokens,
            block_size=self._block_size,
        )
