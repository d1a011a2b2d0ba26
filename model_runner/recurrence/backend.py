"""The interface of recurrent layers.

One recurrence covers gated delta nets, KDA, Mamba 2 and lightning attention. A head has a state S [key_dim, value_dim];
for each token, with a decay a for the head or for each channel of its key:

    S <- Diag(a) S,  u = beta (v - S^T k) or u = v,  S <- S + k u^T,  o = S^T q

It is computed from anchors. The state after every full block of 32 positions depends on the state before the block and
on the block's rows (k, u, a). A token's output depends on the anchor before it and on the rows of its own block. So its
bits depend neither on chunks nor on drafts nor on where a cached prefix ended.

Mamba's selective scan has a decay for each pair of a channel and one of its N states, with a step dt of the channel:

    h[n] <- exp(dt A[n]) h[n] + dt x B[n],  y = sum over n of C[n] h[n]

Its rows are (dt, dt x, B). From the anchor on they are taken up one after another, for every token anew.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from model_runner.batch import Batch
from model_runner.recurrence.states import StateCache

Metadata = TypeVar("Metadata")


@dataclass(frozen=True, slots=True)
class GatedDeltaNetParameters:
    """Parameters of a gated delta net between its projections, with H heads."""

    conv_weight: Tensor  # [channels, kernel]
    conv_bias: Tensor | None
    a_log: Tensor  # [H]
    dt_bias: Tensor  # [H]
    norm: Tensor  # [value_dim]
    norm_eps: float
    gain: float = 1.0
    """Factor on sigmoid(b), the beta of the recurrence."""


@dataclass(frozen=True, slots=True)
class Mamba2Parameters:
    """Parameters of a Mamba 2 layer between its projections, with H heads."""

    conv_weight: Tensor  # [channels, kernel]
    conv_bias: Tensor | None
    a_log: Tensor  # [H]
    dt_bias: Tensor  # [H]
    d: Tensor  # [H]
    norm: Tensor | None  # [H * value_dim]
    norm_eps: float
    norm_groups: int
    """Parts of the output that have a norm each."""
    step_limits: tuple[float, float]


@dataclass(frozen=True, slots=True)
class ShortConvolutionParameters:
    """Parameters of a short convolution between its projections."""

    conv_weight: Tensor  # [channels, kernel]
    conv_bias: Tensor | None


MixerParameters = GatedDeltaNetParameters | Mamba2Parameters | ShortConvolutionParameters


class RecurrenceBackend(ABC, Generic[Metadata]):
    """Computes recurrences and convolutions of a step, and writes their rows and pages.

    Guarantee: an output row depends, bit for bit, only on the inputs of its own token and of those before it on its
    path. It does not depend on other rows, on how the prompt was chunked, on drafts, or on the blocks and pages used.
    """

    cache: StateCache

    @abstractmethod
    def prepare(self, batch: Batch) -> Metadata:
        """Data that all layers of a step share, from `batch.states`. Called once per step.

        Raises:
            ValueError: if the batch has no states, or they do not fit its tokens.
        """

    @abstractmethod
    def recur(
        self,
        index: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        beta: Tensor | None,
        metadata: Metadata,
    ) -> Tensor:
        """Write the rows of T tokens, pass through the recurrence, and write pages.

        Args:
            index: of the recurrence in the cache.
            query: [T, key_heads, key_dim], normalised and scaled as the layer does.
            key: [T, key_heads, key_dim].
            value: [T, heads, value_dim].
            log_decay: [T, heads] or [T, heads, key_dim], as `per_channel` says: the logarithm of a, not positive. The
                backend stores a itself and multiplies decays, which needs no exponential for each pair of tokens and
                does not overflow.
            beta: [T, heads], or None without `delta`.
            metadata: the result of `prepare` for this step.

        Returns:
            [T, heads, value_dim] in the type of `value`.
        """

    @abstractmethod
    def scan(
        self,
        index: int,
        step: Tensor,
        value: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        metadata: Metadata,
    ) -> Tensor:
        """Write the rows of T tokens, pass through the selective scan, and write pages.

        Args:
            index: of the scan in the cache.
            step: [T, channels] dt, not negative.
            value: [T, channels] inputs times their steps.
            a: [channels, states] A of the layer, not positive.
            b: [T, states].
            c: [T, states].
            metadata: the result of `prepare` for this step.

        Returns:
            [T, channels] in the type of `value`.
        """

    @abstractmethod
    def convolve(
        self, index: int, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, metadata: Metadata
    ) -> Tensor:
        """Write the inputs of T tokens as rows, apply a causal depthwise convolution, and write pages.

        Args:
            index: of the convolution in the cache.
            x: [T, channels].
            weight: [channels, kernel], the newest input last.
            bias: [channels], or None.
            activation: "silu" (or "swish") or None.
            metadata: the result of `prepare` for this step.

        Returns:
            [T, channels] in the type of `x`.

        Raises:
            ValueError: for another activation.
        """


def has_silu(activation: str | None) -> bool:
    """Whether a convolution ends with SiLU. Raises ValueError if the activation is not supported."""
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"a convolution with activation {activation!r} is not supported; use silu or none")
    return activation is not None
