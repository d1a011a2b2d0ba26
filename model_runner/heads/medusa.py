"""Medusa heads (arXiv:2401.10774): from a hidden state, head k predicts the k-th token after the target's next one.

A head is `num_layers` layers u + silu(W u + b), then its own matrix for the logits. The published format has
`medusa_num_heads` and `medusa_num_layers` in config.json, and the tensors, i and j from 0,

    {i}.{j}.linear.weight|bias    [hidden, hidden]
    {i}.{num_layers}.weight       [vocab, hidden]

The published training code repeats one module for all layers of a head, so these are equal there. This project's
checkpoints may have one matrix for all heads, `lm_head.weight`, instead of the last, and `d2t` (see checkpoint.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model_runner.features import LAST
from model_runner.heads.base import Heads, TargetShape, to_offsets
from model_runner.heads.checkpoint import HeadsCheckpoint


@dataclass(frozen=True, slots=True)
class MedusaShape:
    """Sizes of a set of Medusa heads."""

    hidden: int
    depth: int
    num_layers: int
    draft_vocab: int
    shared_head: bool
    """Whether one matrix gives the logits of all heads."""


class ResidualLayer(nn.Module):
    """u + silu(W u + b)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)

    def forward(self, state: Tensor) -> Tensor:
        return state + F.silu(self.linear(state))


class MedusaHeads(Heads):
    """All heads of a checkpoint."""

    kind = "medusa"
    depth: int

    def __init__(self, shape: MedusaShape, draft_ids: Tensor | None = None) -> None:
        super().__init__(draft_ids, (LAST,), shape.depth)
        self.shape = shape
        self.heads = nn.ModuleList(
            nn.Sequential(
                *(ResidualLayer(shape.hidden) for _ in range(shape.num_layers)),
                *([] if shape.shared_head else [nn.Linear(shape.hidden, shape.draft_vocab, bias=False)]),
            )
            for _ in range(shape.depth)
        )
        self.lm_head = nn.Linear(shape.hidden, shape.draft_vocab, bias=False) if shape.shared_head else nn.Identity()

    def forward(self, hidden: Tensor) -> Tensor:
        """The target's hidden states LAST [n, d] -> logits [n, depth, draft_vocab]."""
        return torch.stack([self.head(index, hidden) for index in range(1, self.depth + 1)], dim=1)

    def head(self, index: int, hidden: Tensor) -> Tensor:
        """Logits [n, draft_vocab] of head `index`, 1 for the first."""
        logits: Tensor = self.lm_head(self.heads[index - 1](hidden))
        return logits


def load_medusa(checkpoint: HeadsCheckpoint, target: TargetShape) -> MedusaHeads:
    """Make the heads of a checkpoint. Raises HeadsError."""
    draft_ids = checkpoint.draft_ids(target)
    shape = MedusaShape(
        hidden=target.hidden,
        depth=checkpoint.integer("medusa_num_heads"),
        num_layers=checkpoint.integer("medusa_num_layers"),
        draft_vocab=target.vocab_size if draft_ids is None else len(draft_ids),
        shared_head="lm_head.weight" in checkpoint.names,
    )
    checkpoint.check_hidden(checkpoint.rows("0.0.linear.weight"), target)
    with torch.device("meta"):  # initial weights, which the checkpoint's replace, would take half of the time
        heads = MedusaHeads(shape, draft_ids)
    checkpoint.fill(heads, {"heads.": ""})
    return heads


def medusa_checkpoint(heads: MedusaHeads) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
    """Config and tensors for save_heads."""
    config = {
        "medusa_num_heads": heads.shape.depth,
        "medusa_num_layers": heads.shape.num_layers,
        "hidden_size": heads.shape.hidden,
    }
    tensors = {name.removeprefix("heads."): tensor for name, tensor in heads.state_dict().items()}
    if heads.draft_ids is not None:
        tensors["d2t"] = to_offsets(heads.draft_ids)
    return config, tensors
