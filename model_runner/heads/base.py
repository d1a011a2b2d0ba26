"""Base class and shared types of all kinds of draft heads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from model_runner.batch import IntArray
from model_runner.features import Feature
from model_runner.refusal import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


Float16Array = npt.NDArray[np.float16]


class HeadsError(UnsupportedModelError):
    """A checkpoint of heads cannot be used; the message names it and the reason."""


@dataclass(frozen=True, slots=True)
class TargetShape:
    """Properties of the target that heads must fit."""

    hidden: int
    vocab_size: int
    num_layers: int

    @classmethod
    def of(cls, config: "PretrainedConfig") -> "TargetShape":
        """The shape of a transformers model."""
        text: Any = config.get_text_config()
        return cls(text.hidden_size, text.vocab_size, text.num_hidden_layers)


class Heads(nn.Module):
    """Draft heads with float32 weights, which may be replaced by packed ones: every product is an F.linear of a module.

    Logits cover the draft vocabulary, which is the target's or a part of it.
    """

    kind: ClassVar[str]
    needs: tuple[Feature, ...]
    """Hidden states of the target that the heads use."""
    depth: int | None
    """How many tokens after the target's next one can be drafted; None for heads that feed on their own output."""
    draft_ids: Tensor | None  # [draft_vocab] int64
    """The target's id of each draft token; None if the draft vocabulary is the target's."""
    embed_tokens: nn.Embedding | None
    """The heads' own embedding of the target's tokens; None to use the target's."""

    def __init__(self, draft_ids: Tensor | None, needs: tuple[Feature, ...], depth: int | None = None) -> None:
        super().__init__()
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self.needs = needs
        self.depth = depth
        self.embed_tokens = None


@dataclass(frozen=True, slots=True)
class Example:
    """Tokens that heads learn from, with the end of their prompt. Features may be read from disk when they are used."""

    tokens: IntArray  # [T]
    num_prompt: int
    temperature: float
    features: Mapping[Feature, Float16Array]  # each [T, hidden]
    start: int = 0
    """Position of the first token, if the example starts within a sequence."""

    @property
    def num_answer(self) -> int:
        """Number of tokens in the answer."""
        return len(self.tokens) - self.num_prompt


def to_offsets(draft_ids: Tensor) -> Tensor:
    """EAGLE-3's table `d2t`: the target's id minus the draft id, for each draft id."""
    return draft_ids - torch.arange(len(draft_ids), device=draft_ids.device)


def from_offsets(offsets: Tensor) -> Tensor:
    """The inverse of `to_offsets`."""
    return offsets.long() + torch.arange(len(offsets))
