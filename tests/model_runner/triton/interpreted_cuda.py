"""The CUDA platform on the CPU: its kernels in Triton's interpreter, its graphs recorded."""

import pytest
import torch

from model_runner.config import RunnerConfig, Sizes
from model_runner.kv_cache import KVCache
from model_runner.platforms.cuda import CudaPlatform
from model_runner.platforms.memory import GIB, DeviceMemory
from model_runner.runner import ModelRunner
from model_runner.spec.model_shape import ModelShape
from model_runner.target import LoadedModel
from tests.model_runner.triton.recorded_graphs import RecordedGraphs

CPU = torch.device("cpu")


class InterpretedCuda(CudaPlatform):
    """All but what asks the device for its name and its memory."""

    hardware = "none"

    def __init__(self, config: RunnerConfig, graph_sizes: tuple[int, ...], *, tries_mixing: bool) -> None:
        self.recorded: list[RecordedGraphs] = []  # of each model
        self._tries_mixing = tries_mixing
        super().__init__(config, CPU, self._record if graph_sizes else None, num_programs=2)
        self._graph_sizes = list(graph_sizes)

    @property
    def num_replays(self) -> int:
        """Number of graph replays of all models."""
        return sum(graphs.num_replays for graphs in self.recorded)

    def sizes(self, config: RunnerConfig) -> Sizes:
        return Sizes(config.max_num_seqs or 8, config.max_num_batched_tokens or 64)

    def device_memory(self) -> DeviceMemory:
        return DeviceMemory("cpu", GIB, 0.1)

    def measure(self, model: object, shape: ModelShape, sizes: Sizes) -> None:
        """There is nothing to measure."""

    def try_attention(self, attention: object, cache: KVCache) -> None:
        """Skip this trial, which would be slow here; test_attention.py tests it."""

    def may_mix(self, model: LoadedModel) -> bool:
        """This trial takes most of a start here, so only where it is wanted."""
        return self._tries_mixing

    def _shapes_agree(self) -> bool:
        return False  # sums are rounded after each step here, and steps differ

    def _record(self) -> RecordedGraphs:
        self.recorded.append(RecordedGraphs())
        return self.recorded[-1]


def interpreted_runner(
    config: RunnerConfig, graph_sizes: tuple[int, ...], *, tries_mixing: bool = False
) -> tuple[ModelRunner, InterpretedCuda]:
    """A runner as on CUDA, and its platform. Skips the test where kernels are not interpreted."""
    if torch.cuda.is_available():
        pytest.skip("kernels are interpreted only where there is no GPU")
    platform = InterpretedCuda(config, graph_sizes, tries_mixing=tries_mixing)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("model_runner.runner._WARM_UP_ROWS", (1, 2))  # how long steps take is of no matter here
        return ModelRunner.load(config, platform), platform
