"""Proposers for all kinds of trained heads."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from model_runner.attention.backend import AttentionBackend, AttentionOptions
from model_runner.batch import Batch, IntArray
from model_runner.draft_tree import NO_DRAFT, DraftTree
from model_runner.features import LAST, Feature
from model_runner.heads.base import Heads
from model_runner.heads.hydra import HydraHeads
from model_runner.heads.layer import Attend, RecurrentHeads
from model_runner.heads.medusa import MedusaHeads
from model_runner.kernels.interface import CPU, CData
from model_runner.kernels.library import embedding_struct
from model_runner.kv_cache import KVShape
from model_runner.native.model import StoredEmbedding
from model_runner.platforms.platform import Platform
from model_runner.speculative.draft_kv import DraftKV, TargetBlocks
from model_runner.speculative.growing import Extend, FrontierNode, GrowthLimits, grow, to_array
from model_runner.speculative.proposer import ChoiceStep, Embed, NewChoice, Proposer, TargetStep
from model_runner.target import LoadedModel


class HeadsProposer(Proposer):
    """A proposer that drafts with heads."""

    reads_step = True

    @abstractmethod
    def replace_heads(self, heads: Any) -> None:
        """Draft with these heads from the next step on; they are already prepared, so this is fast.

        They must have the same kind, shape and features as the old ones; only the draft vocabulary may differ.
        """


class RecurrentProposer(HeadsProposer):
    """Runs the heads on everything that the target computed, then on their own guesses, depth by depth.

    Li et al., arXiv:2401.15077, arXiv:2406.16858 (dynamic trees), arXiv:2503.01840; DeepSeek-AI, arXiv:2412.19437. Keys
    and values have the same places as the target's. For tokens from the prefix cache the heads get no features, and
    attend to whatever their cache holds there: this worsens drafts, but not answers.
    """

    sees_all_steps = True

    def __init__(
        self,
        heads: RecurrentHeads,
        embed: Embed,
        head: Callable[[Tensor], Tensor],
        attention: AttentionBackend[Any],
        kv: DraftKV,
        limits: GrowthLimits,
    ) -> None:
        """Starts with the given heads.

        Args:
            heads: prepared by the platform.
            embed: the target's embedding.
            head: the target's head: hidden states [n, hidden] -> logits [n, vocab].
            attention: uses the cache that `kv` manages.
            kv: the bookkeeping of the heads' cache, with lag 1.
            limits: limits of every tree.
        """
        self.needs = frozenset(heads.needs)
        self._embed_target, self._head = embed, head
        self._attention = attention
        self._kv = kv
        self._limits = limits
        self.replace_heads(heads)

    def replace_heads(self, heads: RecurrentHeads) -> None:
        """Replace the heads. Old keys and values stay in use, which worsens drafts at first, but not answers."""
        self._heads = heads
        self._embed: Embed = heads.embed_tokens or self._embed_target
        self._draft_ids = to_array(heads.draft_ids)

    def begin(self, choice: NewChoice) -> None:
        self._kv.begin(choice)

    @torch.inference_mode()
    def propose(self, step: TargetStep) -> list[DraftTree]:
        spans = [self._kv.computed(choice) for choice in step.choices]
        rows = [row for choice in step.choices for row in choice.rows]
        features = {need: step.features[need][rows].float() for need in self._heads.needs}
        following = [
            choice.tokens[place + 1] for choice, span in zip(step.choices, spans, strict=True) for place in span
        ]
        batch = self._kv.known_batch(step.choices, spans)
        states = self._run(following, self._heads.first_state(features), batch)
        for choice, span in zip(step.choices, spans, strict=True):
            self._kv.keep(choice, span)
        last = states[_index(batch, states)]
        if not any(choice.max_nodes for choice in step.choices):
            return [DraftTree()] * len(step.choices)
        first = self._heads.logits(last, self._head)
        return grow(step.choices, first, self._extension(last), self._draft_ids, self._limits)

    def end(self, slot: int) -> None:
        self._kv.end(slot)

    def _extension(self, roots: Tensor) -> Extend:
        states: dict[
            tuple[int, int], Tensor
        ] = {}  # by choice and node: the state [d] that predicts the node's children

        def extend(frontier: Sequence[FrontierNode]) -> Tensor:
            before = torch.stack([states.get((leaf.choice, leaf.parent), roots[leaf.choice]) for leaf in frontier])
            batch = self._kv.node_batch(frontier)
            row_of = _index(batch, before)  # of each leaf in the batch
            after = self._run(batch.tokens, before[row_of.argsort()], batch)[row_of]
            states.update({(leaf.choice, leaf.node): state for leaf, state in zip(frontier, after, strict=True)})
            return self._heads.logits(after, self._head)

        return extend

    def _run(self, tokens: Sequence[int] | IntArray, states: Tensor, batch: Batch) -> Tensor:
        embedded = self._embed(torch.tensor(tokens, device=states.device)).float()
        positions = torch.from_numpy(batch.rotary_positions).to(states.device)
        return self._heads.step(embedded, states, positions, self._attend(batch))

    def _attend(self, batch: Batch) -> Attend:
        metadata = self._attention.prepare(batch)
        options = AttentionOptions(self._heads.scale)
        return lambda query, key, value: self._attention.forward(0, query, key, value, options, metadata)


def _index(batch: Batch, like: Tensor) -> Tensor:
    return torch.from_numpy(batch.logits_index).to(like.device)


class MedusaProposer(HeadsProposer):
    """Head k predicts the token k after the next from the same hidden state, independently of the tokens in between.

    Cai et al., arXiv:2401.10774. The tree is dynamic: every node's children are the most probable tokens of its depth.
    """

    needs = frozenset({LAST})

    def __init__(self, heads: MedusaHeads, limits: GrowthLimits) -> None:
        self._limits = limits
        self.replace_heads(heads)

    def replace_heads(self, heads: MedusaHeads) -> None:
        self._heads = heads
        self._draft_ids = to_array(heads.draft_ids)

    @torch.inference_mode()
    def propose(self, step: TargetStep) -> list[DraftTree]:
        logits: Tensor = self._heads(step.last(LAST))  # [choices, heads, draft vocabulary]

        def extend(frontier: Sequence[FrontierNode]) -> Tensor:
            return logits[[leaf.choice for leaf in frontier], frontier[0].depth]

        return grow(step.choices, logits[:, 0], extend, self._draft_ids, self._limits)


class HydraProposer(HeadsProposer):
    """Head i sees the hidden state and the previous draft tokens (Ankner et al., arXiv:2402.05109).

    With native kernels, one call drafts for all choices, except those whose drafts are drawn at random.
    """

    def __init__(
        self, heads: HydraHeads | None, embed: Embed, limits: GrowthLimits, needs: Collection[Feature] = ()
    ) -> None:
        """Starts with the given heads.

        Args:
            heads: prepared by the platform. None drafts nothing until `replace_heads` is called.
            embed: the target's embedding.
            limits: limits of every tree; heads of less depth draft as deep as they can.
            needs: features that later heads may use, in addition to these heads' own.
        """
        self.needs = frozenset(needs).union(() if heads is None else heads.needs)
        self._heads = heads
        self._embed = embed
        self._limits = limits
        self._native_draft = _native_draft(embed, limits)

    def replace_heads(self, heads: HydraHeads) -> None:
        """Draft with these heads from the next step on. They must be prepared (Platform.prepare_heads).

        Raises:
            ValueError: if they need features that the target does not capture.
        """
        if missing := set(heads.needs) - self.needs:
            raise ValueError(f"the heads need {', '.join(sorted(missing))}, which the target does not record")
        self._heads = heads

    def propose(self, step: TargetStep) -> list[DraftTree]:
        heads = self._heads
        if heads is None:
            return [NO_DRAFT] * len(step.choices)
        wanted = [choice for choice in step.choices if choice.max_nodes]
        in_one_call = [choice for choice in wanted if not choice.draws]
        trees: dict[int, DraftTree] = {}
        if self._native_draft is not None and heads.native is not None and in_one_call:
            features = [step.features[need].float().contiguous() for need in heads.needs]
            fields = np.array([_native_choice(choice) for choice in in_one_call], dtype=CPU.array_type("SwDraftChoice"))
            drafted = heads.native.draft(self._native_draft, fields, features)
            trees = {choice.slot: tree for choice, tree in zip(in_one_call, drafted, strict=True)}
        others = [choice for choice in wanted if choice.slot not in trees]
        if others:
            grown = self._grow(heads, replace(step, choices=others))
            trees |= {choice.slot: tree for choice, tree in zip(others, grown, strict=True)}
        return [trees.get(choice.slot, NO_DRAFT) for choice in step.choices]

    @torch.inference_mode()
    def _grow(self, heads: HydraHeads, step: TargetStep) -> list[DraftTree]:
        hidden = heads.join({need: step.last(need) for need in heads.needs})  # [choices, F * hidden]
        newest = torch.tensor([choice.tokens[-1] for choice in step.choices], device=hidden.device)
        path = self._embed(newest).unsqueeze(1)  # [choices, 1, hidden]
        first = heads.head(1, hidden, path)
        limits = replace(self._limits, max_depth=min(self._limits.max_depth, heads.depth))
        return grow(step.choices, first, self._extension(heads, hidden, path), to_array(heads.draft_ids), limits)

    def _extension(self, heads: HydraHeads, hidden: Tensor, root_path: Tensor) -> Extend:
        paths: dict[tuple[int, int], Tensor] = {}  # by choice and node: embeddings [depth + 1, hidden]

        def extend(frontier: Sequence[FrontierNode]) -> Tensor:
            tokens = torch.tensor([leaf.token for leaf in frontier], device=hidden.device)
            embedded = self._embed(tokens).unsqueeze(1)
            before = torch.stack([paths.get((leaf.choice, leaf.parent), root_path[leaf.choice]) for leaf in frontier])
            path = torch.cat([before, embedded], 1)  # [frontier, depth + 1, hidden]
            paths.update({(leaf.choice, leaf.node): its_path for leaf, its_path in zip(frontier, path, strict=True)})
            return heads.head(path.shape[1], hidden[[leaf.choice for leaf in frontier]], path)

        return extend


def _native_draft(embed: Embed, limits: GrowthLimits) -> CData | None:
    """Constant part of all native drafts; None if the embedding is not a table that the kernels can read."""
    if isinstance(embed, StoredEmbedding):
        struct, scale = embed.struct, embed.embed_scale
    elif type(embed) is nn.Embedding and embed.weight.dtype == torch.float32 and embed.weight.device.type == "cpu":
        struct, scale = embedding_struct(embed.weight), 1.0
    else:
        return None
    return CPU.new(
        "SwDraft",
        max_depth=limits.max_depth,
        branches=limits.branches,
        front=limits.front,
        candidates=limits.candidates,
        least=limits.least,
        followed=limits.followed,
        embedding_scale=float(scale),
        embedding=struct[0],
    )


def _native_choice(choice: ChoiceStep) -> tuple[int, int, int, float, int, int, int]:
    """The fields of an SwDraftChoice."""
    sampling, tokens = choice.sampling, choice.tokens
    noise = sampling.seed, sampling.choice, len(tokens) - choice.num_prompt
    return choice.rows[-1], tokens[-1], choice.max_nodes, sampling.temperature, *noise


_SELF_FED_DEPTH = 5
"""Depth of drafts by heads that feed on their own output."""
BY_WORTH = ("mtp", "eagle", "hydra", "medusa", "draft_model")
"""Methods with trained networks; `auto` uses the first one that is available."""
_METHODS = {"eagle3": "eagle"}
"""Methods whose names differ from the kind of heads."""


@dataclass(frozen=True, slots=True)
class HeadsContext:
    """The platform and cache blocks that heads use."""

    platform: Platform
    blocks: TargetBlocks


def heads_bytes(heads: Heads, device: torch.device) -> int:
    """Device memory that the weights will take; 0 on CPU, where they are already loaded."""
    tensors = [] if device.type == "cpu" else [*heads.parameters(), *heads.buffers()]
    return sum(one.nbytes for one in tensors)


def heads_kv(heads: Heads) -> tuple[KVShape, ...]:
    """Shapes of the keys and values that the heads store for each token."""
    return (heads.kv,) if isinstance(heads, RecurrentHeads) else ()


def method_of(kind: str) -> str:
    """The speculation method of a kind of heads."""
    return _METHODS.get(kind, kind)


def make_heads_proposer(heads: Heads, model: LoadedModel, context: HeadsContext) -> tuple[str, HeadsProposer]:
    """The method's name and its proposer, which takes ownership of the heads."""
    limits = GrowthLimits(max_depth=heads.depth or _SELF_FED_DEPTH)
    context.platform.prepare_heads(heads)
    return method_of(heads.kind), _proposer(heads, model, context, limits)


def _proposer(heads: Heads, model: LoadedModel, context: HeadsContext, limits: GrowthLimits) -> HeadsProposer:
    embed = model.get_input_embeddings()
    if isinstance(heads, MedusaHeads):
        return MedusaProposer(heads, limits)
    if isinstance(heads, HydraHeads):
        return HydraProposer(heads, heads.embed_tokens or embed, limits)
    if not isinstance(heads, RecurrentHeads):
        raise TypeError(f"no proposer for heads of the kind {heads.kind}")
    blocks = context.blocks
    cache = context.platform.make_cache([heads.kv], blocks.num_with_scratch(limits.num_extended), blocks.block_size)
    kv = DraftKV(blocks.generations, blocks.block_size, limits.num_extended, lag=1)
    head = _in_its_type(model.get_output_embeddings())
    return RecurrentProposer(heads, embed, head, context.platform.attention(cache), kv, limits)


def _in_its_type(head: nn.Linear) -> Callable[[Tensor], Tensor]:
    """A head for float32 states that keeps its weights' type: converting the weights would take too much memory."""
    return lambda states: head(states.to(head.weight.dtype)).float()
