"""Attention in both directions for transformers' encoders, over a flat batch of texts without padding.

Each text is attended to by calls whose shapes depend only on its length, on tensors of its own. So a text's bits are
the same alone and in any batch, and no work is spent on padding.
"""

import math
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION_NAME = "samewise_encoder"
_QUERIES = 128
"""Queries with a window that are computed at a time, so that keys far outside of the window cost nothing."""
_HARMLESS = frozenset({
    *("position_ids", "use_cache", "is_causal", "output_attentions", "deterministic", "cache", "cache_position"),
    *("token_type_ids", "encoder_hidden_states", "output_hidden_states"),
})  # fmt: skip
"""Keyword arguments that models pass along and that have no effect here."""


class Texts:
    """The texts of a flat batch, for one forward pass."""

    def __init__(self, lengths: Sequence[int]) -> None:
        """`lengths` are the numbers of tokens, each at least 1."""
        self.lengths = lengths
        self.spans = list(pairwise(accumulate(lengths, initial=0)))
        """The first token of each text in the batch, and the one after its last."""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None = None,
        biases: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Attend within each text.

        Args:
            query: [heads, tokens, dim].
            key: [kv_heads, tokens, dim].
            value: [kv_heads, tokens, dim].
            scaling: factor on the scores.
            window: tokens see others that are fewer than this many positions away; None: all.
            biases: for each text, [heads, n, n] that is added to the scores.

        Returns:
            [tokens, heads, dim].
        """
        output = query.new_empty(query.shape[1], query.shape[0], value.shape[-1])
        for index, (start, end) in enumerate(self.spans):
            own_query, own_key, own_value = (part[None, :, start:end].contiguous() for part in (query, key, value))
            bias = None if biases is None else biases[index][None]
            attended = _within(own_query, own_key, own_value, scaling, window, bias)
            output[start:end] = attended[0].transpose(0, 1)
        return output


def _within(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None, bias: Tensor | None
) -> Tensor:
    """Attention of one text: [1, heads, n, dim]."""
    length = query.shape[2]
    grouped = query.shape[1] != key.shape[1]
    if window is None or length <= window:
        return F.scaled_dot_product_attention(query, key, value, bias, scale=scaling, enable_gqa=grouped)
    rows = []
    for first in range(0, length, _QUERIES):
        last = min(first + _QUERIES, length)
        begin, stop = max(0, first - window + 1), min(length, last + window - 1)  # the keys that any query sees
        distance = torch.arange(begin, stop) - torch.arange(first, last)[:, None]
        tile = query[:, :, first:last].contiguous()
        keys, values = (part[:, :, begin:stop].contiguous() for part in (key, value))
        seen = distance.abs() < window
        rows.append(F.scaled_dot_product_attention(tile, keys, values, seen, scale=scaling, enable_gqa=grouped))
    return torch.cat(rows, 2)


def register_attention() -> None:
    """Register `flat_attention` with transformers. Without a mask function for its name, no mask is built."""
    if ATTENTION_NAME not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(ATTENTION_NAME, flat_attention)


def flat_attention(  # noqa: PLR0913, PLR0917 - the signature is transformers'
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    *,
    texts: Texts,
    dropout: float = 0.0,
    **extra: Any,
) -> tuple[Tensor, None]:
    """The attention function that a transformers attention module calls.

    Args:
        module: the calling module.
        query: [1, heads, tokens, dim].
        key: [1, kv_heads, tokens, dim].
        value: [1, kv_heads, tokens, dim].
        attention_mask: always None, because no mask function is registered.
        scaling: factor on the scores; None: 1 / sqrt(dim).
        sliding_window: tokens see others that are fewer than this many positions away; None: all.
        softcap: must be None.
        texts: the texts of the batch.
        dropout: 0, because the model is in evaluation mode.
        extra: other arguments of the model's family.

    Returns:
        The output [1, tokens, heads, dim], and no attention weights.

    Raises:
        ValueError: if the model uses a kind of attention that is not supported.
    """
    unknown = sorted(name for name, argument in extra.items() if argument is not None and name not in _HARMLESS)
    if unknown or attention_mask is not None or dropout or softcap is not None:
        raise ValueError(f"its attention needs {', '.join(unknown) or 'a mask, a soft cap or dropout'}: not supported")
    if getattr(module, "is_causal", False):
        raise ValueError("its attention is causal, so it is no encoder")
    scaling = 1 / math.sqrt(query.shape[-1]) if scaling is None else scaling
    return texts.attend(query[0], key[0], value[0], scaling, sliding_window)[None], None


class MPNetBias:
    """MPNet's attention: its modules do not use transformers' attention interface, and add a relative bias.

    The bias of a text is computed once in a forward pass, by the encoder's own function.
    """

    def __init__(self, encoder: Any) -> None:
        """Replaces the attention of the encoder's layers."""
        self._compute = encoder.compute_position_bias
        self._texts = Texts([1])
        self._of_texts: list[Tensor] = []
        encoder.compute_position_bias = lambda hidden_states: None
        for layer in encoder.layer:
            layer.attention.attn.forward = partial(self._attend, layer.attention.attn)

    def begin(self, texts: Texts) -> None:
        """Compute the biases [heads, n, n] of the texts of a forward pass."""
        self._texts = texts
        of_lengths = {length: self._compute(torch.empty(1, length, 1))[0] for length in {*texts.lengths}}
        self._of_texts = [of_lengths[length] for length in texts.lengths]

    def _attend(self, module: Any, hidden_states: Tensor, *ignored: Any, **also_ignored: Any) -> tuple[Tensor]:
        """Hidden states [1, tokens, hidden] to the output of the same shape; masks and biases given here are none."""
        shape = (-1, module.num_attention_heads, module.attention_head_size)
        linears = module.q, module.k, module.v
        query, key, value = (linear(hidden_states).view(shape).transpose(0, 1) for linear in linears)
        scaling = 1 / math.sqrt(module.attention_head_size)
        attended = self._texts.attend(query, key, value, scaling, biases=self._of_texts)
        return (module.o(attended.reshape(hidden_states.shape)),)
