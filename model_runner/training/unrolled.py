"""Attention while recurrent heads are trained on whole sequences, each step on what the step before it made.

Step 0 runs at every place of a sequence, on the target's features. Step k runs as if k tokens had been guessed: at a
place i it sees the keys of step 0 up to place i - k, those of the steps 1 .. k - 1 at the k - 1 places between, and its
own (training-time test, arXiv:2503.01840).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """A sequence's places in the flat rows of step 0: all, and the first whose guesses count."""

    start: int
    first: int
    end: int

    def rows(self, step: int) -> slice:
        """The places at which a step runs."""
        return slice(self.start if step == 0 else min(self.first + step, self.end), self.end)


class UnrolledAttention:
    """Keys and values of all steps so far; called as `Attend`, once for each step in turn."""

    def __init__(self, spans: Sequence[Span], scale: float) -> None:
        self._spans = spans
        self._scale = scale
        self._keys: list[list[Tensor]] = []  # by step and span, each [rows, kv_heads, dim]
        self._values: list[list[Tensor]] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Query [n, heads, dim], key and value [n, kv_heads, dim] for the rows of all spans -> [n, heads, dim]."""
        step = len(self._keys)
        sizes = [len(range(*span.rows(step).indices(span.end))) for span in self._spans]
        self._keys.append(list(torch.split(key, sizes)))
        self._values.append(list(torch.split(value, sizes)))
        attend = self._attend_at_first if step == 0 else self._attend_later
        return torch.cat([attend(index, part) for index, part in enumerate(torch.split(query, sizes))])

    def _attend_at_first(self, index: int, query: Tensor) -> Tensor:
        """Causal attention within a sequence."""
        rows = (query, self._keys[0][index], self._values[0][index])
        q, k, v = (one.transpose(0, 1).unsqueeze(0) for one in rows)  # [1, heads, rows, dim]
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self._scale, enable_gqa=True)
        return output[0].transpose(0, 1)

    def _attend_later(self, index: int, query: Tensor) -> Tensor:
        step = len(self._keys) - 1
        span = self._spans[index]
        rows, heads = query.shape[:2]
        keys, values = (
            [repeated(tensors[index][: None if at == 0 else rows], heads) for at, tensors in enumerate(kept)]
            for kept in (self._keys, self._values)
        )
        root = span.first - span.start + torch.arange(rows, device=query.device)  # the last place with the target's own
        hidden = torch.arange(len(keys[0]), device=query.device) > root.unsqueeze(1)  # [rows, places]
        scores = torch.einsum("rhd,phd->rhp", query, keys[0]).masked_fill(hidden.unsqueeze(1), float("-inf"))
        own = [(query * keys[at]).sum(-1, keepdim=True) for at in range(1, step + 1)]
        weights = (torch.cat([scores, *own], dim=-1).float() * self._scale).softmax(-1).to(query.dtype)
        output = torch.einsum("rhp,phd->rhd", weights[..., : len(keys[0])], values[0])
        for at in range(1, step + 1):
            output = output + weights[..., len(keys[0]) + at - 1].unsqueeze(-1) * values[at]
        return output


def repeated(heads: Tensor, count: int) -> Tensor:
    """Key-value heads [rows, kv_heads, dim] -> [rows, count, dim], each for a group of query heads."""
    return heads.repeat_interleave(count // heads.shape[1], dim=1)
