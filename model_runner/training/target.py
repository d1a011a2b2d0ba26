"""The model that heads are trained for, run as it is served, one sequence at a time."""

from collections.abc import Collection, Sequence

import numpy as np
from torch import Tensor

from model_runner.batch import Batch
from model_runner.config import RunnerConfig
from model_runner.models.features import Feature
from model_runner.models.inspection import inspect_model
from model_runner.models.loading import load_config
from model_runner.platforms.choose import choose_platform


class TargetForTraining:
    """Computes hidden states of whole sequences, with the products and the KV cache types of the server."""

    def __init__(self, config: RunnerConfig, needs: Collection[Feature], max_tokens: int) -> None:
        """Loads the model; no sequence is longer than `max_tokens`. Raises as ModelRunner.load does."""
        platform = choose_platform(config)
        self._block_size = config.block_size
        shape = inspect_model(load_config(config.model))
        model = platform.load(config.model)
        cache = platform.make_cache(shape.kv, -(-max_tokens // config.block_size), config.block_size)
        self._target = platform.make_target(model, platform.attention(cache), needs)

    def features(self, tokens: Sequence[int]) -> dict[Feature, Tensor]:
        """Each feature [T, hidden] of a sequence of T tokens, on the device."""
        batch = self._batch(tokens)
        self._target.forward(batch)
        return dict(self._target.features())

    def _batch(self, tokens: Sequence[int]) -> Batch:
        """One choice that computes all of its tokens; logits only of the last, since the model insists on some."""
        count = len(tokens)
        positions = np.arange(count, dtype=np.int64)
        return Batch(
            tokens=np.asarray(tokens, dtype=np.int64),
            positions=positions,
            choice_of=np.zeros(count, dtype=np.int64),
            block_tables=[list(range(-(-count // self._block_size)))],
            block_of=positions // self._block_size,
            offset_of=positions % self._block_size,
            logits_index=positions[-1:],
            samples=[],
            prompt_rows=[],
        )
