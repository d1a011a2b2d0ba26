"""CUDA platform that times the device's forward passes, both calls of the model and replays of graphs.

The host's part of a pass, which builds the batch and copies it to the device, is not included.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from bench.on_gpu.timing import Spans, watch
from model_runner.config import RunnerConfig
from model_runner.cuda.graphs import CudaGraphs, GraphMaker
from model_runner.platforms.cuda import CudaPlatform
from model_runner.spec.model_shape import ModelShape

Result = TypeVar("Result")


class TimedGraphs:
    """A GraphMaker that times replays."""

    def __init__(self, graphs: GraphMaker, spans: Spans) -> None:
        self._graphs = graphs
        self._spans = spans

    def capture(self, run: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        """Capture a graph whose replay is timed."""
        replay, result = self._graphs.capture(run)

        def timed() -> None:
            with self._spans.span():
                replay()

        return timed, result


class TimedCuda(CudaPlatform):
    """The CUDA platform for one model, with all forward passes timed."""

    def __init__(self, config: RunnerConfig, device: torch.device, spans: Spans) -> None:
        super().__init__(config, device, self._timed_graphs if config.cuda_graphs else None)
        self._spans = spans

    def load(self, folder: Path, shape: ModelShape) -> PreTrainedModel:
        """Load the model and time its forward passes."""
        model = super().load(folder, shape)
        watch(model, self._spans)
        return model

    def _timed_graphs(self) -> TimedGraphs:
        return TimedGraphs(CudaGraphs(self.device), self._spans)
