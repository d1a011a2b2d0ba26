"""What all kinds of heads have in common."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from model_runner.models.features import Feature
from model_runner.models.refusal import UnsupportedModelError


class HeadsError(UnsupportedModelError):
    """A checkpoint of heads cannot be used; the message says which and why."""


@dataclass(frozen=True, slots=True)
class TargetShape:
    """What heads must fit."""

    hidden: int
    vocab_size: int
    num_layers: int

    @classmethod
    def of(cls, config: PretrainedConfig) -> "TargetShape":
        """The shape of a model of transformers."""
        text: Any = config.get_text_config()
        return cls(text.hidden_size, text.vocab_size, text.num_hidden_layers)


class Heads(nn.Module):
    """Weights in float32, replaceable by packed ones: every product with a weight is an F.linear on a module's own.

    Logits are over the draft vocabulary, which is the target's own or a part of it.
    """

    kind: ClassVar[str]
    needs: tuple[Feature, ...]
    """Hidden states of the target that the heads take."""
    depth: int | None
    """Tokens after the target's own next one that can be guessed; None for heads that feed on themselves."""
    draft_ids: Tensor | None  # [draft_vocab] int64
    """The target's id of each token of the draft vocabulary; None if that is the target's vocabulary."""
    embed_tokens: nn.Embedding | None
    """Of the target's ids, to be used in place of the target's own embedding; None to use that."""

    def __init__(self, draft_ids: Tensor | None, needs: tuple[Feature, ...], depth: int | None = None) -> None:
        super().__init__()
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self.needs = needs
        self.depth = depth
        self.embed_tokens = None


def to_offsets(draft_ids: Tensor) -> Tensor:
    """EAGLE-3's table `d2t`: the target's id minus the draft's, for each draft id."""
    return draft_ids - torch.arange(len(draft_ids), device=draft_ids.device)


def from_offsets(offsets: Tensor) -> Tensor:
    """The inverse of `to_offsets`."""
    return offsets.long() + torch.arange(len(offsets))
