"""What the runner asks of the device that it runs on."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from model_runner.attention.backend import AttentionBackend
from model_runner.attention.trial import first_difference
from model_runner.config import LogprobsMode, RunnerConfig, Sizes
from model_runner.kv_cache import KVCache, KVShape
from model_runner.models.checkpoint_quantization import as_served
from model_runner.models.early_exit import EarlyExit, find_early_exit, twin
from model_runner.models.features import Feature
from model_runner.models.loading import ModelShape, load_config
from model_runner.models.refusal import UnsupportedModelError
from model_runner.models.target import HFTargetModel, TargetModel
from model_runner.platforms.memory import Measured, Room, StorageTypes
from model_runner.sampling.fused_sampling import PickAllowed
from model_runner.sampling.sampler import Sampler


class Platform(ABC):
    """How models are loaded, kept and run on one device. Everything that it makes computes exactly, and alike."""

    device: torch.device
    types: StorageTypes
    exact: bool
    """See RunnerConfig."""
    picks_ahead: bool
    """Whether target models find the tokens of plain rows themselves."""
    runs_beside: bool
    """Whether the device computes a step while the host goes on: it can look for masks, and launch the next step."""
    pick_allowed: PickAllowed | None = None
    """Picks tokens where grammars hold rows; None where the sampler is as quick."""
    rows: str
    """What the inputs of products are rounded to."""
    kernels: str
    """What runs the models: an instruction set, or a compiler with its version; "none" for plain torch."""

    @property
    @abstractmethod
    def hardware(self) -> str:
        """The processor, as far as the rounding may depend on it."""

    @abstractmethod
    def sizes(self, config: RunnerConfig) -> Sizes:
        """Those of the configuration, or what suits this device where it leaves them open."""

    @abstractmethod
    def room(self) -> Room:
        """The memory that is free now."""

    @abstractmethod
    def weight_bytes(self, shape: ModelShape) -> int:
        """Memory of a model's weights, as this platform keeps them."""

    def read_config(self, folder: Path) -> PretrainedConfig:
        """A model's configuration, with what is to become of quantised weights.

        Raises:
            UnsupportedModelError: if transformers does not know the model, or it cannot be served here.
        """
        return as_served(folder, load_config(folder), self.device, exact=self.exact)

    @abstractmethod
    def load(self, folder: Path) -> PreTrainedModel:
        """A model on the device, its weights in the form that they are multiplied in.

        Raises:
            UnsupportedModelError: if a part of the model cannot be computed exactly.
        """

    def load_again(self, loaded: PreTrainedModel) -> PreTrainedModel:
        """A model that was loaded, to be run on another cache beside it. Its weights take no more memory."""
        return twin(loaded)

    @abstractmethod
    def attention(self, cache: KVCache) -> AttentionBackend[Any]:
        """Attention to a cache."""

    def try_attention(self, attention: AttentionBackend[Any], cache: KVCache) -> None:
        """Where results are to be exact, make sure that attention to an empty cache keeps its promise.

        Raises:
            UnsupportedModelError: if it does not.
        """
        how = first_difference(attention, cache, self.types.compute) if self.exact else None
        if how is not None:
            raise UnsupportedModelError(
                f"attention by {self.kernels} on {self.hardware} gives a row other bits {how} than when it is decoded "
                "alone, so answers would depend on what else is computed; on CUDA you can allow that with --no-exact"
            )

    @abstractmethod
    def prepare_heads(self, heads: nn.Module) -> None:
        """Bring draft heads to the device and into the form that they are multiplied in.

        Any thread may do so, also while models run.
        """

    @abstractmethod
    def make_sampler(self, vocab_size: int, logprobs_mode: LogprobsMode) -> Sampler:
        """What draws tokens on the device."""

    def make_cache(self, shapes: Sequence[KVShape], num_blocks: int, block_size: int) -> KVCache:
        """A cache for layers of these shapes."""
        return KVCache(shapes, num_blocks, block_size, self.types.kv, self.device)

    def make_target(
        self,
        model: PreTrainedModel,
        attention: AttentionBackend[Any],
        max_model_len: int,
        needs: Collection[Feature] = (),
    ) -> TargetModel:
        """The model, ready to run on the cache of the attention. See HFTargetModel.

        No choice has more than `max_model_len` tokens.
        """
        return HFTargetModel(model, attention, needs)

    def find_early_exit(self, model: PreTrainedModel) -> EarlyExit | None:
        """The head of the model on what is between its layers; None if the model does not take this."""
        return find_early_exit(model)

    def measure(self, model: PreTrainedModel, shape: ModelShape, sizes: Sizes) -> Measured | None:
        """The memory as it is when the models are loaded and the target runs; None where the first plan will do."""
        return None
