"""Proposers for trained heads of every kind."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from model_runner.kv_cache import KVShape
from model_runner.models.heads.base import Heads, TargetShape
from model_runner.models.heads.hydra import HydraHeads, hydra_features
from model_runner.models.heads.medusa import MedusaHeads
from model_runner.models.heads.recurrent import RecurrentHeads
from model_runner.platforms.platform import Platform
from model_runner.speculative.draft_kv import DraftKV, num_draft_blocks
from model_runner.speculative.growing import GrowthLimits
from model_runner.speculative.hydra import HydraProposer
from model_runner.speculative.medusa import MedusaProposer
from model_runner.speculative.methods import Blocks
from model_runner.speculative.proposer import Proposer
from model_runner.speculative.recurrent import RecurrentProposer, TargetEnds

_SELF_FED_DEPTH = 5
"""How deep heads draft that have no depth of their own."""
_FRESH_DEPTH = 3
"""The same of those that are still to be learnt."""
BY_WORTH = ("mtp", "eagle", "hydra", "medusa", "draft_model")
"""Methods that guess by a trained network. Where there are several, auto takes the first."""
_METHODS = {"eagle3": "eagle"}
"""Of kinds that are not named like their method."""


@dataclass(frozen=True, slots=True)
class HeadsRoom:
    """What heads run on and where they keep keys and values."""

    platform: Platform
    blocks: Blocks


def heads_bytes(heads: Heads, device: torch.device) -> int:
    """What the weights will take; on CPU they are there already."""
    tensors = [] if device.type == "cpu" else [*heads.parameters(), *heads.buffers()]
    return sum(one.nbytes for one in tensors)


def heads_kv(heads: Heads) -> tuple[KVShape, ...]:
    """What they keep of each token."""
    return (heads.kv,) if isinstance(heads, RecurrentHeads) else ()


class HeadsProposer(Proposer, Protocol):
    """One that drafts with heads."""

    def replace_heads(self, heads: Any) -> None:
        """Draft with these from the next step on. They are of the same kind and shape, and take no other features; only
        their draft vocabulary may differ. They are in the platform's form already, so this takes no time.
        """
        ...


def method_of(kind: str) -> str:
    """What a request names heads of a kind by."""
    return _METHODS.get(kind, kind)


def make_heads_proposer(heads: Heads, model: PreTrainedModel, room: HeadsRoom) -> tuple[str, HeadsProposer]:
    """The method's name and its proposer, which takes the heads over."""
    limits = GrowthLimits(max_depth=heads.depth or _SELF_FED_DEPTH)
    room.platform.prepare_heads(heads)
    return method_of(heads.kind), _proposer(heads, model, room, limits)


def make_fresh_proposer(model: PreTrainedModel) -> HeadsProposer:
    """For Hydra heads that are still to be learnt."""
    needs = hydra_features(TargetShape.of(model.config).num_layers)
    return HydraProposer(None, model.get_input_embeddings(), GrowthLimits(_FRESH_DEPTH), needs)


def _proposer(heads: Heads, model: PreTrainedModel, room: HeadsRoom, limits: GrowthLimits) -> HeadsProposer:
    embed = model.get_input_embeddings()
    if isinstance(heads, MedusaHeads):
        return MedusaProposer(heads, limits)
    if isinstance(heads, HydraHeads):
        return HydraProposer(heads, heads.embed_tokens or embed, limits)
    if not isinstance(heads, RecurrentHeads):
        raise TypeError(f"no proposer for heads of the kind {heads.kind}")
    blocks = room.blocks
    num_blocks = num_draft_blocks(blocks.num_blocks, blocks.max_num_seqs, blocks.block_size, limits.num_extended)
    cache = room.platform.make_cache([heads.kv], num_blocks, blocks.block_size)
    kv = DraftKV(blocks.handouts, blocks.block_size, limits.num_extended, lag=1)
    ends = TargetEnds(embed, _in_its_type(model.get_output_embeddings()))  # type: ignore[no-untyped-call]
    return RecurrentProposer(heads, ends, room.platform.attention(cache), kv, limits)


def _in_its_type(head: nn.Linear) -> Callable[[Tensor], Tensor]:
    """A head of the target's type for states in float32: its weights are too many to be brought to their type."""
    return lambda states: head(states.to(head.weight.dtype)).float()
