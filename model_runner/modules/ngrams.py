"""Qwen4's hashed n-grams and dilated convolution, which look at earlier tokens, by the server's convolutions.

Both are methods of transformers' modules that are replaced on the instances. Token ids pass through a convolution that
picks one earlier token, in float32: ids below 2**24 stay exact.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from model_runner.modules.step import CurrentStep
from model_runner.modules.transformers_private import replace_ngram_shift, replace_short_convolution

_EXACT = 1 << 24
"""Integers below this are exact in float32."""


def shift_tokens(embedding: Any, current: CurrentStep, _: nn.Module) -> None:
    """Have an n-gram embedding take earlier tokens from the step's states.

    Raises:
        ValueError: if the vocabulary is too large.
    """
    if embedding.unigram_vocab_size >= _EXACT:
        raise ValueError(f"n-grams of {embedding.unigram_vocab_size:,} tokens are not supported")
    shifts = _Shifts(embedding, current)
    replace_ngram_shift(embedding, lambda own: current.choose(own, shifts))


def convolve_tokens(layer: Any, current: CurrentStep, _: nn.Module) -> None:
    """Have a layer's dilated convolution take earlier tokens from the step's states."""
    weight = _spread(layer.conv1d)
    replace_short_convolution(layer, lambda own: current.choose(own, partial(_convolve, current, weight)))


class _Shifts:
    """The tokens so many places before each token, but the end token from where that is one or nothing comes before."""

    def __init__(self, module: Any, current: CurrentStep) -> None:
        self._current = current
        self._end: int = module.eos_token_id
        self._context: int = module.context_len
        self._picks = torch.eye(self._context + 1)[:-1].flip(0)
        """[shifts, kernel] the weights that pick the token one place before, then two, and so on."""
        self._shifted: list[Tensor] = []

    def __call__(self, history: Tensor, shift: int) -> Tensor:
        """Tokens [1, context + T] -> the same shape, of which transformers uses the last T.

        It asks for all shifts, from 0 on.
        """
        if shift == 0:
            tokens = history[0, self._context :]
            rows = (tokens + 1).float().unsqueeze(1).expand(-1, self._context).contiguous()  # 0 is no token
            before = self._current.states.convolve(rows, self._picks, None, None).to(tokens.dtype) - 1
            ended = ((before == self._end) | (before < 0)).cumsum(1) > 0
            self._shifted = list(before.masked_fill(ended, self._end).unbind(1))
            return history
        return torch.cat([history[:, : self._context], self._shifted[shift - 1].unsqueeze(0)], 1)


def _spread(convolution: nn.Conv1d) -> Tensor:
    """A dilated convolution's weight [channels, kernel], with zeros between."""
    weight, (dilation,) = convolution.weight.detach().squeeze(1), convolution.dilation
    spread = weight.new_zeros(len(weight), (weight.shape[1] - 1) * dilation + 1)
    spread[:, ::dilation] = weight
    return spread


def _convolve(current: CurrentStep, weight: Tensor, hidden_states: Tensor, _cache: Any) -> Tensor:
    """[1, T, channels] -> the same shape."""
    return current.states.convolve(hidden_states[0], weight, None, "silu").unsqueeze(0)
