"""Drafts by heads that feed on themselves: EAGLE-1, -2 and -3, and multi-token prediction."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model_runner.attention.backend import AttentionBackend, AttentionOptions
from model_runner.batch import Batch, IntArray
from model_runner.draft_tree import DraftTree
from model_runner.models.features import Feature
from model_runner.models.heads.layer import Attend
from model_runner.models.heads.recurrent import RecurrentHeads
from model_runner.speculative.draft_kv import DraftKV
from model_runner.speculative.growing import Bud, Extend, GrowthLimits, grow, to_array
from model_runner.speculative.proposer import Embed, NewChoice, TargetStep


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

        def extend(buds: Sequence[Bud]) -> Tensor:
            before = torch.stack([states.get((bud.choice, bud.parent), roots[bud.choice]) for bud in buds])
            batch = self._kv.node_batch(buds)
            row_of = _index(batch, before)  # of each bud in the batch
            after = self._run(batch.tokens, before[row_of.argsort()], batch)[row_of]
            states.update({(bud.choice, bud.node): state for bud, state in zip(buds, after, strict=True)})
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
