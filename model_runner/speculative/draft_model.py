"""Drafts by a model: a smaller one with the same tokenizer, or the target's own first layers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from model_runner.draft_tree import NO_DRAFT, DraftTree
from model_runner.models.features import Feature
from model_runner.models.target import TargetModel
from model_runner.speculative.draft_kv import DraftKV
from model_runner.speculative.growing import Bud, GrowthLimits, grow
from model_runner.speculative.proposer import NewChoice, TargetStep


class DraftModelProposer:
    """Runs a model over what is known and then over its own best guesses, depth by depth.

    Leviathan et al., arXiv:2211.17192, with trees of the draft's most probable candidates in place of one chain.
    """

    needs: frozenset[Feature] = frozenset()
    reads_step = False
    sees_all_steps = False

    def __init__(self, model: TargetModel, kv: DraftKV, limits: GrowthLimits) -> None:
        """The model reads and writes the cache that `kv` keeps the books of."""
        self._model = model
        self._kv = kv
        self._limits = limits

    def begin(self, choice: NewChoice) -> None:
        """See Proposer.begin."""
        self._kv.begin(choice)

    @torch.inference_mode()
    def propose(self, step: TargetStep) -> list[DraftTree]:
        """See Proposer.propose."""
        wanted = [choice for choice in step.choices if choice.max_nodes]
        if not wanted:
            return [NO_DRAFT] * len(step.choices)
        spans = [self._kv.missing(choice, len(choice.tokens)) for choice in wanted]
        first = self._model.forward(self._kv.known_batch(wanted, spans))
        for choice, span in zip(wanted, spans, strict=True):
            self._kv.keep(choice, span)
        trees = iter(grow(wanted, first, self._extend, None, self._limits))
        return [next(trees) if choice.max_nodes else NO_DRAFT for choice in step.choices]

    def end(self, slot: int) -> None:
        """See Proposer.end."""
        self._kv.end(slot)

    def _extend(self, buds: Sequence[Bud]) -> Tensor:
        return self._model.forward(self._kv.node_batch(buds))
