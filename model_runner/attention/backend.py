"""The interface of attention over the paged KV cache."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from model_runner.batch import Batch

Metadata = TypeVar("Metadata")


@dataclass(frozen=True, slots=True, eq=False)
class AttentionOptions:
    """Attention parameters of a layer."""

    scale: float
    """Factor on the query-key products."""
    window: int | None = None
    """Number of last positions a query sees, including its own; None for all."""
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap) (Gemma 2, arXiv:2408.00118)."""
    chunk: int | None = None
    """A query at position p sees no position before p // chunk * chunk (Llama 4); None for no such limit."""
    sinks: Tensor | None = None
    """[heads] a logit of each query head that takes part in its softmax and has no value (gpt-oss, arXiv:2309.17453).

    Neither the scale nor the soft cap applies to it. None for no sinks."""
    sees_spans: bool = False
    """Whether a query in a span of the batch sees it to its end (images of Gemma 3 and 4). A window bounds only what is
    before the query."""

    @property
    def reach(self) -> int | None:
        """The most positions that a query sees, including its own; None for all."""
        limits = [limit for limit in (self.window, self.chunk) if limit]
        return min(limits, default=None)


class AttentionBackend(ABC, Generic[Metadata]):
    """Writes new keys and values to the paged cache and attends to each request's cached positions.

    Guarantee: an output row depends, bit for bit, only on its query and on the keys and values at the positions it
    sees. It does not depend on other rows, on how the prompt was chunked, or on which blocks hold it.
    """

    needs_clean_blocks: bool
    """Whether stale NaN in unwritten parts of a block would reach results, so that blocks must be cleaned."""

    @abstractmethod
    def prepare(self, batch: Batch) -> Metadata:
        """Data that all layers of a step share. Called once per step."""

    def layouts(self, batch: Batch) -> Mapping[str, Metadata]:
        """`prepare` for every way in which other requests could make this step's work be divided, by name."""
        return {"": self.prepare(batch)}

    @abstractmethod
    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, metadata: Metadata
    ) -> Tensor:
        """Write keys and values to the cache, then attend.

        Args:
            layer: index of the decoder layer.
            query: [tokens, heads, key_dim], rotary embedding applied.
            key: [tokens, kv_heads, key_dim], rotary embedding applied.
            value: [tokens, kv_heads, value_dim].
            options: parameters of this layer; sinks are on the device of the query.
            metadata: the result of `prepare` for this step.

        Returns:
            [tokens, heads, value_dim].
        """

    @abstractmethod
    def attend(self, layer: int, query: Tensor, options: AttentionOptions, metadata: Metadata) -> Tensor:
        """Attend to keys and values that `forward` has written in this step."""
