"""The interface of attention over the paged KV cache."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

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
    selection: Tensor | None = None
    """The result of `AttentionBackend.select` for this step: the positions that its queries see; None for all."""
    sums: Tensor | None = None
    """[tokens, heads, 2] float32 that receives each row's highest score, and the sum of its weights relative to it.

    For a row that sees nothing the sum is 0, and the output undefined."""
    sees_spans: bool = False
    """Whether a query in a span of the batch sees it to its end (images of Gemma 3 and 4). A window bounds only what is
    before the query."""

    @property
    def reach(self) -> int | None:
        """The most positions that a query sees, including its own; None for all."""
        limits = [limit for limit in (self.window, self.chunk) if limit]
        return min(limits, default=None)


@dataclass(frozen=True, slots=True)
class IndexOptions:
    """How an indexer selects the positions that a query sees, in blocks. Of equal scores, it takes the earlier one."""

    top: int
    """Blocks with the highest scores that a query sees."""
    block: int = 1
    """Positions in a block."""
    pools: Literal["highest", "last"] = "highest"
    """A block's score is the highest score of its positions up to the query's, or the score of its last position.

    With "last", a block that is not full has no score, and is seen in addition to the others."""
    local: int = 0
    """So many last blocks, with the query's own, have the highest scores. Only with "highest"."""
    entries: bool = False
    """Whether of a selected block only the last position is seen, where an entry stands for the block, and no block
    that is not full. Only with "last"."""


class AttentionBackend(ABC, Generic[Metadata]):
    """Writes new keys and values to the paged cache and attends to each request's cached positions.

    Guarantee: an output row depends, bit for bit, only on its query and on the keys and values at the positions it
    sees. It does not depend on other rows, on how the prompt was chunked, or on which blocks hold it.
    """

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

    def select(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        weights: Tensor | None,
        options: IndexOptions,
        metadata: Metadata,
    ) -> Tensor:
        """Write index keys to the cache, then select positions for `AttentionOptions.selection`.

        The score of a query and a key is the weighted sum over the heads of those products that are positive. Without
        weights, each head selects by its own products, for as many key-value heads in order.

        Args:
            layer: index of the keys' layer in the cache, which has no values.
            query: [tokens, heads, key_dim].
            key: [tokens, 1, key_dim].
            weights: [tokens, heads], or None.
            options: parameters of this layer.
            metadata: the result of `prepare` for this step.

        Raises:
            ValueError: if the backend cannot select.
        """
        raise ValueError("this attention backend cannot select positions; models with an indexer need the CPU")

    def see_entries(self, block: int, metadata: Metadata) -> Tensor:
        """The selection of the last position of every full block, for all tokens of a step.

        Raises:
            ValueError: if the backend cannot select.
        """
        raise ValueError("this attention backend cannot select positions; models with compressed entries need the CPU")

    def recall(self, layer: int, rows: Tensor, block: int, count: int, metadata: Metadata) -> tuple[Tensor, Tensor]:
        """Write rows to the cache, and read the last rows up to each token that ends a block of positions.

        Args:
            layer: index of the rows' layer in the cache, which has no values.
            rows: [tokens, 1, dim].
            block: positions in a block.
            count: rows to read for each of these tokens.
            metadata: the result of `prepare` for this step.

        Returns:
            The tokens [n], and float32 rows [n, count, dim]. Those before the first position are undefined.

        Raises:
            ValueError: if the backend cannot do this.
        """
        raise ValueError("this attention backend keeps no rows; models with compressed entries need the CPU")

    @abstractmethod
    def attend(self, layer: int, query: Tensor, options: AttentionOptions, metadata: Metadata) -> Tensor:
        """Attend to keys and values that `forward` has written in this step."""
