"""Features of images in a step of a transformers model: they replace embeddings, by the tokens' places.

Transformers would put features where a token's id is the image token. In a batch of several requests, such an id may
also be typed by a user or drawn by the model, so that only the place says what a token is.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from model_runner.batch import Batch, to_device
from model_runner.features import decoder_layers


@dataclass(frozen=True, slots=True)
class StepImages:
    """Features of some tokens of a step."""

    tokens: Tensor
    """[n] int64 the tokens, on the model's device."""
    features: Tensor
    """[1 + levels, n, hidden] as in ImageRows."""

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> "StepImages":
        """The features of a batch that has some."""
        if device.type == "cuda":  # features may be evicted while the step still reads them
            for rows in batch.images:
                rows.features.record_stream(torch.cuda.current_stream(device))
        places = [np.arange(rows.token, rows.token + rows.features.shape[1]) for rows in batch.images]
        return cls(
            to_device(np.concatenate(places), device), torch.cat([rows.features for rows in batch.images], dim=1)
        )

    @contextmanager
    def placed_in(self, model: PreTrainedModel, tokens: Tensor) -> Iterator[Tensor]:
        """Let the model's next pass see the features; yields the token ids [T] for it.

        The tokens of images have a text's padding: families that look up more than one embedding take that as well.
        """
        config: Any = model.config
        padding = getattr(config.get_text_config(), "pad_token_id", None) or 0
        with ExitStack() as hooks:
            hook = model.get_input_embeddings().register_forward_hook(self._replace)
            hooks.callback(hook.remove)
            levels = self.features[1:]
            for level, layer in zip(levels, decoder_layers(model) if len(levels) else (), strict=False):
                hook = layer.register_forward_hook(partial(self._add, level))
                hooks.callback(hook.remove)
            yield tokens.index_fill(0, self.tokens, padding)

    def _replace(self, module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        """Replace embeddings [1, T, hidden]."""
        return output.index_copy(1, self.tokens, self.features[:1].to(output.dtype))

    def _add(self, level: Tensor, module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        """Add features [n, hidden] to the hidden states [1, T, hidden] after a layer."""
        return output.index_add(1, self.tokens, level[None].to(output.dtype))
