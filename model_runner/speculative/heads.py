"""Proposers for trained heads of every kind."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from model_runner.attention.backend import AttentionBackend, AttentionOptions
from model_runner.batch import Batch, IntArray
from model_runner.draft_tree import NO_DRAFT, DraftTree
from model_runner.kernels.interface import CPU, CData, pointer
from model_runner.kv_cache import KVShape
from model_runner.models.features import LAST, Feature
from model_runner.models.heads.base import Heads
from model_runner.models.heads.hydra import HydraHeads, NativeHydra
from model_runner.models.heads.layer import Attend, RecurrentHeads
from model_runner.models.heads.medusa import MedusaHeads
from model_runner.platforms.platform import Platform
from model_runner.speculative.draft_model import DraftKV, num_draft_blocks
from model_runner.speculative.growing import Extend, FrontierNode, GrowthLimits, grow, to_array
from model_runner.speculative.methods import Blocks
from model_runner.speculative.proposer import ChoiceStep, Embed, NewChoice, Proposer, TargetStep


@dataclass(frozen=True, slots=True)
class TargetEnds:
    """The target's ends, which heads share."""

    embed: Embed
    head: Callable[[Tensor], Tensor]
    """Hidden states [n, hidden] -> logits [n, vocab]."""


class RecurrentProposer:
    """Runs the heads over all that the target computed, then over their own guesses, depth by depth.

    Li et al., arXiv:2401.15077, arXiv:2406.16858 (dynamic trees), arXiv:2503.01840; DeepSeek-AI, arXiv:2412.19437. The
    place of a token has its keys and values where the target has its own. Where the prefix cache spared the target a
    token, the heads have no features of it, and attend to what was left there: worse guesses, the same answers.
    """

    needs: frozenset[Feature]
    reads_step = True
    sees_all_steps = True

    def __init__(
        self,
        heads: RecurrentHeads,
        target: TargetEnds,
        attention: AttentionBackend[Any],
        kv: DraftKV,
        limits: GrowthLimits,
    ) -> None:
        """The attention reads and writes the cache that `kv`, of lag 1, keeps the books of."""
        self.needs = frozenset(heads.needs)
        self._target = target
        self._attention = attention
        self._kv = kv
        self._limits = limits
        self.replace_heads(heads)

    def replace_heads(self, heads: RecurrentHeads) -> None:
        """See HeadsProposer. Keys and values of before go on being attended to: worse guesses, the same answers."""
        self._heads = heads
        self._embed: Embed = heads.embed_tokens or self._target.embed
        self._draft_ids = to_array(heads.draft_ids)

    def begin(self, choice: NewChoice) -> None:
        """See Proposer.begin."""
        self._kv.begin(choice)

    @torch.inference_mode()
    def propose(self, step: TargetStep) -> list[DraftTree]:
        """See Proposer.propose."""
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
        first = self._heads.logits(last, self._target.head)
        return grow(step.choices, first, self._extension(last), self._draft_ids, self._limits)

    def end(self, slot: int) -> None:
        """See Proposer.end."""
        self._kv.end(slot)

    def _extension(self, roots: Tensor) -> Extend:
        states: dict[tuple[int, int], Tensor] = {}  # by choice and node: what guessed the node's children, [d]

        def extend(frontier: Sequence[FrontierNode]) -> Tensor:
            before = torch.stack([states.get((leaf.choice, leaf.parent), roots[leaf.choice]) for leaf in frontier])
            batch = self._kv.node_batch(frontier)
            row_of = _index(batch, before)  # of each leaf in the batch
            after = self._run(batch.tokens, before[row_of.argsort()], batch)[row_of]
            states.update({(leaf.choice, leaf.node): state for leaf, state in zip(frontier, after, strict=True)})
            return self._heads.logits(after, self._target.head)

        return extend

    def _run(self, tokens: Sequence[int] | IntArray, states: Tensor, batch: Batch) -> Tensor:
        embedded = self._embed(torch.tensor(tokens, device=states.device)).float()
        positions = torch.from_numpy(batch.positions).to(states.device)
        return self._heads.step(embedded, states, positions, self._attend(batch))

    def _attend(self, batch: Batch) -> Attend:
        metadata = self._attention.prepare(batch)
        options = AttentionOptions(self._heads.scale)
        return lambda query, key, value: self._attention.forward(0, query, key, value, options, metadata)


def _index(batch: Batch, like: Tensor) -> Tensor:
    return torch.from_numpy(batch.logits_index).to(like.device)


class MedusaProposer:
    """Head k guesses the token k after the next from the same hidden state, whatever the tokens between are.

    Cai et al., arXiv:2401.10774. The tree is dynamic: every node's children are the most probable tokens of its depth.
    """

    needs: frozenset[Feature] = frozenset({LAST})
    reads_step = True
    sees_all_steps = False

    def __init__(self, heads: MedusaHeads, limits: GrowthLimits) -> None:
        self._limits = limits
        self.replace_heads(heads)

    def replace_heads(self, heads: MedusaHeads) -> None:
        """See HeadsProposer."""
        self._heads = heads
        self._draft_ids = to_array(heads.draft_ids)

    def begin(self, choice: NewChoice) -> None:
        """See Proposer.begin."""

    @torch.inference_mode()
    def propose(self, step: TargetStep) -> list[DraftTree]:
        """See Proposer.propose."""
        logits: Tensor = self._heads(step.last(LAST))  # [choices, heads, draft vocabulary]

        def extend(frontier: Sequence[FrontierNode]) -> Tensor:
            return logits[[leaf.choice for leaf in frontier], frontier[0].depth]

        return grow(step.choices, logits[:, 0], extend, self._draft_ids, self._limits)

    def end(self, slot: int) -> None:
        """See Proposer.end."""


class HydraProposer:
    """Head i sees the hidden state and the tokens guessed so far (Ankner et al., arXiv:2402.05109).

    Where there are native kernels, one call drafts for all choices but those whose drafts are to be drawn.
    """

    needs: frozenset[Feature]
    reads_step = True
    sees_all_steps = False

    def __init__(
        self, heads: HydraHeads | None, embed: Embed, limits: GrowthLimits, needs: Collection[Feature] = ()
    ) -> None:
        """
        Args:
            heads: in the platform's form. Without any, nothing is drafted until `replace_heads` brings some.
            embed: the target's embedding.
            limits: of every tree; heads of less depth draft as deep as they can.
            needs: what heads may take that come later, beside what these take.
        """
        self.needs = frozenset(needs).union(() if heads is None else heads.needs)
        self._heads = heads
        self._embed = embed
        self._limits = limits
        self._native_draft = _native_draft(embed, limits)

    def replace_heads(self, heads: HydraHeads) -> None:
        """Draft with these from the next step on; they are in the platform's form already (Platform.prepare_heads).

        Raises:
            ValueError: if they take what the target is not asked for.
        """
        if missing := set(heads.needs) - self.needs:
            raise ValueError(f"the heads take {', '.join(sorted(missing))}, which the target is not asked for")
        self._heads = heads

    def begin(self, choice: NewChoice) -> None:
        """See Proposer.begin."""

    def propose(self, step: TargetStep) -> list[DraftTree]:
        """See Proposer.propose."""
        trees = [NO_DRAFT] * len(step.choices)
        heads = self._heads
        if heads is None:
            return trees
        native = None if self._native_draft is None else heads.native
        wanted = [place for place, choice in enumerate(step.choices) if choice.max_nodes]
        in_one_call = [place for place in wanted if native is not None and not step.choices[place].draws]
        if native is not None and in_one_call:
            choices = [step.choices[place] for place in in_one_call]
            features = [step.features[need].float().contiguous() for need in heads.needs]
            for place, tree in zip(in_one_call, self._draft(native, choices, features), strict=True):
                trees[place] = tree
        if len(in_one_call) < len(wanted):
            others = sorted({*wanted} - {*in_one_call})
            choices = [step.choices[place] for place in others]
            for place, tree in zip(others, self._grow(heads, replace(step, choices=choices)), strict=True):
                trees[place] = tree
        return trees

    def end(self, slot: int) -> None:
        """See Proposer.end."""

    def _draft(
        self, native: NativeHydra, choices: Sequence[ChoiceStep], features: Sequence[Tensor]
    ) -> Sequence[DraftTree]:
        assert self._native_draft is not None
        wanted = np.array([_native_choice(choice) for choice in choices], dtype=CPU.array_type("SwDraftChoice"))
        return native.draft(self._native_draft, wanted, features)

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
    """What is the same for all drafts; None if the embedding is no table of float32 in the host's memory."""
    weight = embed.weight if isinstance(embed, nn.Embedding) else None
    scale = 1.0 if type(embed) is nn.Embedding else getattr(embed, "embed_scale", None)
    if weight is None or scale is None or weight.dtype != torch.float32 or weight.device.type != "cpu":
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
        embedding=pointer(weight, *weight.shape),
    )


def _native_choice(choice: ChoiceStep) -> tuple[int, int, int, float, int, int, int]:
    """See SwDraftChoice."""
    sampling, tokens = choice.sampling, choice.tokens
    noise = sampling.seed, sampling.choice, len(tokens) - choice.num_prompt
    return choice.rows[-1], tokens[-1], choice.max_nodes, sampling.temperature, *noise


_SELF_FED_DEPTH = 5
"""How deep heads draft that have no depth of their own."""
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
    kv = DraftKV(blocks.generations, blocks.block_size, limits.num_extended, lag=1)
    ends = TargetEnds(embed, _in_its_type(model.get_output_embeddings()))  # type: ignore[no-untyped-call]
    return RecurrentProposer(heads, ends, room.platform.attention(cache), kv, limits)


def _in_its_type(head: nn.Linear) -> Callable[[Tensor], Tensor]:
    """A head of the target's type for states in float32: its weights are too many to be brought to their type."""
    return lambda states: head(states.to(head.weight.dtype)).float()
