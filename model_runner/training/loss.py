"""The loss of heads against the target's own distribution."""

from typing import Any

import torch
from torch import Tensor

_CHUNK_NUMBERS = 1 << 20
"""Logits looked at together: they and what is computed from them stay in the processor's cache."""


class _SoftCrossEntropy(torch.autograd.Function):
    """See soft_cross_entropy. The gradient is known as soon as the loss is, so only it is kept."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, teacher: Tensor, weights: Tensor) -> Tensor:
        gradient = torch.empty_like(logits)
        total = torch.zeros((), device=logits.device)
        size = max(1, _CHUNK_NUMBERS // logits.shape[1])
        for start in range(0, len(logits), size):
            part = slice(start, start + size)
            logprobs = logits[part].float().log_softmax(1)
            probs = teacher[part].float().softmax(1)
            weight = weights[part].unsqueeze(1)
            total -= (probs * logprobs).mul_(weight).sum()
            gradient[part] = logprobs.exp_().sub_(probs).mul_(weight)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0].to(gradient.dtype), None, None


def soft_cross_entropy(logits: Tensor, teacher: Tensor, weights: Tensor) -> Tensor:
    """The weighted mean of -sum_v p(v) log q(v), for q of the logits and p of the teacher's.

    Args:
        logits: [n, vocab], with a gradient.
        teacher: [n, vocab], without.
        weights: [n] float32, not negative.
    """
    total: Tensor = _SoftCrossEntropy.apply(logits, teacher, weights)  # type: ignore[no-untyped-call]
    return total / weights.sum().clamp_min(1.0)
