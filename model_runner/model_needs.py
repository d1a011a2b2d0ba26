"""The memory that an engine process takes for one model, known before the model is loaded. Plain data, no torch."""

from collections.abc import Mapping
from dataclasses import dataclass


class DoesNotFitError(ValueError):
    """The model, or the KV cache of one request, is larger than the free memory; the message says what helps."""


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """Bytes by kind, and the limits of the model that they pay for."""

    device: str
    """Name of the device whose memory this is."""
    free_bytes: int
    """Free memory of the device when this was planned, which is no part of the plan."""
    weight_bytes: int
    """Weights of all models and heads, as they are stored."""
    loading_bytes: int
    """Peak while the weights are loaded; nothing else is in memory then but the process itself."""
    step_bytes: int
    """The largest step, in addition to weights and cache."""
    cache_bytes: int
    """KV cache and recurrent states, when they are full."""
    image_bytes: int
    """The tower that reads images, and the features that it may keep."""
    learning_bytes: int
    """The process that trains heads."""
    process_bytes: int
    """The engine process without a model."""
    max_model_len: int
    """Maximum length of prompt and output together, in tokens."""
    num_tokens: int
    """Tokens that the KV cache holds."""
    vocab_size: int
    kv_cache_gib: float | None = None
    """`RunnerConfig.kv_cache_gib` with which the model gets this cache, and so these limits, whatever memory is free
    then. It is exact, because a float64 holds any number of bytes below 2^53 divided by 2^30. None without a cache."""

    @property
    def reserved_bytes(self) -> int:
        """The most that the process takes from its start to its end."""
        return self.process_bytes + max(self.loading_bytes, sum(self.running.values()))

    @property
    def running(self) -> Mapping[str, int]:
        """Bytes by kind once the model is loaded, without the process itself."""
        return {
            "weights": self.weight_bytes,
            "step": self.step_bytes,
            "cache": self.cache_bytes,
            "images": self.image_bytes,
            "learning": self.learning_bytes,
        }
