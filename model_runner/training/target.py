"""The model that heads are trained for, run as it is served, one sequence at a time."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from torch import Tensor

from model_runner.batch import prompt_batch
from model_runner.config import RunnerConfig
from model_runner.models.features import Feature
from model_runner.models.inspection import inspect_model
from model_runner.platforms.choose import choose_platform


class TargetForTraining:
    """Computes hidden states of whole sequences, with the products and the KV cache types of the server."""

    def __init__(self, config: RunnerConfig, needs: Collection[Feature], max_tokens: int) -> None:
        """Loads the model; no sequence is longer than `max_tokens`. Raises as ModelRunner.load does."""
        platform = choose_platform(config)
        self._block_size = config.block_size
        shape = inspect_model(platform.read_config(config.model))
        model = platform.load(config.model)
        cache = platform.make_cache(shape.kv, -(-max_tokens // config.block_size), config.block_size)
        self._target = platform.make_target(model, platform.attention(cache), max_tokens, needs)

    def features(self, tokens: Sequence[int]) -> dict[Feature, Tensor]:
        """Each feature [T, hidden] of a sequence of T tokens, on the device."""
        batch = prompt_batch([tokens], self._block_size)
        batch = replace(batch, logits_index=batch.logits_index[-1:])  # the model insists on some
        self._target.forward(batch)
        return dict(self._target.features())
