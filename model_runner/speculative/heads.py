"""Proposers for trained heads of every kind."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from model_runner.attention.backend import AttentionBackend
from model_runner.attention.cpu import NativeAttention
from model_runner.attention.reference import ReferenceAttention
from model_runner.kernels.library import Kernels
from model_runner.kv_cache import KVCache
from model_runner.memory import HeadsSize
from model_runner.models.heads.base import Heads
from model_runner.models.heads.hydra import HydraHeads
from model_runner.models.heads.medusa import MedusaHeads
from model_runner.models.heads.recurrent import RecurrentHeads
from model_runner.models.native import NativePacker
from model_runner.models.onednn import OneDNNPacker
from model_runner.models.packed import pack_weights
from model_runner.speculative.draft_kv import DraftKV, num_draft_blocks
from model_runner.speculative.growing import GrowthLimits
from model_runner.speculative.hydra import HydraProposer
from model_runner.speculative.medusa import MedusaProposer
from model_runner.speculative.proposer import Proposer
from model_runner.speculative.recurrent import RecurrentProposer, TargetEnds

_SELF_FED_DEPTH = 5
"""How deep heads draft that have no depth of their own."""
BY_WORTH = ("mtp", "eagle", "hydra", "medusa", "draft_model")
"""Methods that guess by a trained network. Where there are several, auto takes the first."""
_METHODS = {"eagle3": "eagle"}
"""Of kinds that are not named like their method."""


@dataclass(frozen=True, slots=True)
class HeadsRoom:
    """What heads run on and where they keep keys and values."""

    kernels: Kernels | None
    kv_dtype: torch.dtype
    num_blocks: int
    block_size: int
    max_num_seqs: int


def heads_size(heads: Heads, device: torch.device) -> HeadsSize:
    """What they will take; on CPU the weights are there already."""
    tensors = [] if device.type == "cpu" else [*heads.parameters(), *heads.buffers()]
    return HeadsSize(sum(one.nbytes for one in tensors), (heads.kv,) if isinstance(heads, RecurrentHeads) else ())


def make_heads_proposer(heads: Heads, model: PreTrainedModel, room: HeadsRoom) -> tuple[str, Proposer]:
    """The method's name and its proposer, which takes the heads over."""
    heads = heads.to(model.device)
    limits = GrowthLimits(max_depth=heads.depth or _SELF_FED_DEPTH)
    if room.kernels is not None:
        pack_weights(heads, NativePacker(room.kernels, "int8"), OneDNNPacker())
    return _METHODS.get(heads.kind, heads.kind), _proposer(heads, model, room, limits)


def _proposer(heads: Heads, model: PreTrainedModel, room: HeadsRoom, limits: GrowthLimits) -> Proposer:
    embed = model.get_input_embeddings()
    if isinstance(heads, MedusaHeads):
        return MedusaProposer(heads, limits)
    if isinstance(heads, HydraHeads):
        return HydraProposer(heads, heads.embed_tokens or embed, limits)
    if not isinstance(heads, RecurrentHeads):
        raise TypeError(f"no proposer for heads of the kind {heads.kind}")
    num_blocks = num_draft_blocks(room.num_blocks, room.max_num_seqs, room.block_size, limits.num_extended)
    cache = KVCache([heads.kv], num_blocks, room.block_size, room.kv_dtype, model.device)
    kv = DraftKV(room.num_blocks, room.block_size, limits.num_extended, lag=1)
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    attention: AttentionBackend[object] = (
        ReferenceAttention(cache) if room.kernels is None else NativeAttention(room.kernels, cache)  # type: ignore[assignment]
    )
    return RecurrentProposer(heads, TargetEnds(embed, head), attention, kv, limits)
