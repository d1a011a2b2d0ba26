"""Small steps as CUDA graphs: one launch replaces several hundred."""

import bisect
import logging
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from model_runner.attention.triton import TritonAttention
from model_runner.batch import NO_TOKENS, Batch, IntArray, to_device
from model_runner.features import Feature
from model_runner.model_needs import DoesNotFitError
from model_runner.modules.target import HFTargetModel, TokenRows, fetch_early_tokens, take_early_tokens
from model_runner.sampling.rows import EarlySamplingPlan, EarlyTokens

logger = logging.getLogger("samewise.runner")

Result = TypeVar("Result")


def graph_sizes(most: int) -> list[int]:
    """Row counts that graphs are captured for, up to the first that holds `most` rows.

    A step uses the smallest graph that fits. Sizes are close together where an extra row is cheap.
    """
    grid = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32), 512]
    return grid[: bisect.bisect_left(grid, min(most, grid[-1])) + 1]


class GraphMaker(Protocol):
    """Captures work on the device."""

    def capture(self, run: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        """Returns a function that repeats `run` on the same memory, and the result tensors that it overwrites."""
        ...


class CudaGraphs:
    """torch's CUDA graphs for one model.

    One graph runs at a time, so all share their temporary memory. A result is valid until the next graph runs. Another
    model that runs in between therefore needs its own CudaGraphs.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, run: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        """Capture `run`. It first runs uncaptured: kernels cannot be compiled, nor libraries opened, in a capture."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            result = run()
        return graph.replay, result


@dataclass(frozen=True, slots=True)
class _Outputs:
    """Results of a graph that each replay overwrites, except the logits."""

    features: Mapping[Feature, Tensor]  # [size, width] each
    picked: Tensor  # [size] int64


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph with its inputs and outputs."""

    replay: Callable[[], None]
    inputs: Tensor  # [5, size] int64 from `_inputs`
    outputs: _Outputs


class GraphedTarget:
    """A TargetModel that replays small steps from CUDA graphs.

    Large steps, and steps with unusual needs, run without graphs. A step is padded with unused rows: they write nothing
    to the cache, and their attention is zero.
    """

    def __init__(
        self,
        target: HFTargetModel,
        attention: TritonAttention,
        sizes: Sequence[int],
        graphs: GraphMaker,
        max_model_len: int,
    ) -> None:
        """Captures nothing yet.

        Args:
            target: the model.
            attention: attention to the model's cache.
            sizes: row counts, ascending.
            graphs: captures graphs.
            max_model_len: maximum tokens of a choice.
        """
        self._max_blocks = -(-max_model_len // attention.cache.block_size)
        self._target = target
        self._attention = attention
        self._sizes = list(sizes)
        self._graphs = graphs
        self._captured: dict[int, _Captured] = {}
        self._logits = torch.empty(0)  # [rows of the largest graph, vocab], shared by all graphs
        self._last: _LastStep | None = None

    @torch.inference_mode()
    def settle(self) -> None:
        """Capture all graphs. Call it after a first step, which compiled all kernels.

        Raises:
            DoesNotFitError: if there is too little memory left.
        """
        self._target.settle()
        start = time.perf_counter()
        try:
            self._capture_all()
        except torch.OutOfMemoryError as error:
            raise DoesNotFitError(
                f"CUDA graphs for steps of up to {self._sizes[-1]} rows do not fit into the memory that weights and KV "
                "cache leave; lower --kv-cache-gib or --max-num-batched-tokens, or set --no-cuda-graphs"
            ) from error
        seconds = time.perf_counter() - start
        logger.info("graphs     %d, for steps of up to %d rows, in %.1f s", len(self._sizes), self._sizes[-1], seconds)

    def features(self) -> Mapping[Feature, Tensor]:
        if self._last is None:
            return self._target.features()
        rows = slice(self._last.num_tokens)
        return {feature: hidden[rows] for feature, hidden in self._last.outputs.features.items()}

    def picks(self) -> Callable[[], EarlyTokens]:
        if self._last is None:
            return self._target.picks()
        num_rows = 0 if self._last.plan is None else len(self._last.plan.keys)
        return fetch_early_tokens(self._last.outputs.picked[:num_rows], self._last.plan)

    @torch.inference_mode()
    def forward(
        self,
        batch: Batch,
        also: Collection[Feature] = (),
        picks: EarlySamplingPlan | None = None,
        follows: IntArray | None = None,
    ) -> Tensor:
        size = self._size_for(batch)
        plan = None if size is None or also else self._attention.plan(batch)
        if plan is None or size is None or plan.block_m != self._metadata.block_m:
            self._last = None
            return self._target.forward(batch, also, picks, follows)
        captured = self._captured[size]
        followed = None if follows is None else take_early_tokens(self._target.picked, follows)
        captured.inputs.copy_(to_device(_inputs(batch, picks, size), captured.inputs.device))
        if followed is not None:
            captured.inputs[0, : len(followed)] = followed
        self._metadata.load(plan, size)
        captured.replay()
        self._target.picked = captured.outputs.picked
        self._last = _LastStep(len(batch.tokens), picks, captured.outputs)
        return self._logits[: len(batch.logits_index)]

    def _size_for(self, batch: Batch) -> int | None:
        """Size of the smallest graph that fits the batch; None if the batch needs to run without one."""
        num_rows = max(len(batch.tokens), len(batch.logits_index))
        if (
            num_rows == 0
            or batch.images
            or batch.rotary_positions.ndim > 1
            or num_rows > max(self._captured, default=0)
        ):
            return None
        return self._sizes[bisect.bisect_left(self._sizes, num_rows)]

    def _capture_all(self) -> None:
        self._metadata = self._attention.reserve(self._sizes[-1], self._max_blocks)
        # Largest first: the others then fit into the memory that it allocated.
        sizes = track(self._sizes[::-1], "CUDA graphs", console=Console(stderr=True), disable=not sys.stderr.isatty())
        for size in sizes:
            self._captured[size] = self._capture(size)

    def _capture(self, size: int) -> _Captured:
        inputs = torch.zeros(5, size, dtype=torch.int64, device=self._attention.cache.device)
        tokens, positions, logits_index, keys, temperatures = inputs.unbind(0)
        rows = TokenRows(tokens, positions, logits_index)
        self._metadata.load(self._attention.plan(NO_TOKENS), size)

        def run() -> _Outputs:
            logits = self._target.run(rows, self._metadata)
            if not len(self._logits):
                self._logits = torch.empty_like(logits)
            logits = self._logits[:size].copy_(logits)
            picked = self._target.pick(logits, keys, temperatures.view(torch.float64))
            return _Outputs(self._target.features(), picked)

        replay, outputs = self._graphs.capture(run)
        return _Captured(replay, inputs, outputs)


@dataclass(frozen=True, slots=True)
class _LastStep:
    num_tokens: int
    plan: EarlySamplingPlan | None
    outputs: _Outputs


def _inputs(batch: Batch, picks: EarlySamplingPlan | None, size: int) -> IntArray:
    """Tokens, positions, logit rows, keys and temperatures (the bits of float64), zero-padded: [5, size]."""
    inputs = np.zeros((5, size), dtype=np.int64)
    arrays = [batch.tokens, batch.rotary_positions, batch.logits_index]
    if picks is not None:
        keys, temperatures = picks.arrays
        arrays += [keys, temperatures.view(np.int64)]
    for row, numbers in zip(inputs, arrays, strict=False):
        row[: len(numbers)] = numbers
    return inputs
