"""Drafts by Medusa heads."""

from collections.abc import Sequence

import torch
from torch import Tensor

from model_runner.draft_tree import DraftTree
from model_runner.models.features import LAST, Feature
from model_runner.models.heads.medusa import MedusaHeads
from model_runner.speculative.growing import Bud, GrowthLimits, grow, to_array
from model_runner.speculative.proposer import NewChoice, TargetStep


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

        def extend(buds: Sequence[Bud]) -> Tensor:
            return logits[[bud.choice for bud in buds], buds[0].depth]

        return grow(step.choices, logits[:, 0], extend, self._draft_ids, self._limits)

    def end(self, slot: int) -> None:
        """See Proposer.end."""
