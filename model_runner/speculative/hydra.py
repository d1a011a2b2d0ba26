"""Drafts by Hydra heads."""

from collections.abc import Sequence

import torch
from torch import Tensor

from model_runner.draft_tree import NO_DRAFT, DraftTree
from model_runner.models.features import Feature
from model_runner.models.heads.hydra import HydraHeads
from model_runner.speculative.growing import Bud, Extend, GrowthLimits, grow, to_array
from model_runner.speculative.proposer import Embed, NewChoice, TargetStep


class HydraProposer:
    """Head i sees the hidden state and the tokens guessed so far (Ankner et al., arXiv:2402.05109)."""

    needs: frozenset[Feature]
    reads_step = True

    def __init__(self, heads: HydraHeads, embed: Embed, limits: GrowthLimits) -> None:
        self.needs = frozenset(heads.needs)
        self._heads = heads
        self._embed = embed
        self._limits = limits
        self._draft_ids = to_array(heads.draft_ids)

    def begin(self, choice: NewChoice) -> None:
        """See Proposer.begin."""

    @torch.inference_mode()
    def propose(self, step: TargetStep) -> list[DraftTree]:
        """See Proposer.propose."""
        if not any(choice.max_nodes for choice in step.choices):
            return [NO_DRAFT] * len(step.choices)
        hidden = self._heads.join({need: step.last(need) for need in self._heads.needs})  # [choices, F * hidden]
        newest = torch.tensor([choice.tokens[-1] for choice in step.choices], device=hidden.device)
        path = self._embed(newest).unsqueeze(1)  # [choices, 1, hidden]
        first = self._heads.head(1, hidden, path)
        return grow(step.choices, first, self._extension(hidden, path), self._draft_ids, self._limits)

    def end(self, slot: int) -> None:
        """See Proposer.end."""

    def _extension(self, hidden: Tensor, root_path: Tensor) -> Extend:
        paths: dict[tuple[int, int], Tensor] = {}  # by choice and node: embeddings [depth + 1, hidden]

        def extend(buds: Sequence[Bud]) -> Tensor:
            tokens = torch.tensor([bud.token for bud in buds], device=hidden.device)
            embedded = self._embed(tokens).unsqueeze(1)
            before = torch.stack([paths.get((bud.choice, bud.parent), root_path[bud.choice]) for bud in buds])
            path = torch.cat([before, embedded], 1)  # [buds, depth + 1, hidden]
            paths.update({(bud.choice, bud.node): its_path for bud, its_path in zip(buds, path, strict=True)})
            return self._heads.head(path.shape[1], hidden[[bud.choice for bud in buds]], path)

        return extend
