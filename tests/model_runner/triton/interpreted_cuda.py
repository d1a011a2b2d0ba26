"""The CUDA platform on the CPU: its kernels in Triton's interpreter, its graphs recorded."""

import pytest
import torch

from model_runner.config import RunnerConfig, Sizes
from model_runner.memory import GIB, Room
from model_runner.models.inspection import ModelShape
from model_runner.platforms.cuda import CudaPlatform
from model_runner.runner import ModelRunner
from tests.model_runner.triton.recorded_graphs import RecordedGraphs

CPU = torch.device("cpu")


class InterpretedCuda(CudaPlatform):
    """All but what asks the device for its memory."""

    def __init__(self, config: RunnerConfig, graph_sizes: tuple[int, ...] = ()) -> None:
        self.recorded = RecordedGraphs()
        super().__init__(config, CPU, self.recorded if graph_sizes else None, num_programs=2)
        self._graph_sizes = list(graph_sizes)

    def sizes(self, config: RunnerConfig) -> Sizes:
        return Sizes(config.max_num_seqs or 8, config.max_num_batched_tokens or 64)

    def room(self) -> Room:
        return Room("cpu", GIB, 0.1)

    def measure(self, model: object, shape: ModelShape, sizes: Sizes) -> None:
        """There is nothing to measure."""

    def _shapes_agree(self) -> bool:
        return False  # numpy rounds by shape


def interpreted_runner(config: RunnerConfig, graph_sizes: tuple[int, ...] = ()) -> tuple[ModelRunner, RecordedGraphs]:
    """A runner as on CUDA, and the graphs that it has."""
    platform = InterpretedCuda(config, graph_sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("model_runner.runner._WARM_UP_ROWS", (1, 2))  # how long steps take is of no matter here
        return ModelRunner.load(config, platform), platform.recorded
