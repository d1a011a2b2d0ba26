"""Interface of a platform: how models are loaded and run on a device."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from model_runner.attention.backend import AttentionBackend
from model_runner.attention.trial import first_difference
from model_runner.config import LogprobsMode, RunnerConfig, Sizes
from model_runner.contract import CacheGroup
from model_runner.features import Feature
from model_runner.images.layouts import Layout
from model_runner.kv_cache import KVCache, KVShape
from model_runner.platforms.memory import DeviceMemory, Measured, StorageTypes
from model_runner.recurrence.backend import RecurrenceBackend
from model_runner.recurrence.states import StateCache
from model_runner.refusal import UnsupportedModelError
from model_runner.sampling.rows import SampleAllowed
from model_runner.sampling.sampler import Sampler
from model_runner.scoring.early_exit import EarlyExit, find_early_exit, twin
from model_runner.spec.model_shape import ModelShape
from model_runner.spec.rotary import fix_long_rope
from model_runner.target import LoadedModel, TargetModel, modules_of
from model_runner.weights.checkpoint_quantization import as_served

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from model_runner.images.tower import Tower, TowerShape


class Platform(ABC):
    """Loads models and runs them on one device."""

    device: torch.device
    types: StorageTypes
    exact: bool
    """Whether a row's result is bit-identical in every batch (`RunnerConfig.exact`)."""
    takes_indexers = False
    """Whether attention can select positions (`AttentionBackend.select`)."""
    is_async: bool
    """Whether the host can compute grammar masks and launch the next step while the device computes."""
    sample_allowed: SampleAllowed | None = None
    """Samples tokens of rows with grammars; None if the general sampler is as fast."""
    measures_steps = False
    """Whether `measure` corrects `step_bytes` once the model is loaded."""
    max_model_len: int | None = None
    """The most tokens of a request by the settings; None is the most that the model supports."""
    activation_type: str
    """Type that the inputs of matrix products are rounded to."""
    kernels: str
    """The instruction set, or the compiler with its version."""

    @property
    @abstractmethod
    def hardware(self) -> str:
        """The processor, as far as rounding may depend on it."""

    @abstractmethod
    def sizes(self, config: RunnerConfig) -> Sizes:
        """The configured sizes; defaults of this device where they are not configured."""

    @abstractmethod
    def device_memory(self) -> DeviceMemory:
        """The memory that is currently free."""

    @abstractmethod
    def weight_bytes(self, shape: ModelShape) -> int:
        """Memory of a model's weights, as this platform stores them."""

    def weights_name(self, shape: ModelShape) -> str:
        """The type of the weights in matrix products, for log lines."""
        return self.types.weights or str(self.types.compute).removeprefix("torch.")

    def loading_bytes(self, shape: ModelShape) -> int:
        """Peak memory while a model is loaded. By default, weights are packed after all of them were read."""
        return shape.num_parameters * self.types.compute.itemsize

    @abstractmethod
    def step_bytes(self, shape: ModelShape, sizes: Sizes) -> int:
        """About the memory of the target's largest step, in addition to weights and cache."""

    @abstractmethod
    def process_bytes(self, imported: int, shape: ModelShape) -> int:
        """Memory of the device that an engine process takes besides models and caches.

        Args:
            imported: private memory of a process that has only imported its modules, on the host.
            shape: the target's.
        """

    def int4_bytes(self, shape: ModelShape) -> int | None:
        """Memory of a model's weights with `--quantization int4`; None if not possible, or already the case."""
        return None

    def read_config(self, folder: Path) -> "PretrainedConfig":
        """A model's configuration, which also says whether quantised weights are dequantised.

        Raises:
            UnsupportedModelError: if transformers does not know the model, or this platform does not support it.
        """
        from model_runner.modules.loading import load_config  # noqa: PLC0415 - transformers takes seconds

        config = load_config(folder)
        fix_long_rope(config, self.max_model_len)
        return as_served(folder, config, self.device, exact=self.exact)

    def inspect(self, folder: Path) -> ModelShape:
        """The sizes of a model, before its weights are read.

        Raises:
            UnsupportedModelError: if the model is not supported.
        """
        from model_runner.modules.loading import inspect_model  # noqa: PLC0415 - transformers takes seconds

        shape = inspect_model(self.read_config(folder), keeps_latents=self.device.type == "cpu")
        if not self.takes_indexers and any(kv.value_dim == 0 for kv in shape.kv):
            raise UnsupportedModelError(
                f"{folder} has layers with an indexer, which run on the CPU only; use --device cpu"
            )
        return shape

    @abstractmethod
    def load(self, folder: Path, shape: ModelShape) -> LoadedModel:
        """Load a model to the device, with its weights in the form that they are multiplied in.

        `shape` is the result of `inspect`.

        Raises:
            UnsupportedModelError: if a part of the model cannot be computed exactly.
        """

    def load_again(self, loaded: LoadedModel) -> LoadedModel:
        """A copy of a loaded model for another cache. It shares the weights' memory."""
        return cast("LoadedModel", twin(cast("nn.Module", loaded)))

    def inspect_tower(self, folder: Path, layout: Layout) -> "TowerShape":
        """The sizes of the part of a model that reads images, before its weights are read."""
        from model_runner.images.tower import inspect_tower  # noqa: PLC0415 - transformers takes seconds

        return inspect_tower(folder, self.read_config(folder), layout)

    def load_tower(self, folder: Path, layout: Layout) -> "Tower":
        """Load the part of a model that reads images.

        Raises:
            UnsupportedModelError: if its weights do not match the model.
        """
        from model_runner.images.tower import Tower  # noqa: PLC0415 - transformers takes seconds

        return Tower(folder, self.read_config(folder), layout, self.device, self.types.compute)

    @abstractmethod
    def attention(self, cache: KVCache) -> AttentionBackend[Any]:
        """Attention to a cache."""

    @property
    def shares_scratch(self) -> bool:
        """Whether the recurrences and convolutions of all layers have their scratch blocks in the same memory."""
        return False

    @abstractmethod
    def recurrence(self, states: StateCache) -> RecurrenceBackend[Any]:
        """Recurrences and convolutions on the states of a model."""

    def try_attention(self, attention: AttentionBackend[Any], cache: KVCache) -> None:
        """If results must be exact, check on an empty cache that attention gives the same bits in every batch.

        Raises:
            UnsupportedModelError: if it does not.
        """
        how = first_difference(attention, cache, self.types.compute) if self.exact else None
        if how is not None:
            raise UnsupportedModelError(
                f"attention by {self.kernels} on {self.hardware} rounds a row differently {how} than when it is "
                "decoded alone, so answers would depend on other requests; on CUDA you can allow that with --no-exact"
            )

    def may_mix(self, model: LoadedModel) -> bool:
        """Whether a model runs code that could let tokens of different choices meet outside of attention."""
        return True

    @abstractmethod
    def prepare_heads(self, heads: nn.Module) -> None:
        """Move draft heads to the device, with their weights in the form that they are multiplied in.

        Thread-safe, even while models run.
        """

    @abstractmethod
    def make_sampler(self, logprobs_mode: LogprobsMode) -> Sampler:
        """The sampler that draws tokens on the device."""

    def make_cache(
        self, shapes: Sequence[KVShape], num_blocks: int, block_size: int, groups: Sequence[CacheGroup] = ()
    ) -> KVCache:
        """A KV cache for layers of these shapes."""
        return KVCache(shapes, num_blocks, block_size, self.types.kv, self.device, groups=groups)

    def make_target(
        self,
        model: LoadedModel,
        attention: AttentionBackend[Any],
        max_model_len: int,
        needs: Collection[Feature] = (),
        recurrence: RecurrenceBackend[Any] | None = None,
    ) -> TargetModel:
        """The model, ready to run on the attention's cache; `needs` are the features to capture.

        No choice has more than `max_model_len` tokens. `recurrence` is for a model with recurrent layers.
        """
        from model_runner.modules.target import HFTargetModel  # noqa: PLC0415 - transformers takes seconds

        return HFTargetModel(modules_of(model), attention, needs, recurrence=recurrence)

    def find_early_exit(self, model: LoadedModel) -> EarlyExit | None:
        """The model's head for hidden states between its layers; None if the model does not support this."""
        return find_early_exit(modules_of(model))

    def measure(self, model: LoadedModel, shape: ModelShape, sizes: Sizes) -> Measured | None:
        """Memory after loading and in the target's largest step; None if the first plan needs no correction."""
        return None
