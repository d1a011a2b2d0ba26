"""Drafts by a smaller model with the same tokenizer."""

from collections.abc import Sequence
from itertools import compress

import torch
from torch import Tensor

from model_runner.draft_tree import NO_DRAFT, DraftTree
from model_runner.speculative.draft_kv import DraftKV
from model_runner.speculative.growing import FrontierNode, GrowthLimits, grow
from model_runner.speculative.proposer import NewChoice, Proposer, TargetStep, share_out
from model_runner.target import TargetModel

LIMITS = GrowthLimits(max_depth=5, branches=2, front=2)


class DraftModelProposer(Proposer):
    """Runs a model on the known tokens and then on its own best guesses, depth by depth.

    Leviathan et al., arXiv:2211.17192, with trees of the most probable candidates instead of one chain.
    """

    def __init__(self, model: TargetModel, kv: DraftKV, limits: GrowthLimits, max_known: int) -> None:
        """The model reads and writes the cache that `kv` manages.

        Args:
            model: the smaller model.
            kv: the bookkeeping of its cache.
            limits: of the trees.
            max_known: the most known tokens that a step computes. Choices that lack more catch up over several steps.
        """
        self._model = model
        self._kv = kv
        self._limits = limits
        self._max_known = max_known

    def begin(self, choice: NewChoice) -> None:
        self._kv.begin(choice)

    @torch.inference_mode()
    def propose(self, step: TargetStep) -> list[DraftTree]:
        wanted = [choice for choice in step.choices if choice.max_nodes]
        missing = [self._kv.missing(choice, len(choice.tokens)) for choice in wanted]
        shares = share_out([len(span) for span in missing], self._max_known)
        spans = {
            choice.slot: span[:share] for choice, span, share in zip(wanted, missing, shares, strict=True) if share
        }
        if not spans:
            return [NO_DRAFT] * len(step.choices)
        computed = [choice for choice in wanted if choice.slot in spans]
        logits = self._model.forward(self._kv.known_batch(computed, list(spans.values())))
        for choice in computed:
            self._kv.keep(choice, spans[choice.slot])
        is_ready = [spans[choice.slot].stop == len(choice.tokens) for choice in computed]
        ready = list(compress(computed, is_ready))
        grown = grow(ready, logits[is_ready], self._extend, None, self._limits) if ready else []
        trees = {choice.slot: tree for choice, tree in zip(ready, grown, strict=True)}
        return [trees.get(choice.slot, NO_DRAFT) for choice in step.choices]

    def end(self, slot: int) -> None:
        self._kv.end(slot)

    def _extend(self, frontier: Sequence[FrontierNode]) -> Tensor:
        return self._model.forward(self._kv.node_batch(frontier))
