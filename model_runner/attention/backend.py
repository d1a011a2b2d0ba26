"""The interface of attention over the paged KV cache."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from model_runner.batch import Batch

Metadata = TypeVar("Metadata")


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What a layer asks of its attention."""

    scale: float
    """Factor on the query-key products."""
    window: int | None = None
    """A query sees this many last positions, its own included; None sees all."""
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap) (Gemma 2, arXiv:2408.00118)."""


class AttentionBackend(ABC, Generic[Metadata]):
    """Writes new keys and values into the paged cache and attends to everything its requests have there.

    Guarantee: the output of a query row depends, bit for bit, only on its query and on the keys and values at the
    positions it sees; never on other rows, on how the prompt was cut into chunks or on which blocks hold it.
    """

    needs_clean_blocks: bool
    """Whether NaN in a part of a block that nobody wrote since it was handed out would reach a result."""

    @abstractmethod
    def prepare(self, batch: Batch) -> Metadata:
        """What all layers of one step share. Called once per step."""

    def layouts(self, batch: Batch) -> Mapping[str, Metadata]:
        """The same for each way in which this step's work may be shared out where that depends on others; by name."""
        return {"": self.prepare(batch)}

    @abstractmethod
    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, metadata: Metadata
    ) -> Tensor:
        """Attend.

        Args:
            layer: index of the decoder layer.
            query: [tokens, heads, key_dim], rotary embedding applied.
            key: [tokens, kv_heads, key_dim], written to the cache first.
            value: [tokens, kv_heads, value_dim], likewise.
            options: scale, window and soft cap of this layer.
            metadata: what `prepare` returned for this step.

        Returns:
            [tokens, heads, value_dim].
        """
