"""Small steps as CUDA graphs: one launch in place of several hundred."""

import bisect
import logging
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from model_runner.attention.triton import TritonAttention
from model_runner.batch import Batch
from model_runner.models.features import Feature
from model_runner.models.target import HFTargetModel, TokenRows

logger = logging.getLogger("samewise.runner")

Result = TypeVar("Result")


def graph_sizes(most: int) -> list[int]:
    """Row counts that graphs are captured for, up to the one that holds `most` rows.

    The next larger one takes a step: close together where a row more costs little, so that few are wasted.
    """
    grid = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32), 512]
    return grid[: bisect.bisect_left(grid, min(most, grid[-1])) + 1]


class GraphMaker(Protocol):
    """Records work on the device."""

    def capture(self, run: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        """What does the same again, on the same memory, and what `run` returned, whose tensors it writes anew."""
        ...


class CudaGraphs:
    """torch's CUDA graphs. They share the memory for what only lives within a step, as one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def capture(self, run: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        """See GraphMaker.capture. Runs once before: compiling kernels and opening libraries cannot be recorded."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            result = run()
        return graph.replay, result


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph, what it reads and what it writes."""

    replay: Callable[[], None]
    rows: Tensor  # [3, size] int64: tokens, positions, logits_index
    features: Mapping[Feature, Tensor]  # [size, width] each


class GraphedTarget:
    """A TargetModel whose small steps are replayed from graphs; others, and those with unusual needs, run as they are.

    A step is filled up with rows that nobody asks for: their keys and values go to a block that belongs to no request,
    and their attention sees nothing.
    """

    def __init__(
        self, target: HFTargetModel, attention: TritonAttention, sizes: Sequence[int], graphs: GraphMaker
    ) -> None:
        """Captures nothing yet.

        Args:
            target: the model.
            attention: to the model's cache, whose last block belongs to no request.
            sizes: row counts, ascending.
            graphs: makes them.
        """
        self._target = target
        self._attention = attention
        self._sizes = list(sizes)
        self._graphs = graphs
        self._captured: dict[int, _Captured] = {}
        self._features: dict[Feature, Tensor] = {}
        self._spare_slot = attention.cache.num_blocks * attention.cache.block_size - 1

    def settle(self) -> None:
        """Capture all graphs. Called when a first step has run."""
        self._target.settle()
        start = time.perf_counter()
        self._metadata = self._attention.reserve(self._sizes[-1])
        # The largest comes first, so that the others find room in the memory that it has taken.
        sizes = track(self._sizes[::-1], "CUDA graphs", console=Console(stderr=True), disable=not sys.stderr.isatty())
        for size in sizes:
            self._captured[size] = self._capture(size)
        logger.info(
            "graphs     %d of up to %d rows in %.1f s", len(self._sizes), self._sizes[-1], time.perf_counter() - start
        )

    def features(self) -> Mapping[Feature, Tensor]:
        """See TargetModel.features."""
        features, self._features = self._features, {}
        return features or self._target.features()

    @torch.inference_mode()
    def forward(self, batch: Batch, also: Collection[Feature] = ()) -> Tensor:
        """See TargetModel.forward. The logits hold until the next step."""
        size = self._size_for(batch)
        if size is None or also:
            return self._target.forward(batch, also)
        captured = self._captured[size]
        self._load(batch, captured.rows)
        captured.replay()
        num_tokens = len(batch.tokens)
        self._features = {feature: rows[:num_tokens] for feature, rows in captured.features.items()}
        return self._logits[: len(batch.logits_index)]

    def _size_for(self, batch: Batch) -> int | None:
        """That of the smallest graph with room for the batch."""
        num_rows = max(len(batch.tokens), len(batch.logits_index))
        if num_rows == 0 or num_rows > max(self._captured, default=0):
            return None
        return self._sizes[bisect.bisect_left(self._sizes, num_rows)]

    @torch.inference_mode()
    def _capture(self, size: int) -> _Captured:
        rows = torch.zeros(3, size, dtype=torch.int64, device=self._attention.cache.device)
        inputs = TokenRows(*rows.unbind(0))

        def run() -> Mapping[Feature, Tensor]:
            logits = self._target.run(inputs, self._metadata)
            self._logits[:size].copy_(logits)
            return self._target.features()

        replay, features = self._graphs.capture(run)
        return _Captured(replay, rows, features)

    def _load(self, batch: Batch, rows: Tensor) -> None:
        """Give a graph its inputs, filled up to its size."""
        size = rows.shape[1]
        filled = np.zeros(rows.shape, dtype=np.int64)
        for row, numbers in zip(filled, (batch.tokens, batch.positions, batch.logits_index), strict=True):
            row[: len(numbers)] = numbers
        rows.copy_(_pinned(filled, rows.device), non_blocking=True)
        plan = self._attention.plan(batch)
        slots = np.full(size, self._spare_slot, dtype=np.int64)
        slots[: len(plan.slots)] = plan.slots
        self._metadata.load(replace(plan, slots=slots))


def _pinned(numbers: IntArray, device: torch.device) -> Tensor:
    """On CUDA in memory from which they are copied without waiting; torch keeps it until they are."""
    tensor = torch.from_numpy(numbers)
    return tensor.pin_memory() if device.type == "cuda" else tensor
