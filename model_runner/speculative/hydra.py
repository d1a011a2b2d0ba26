"""Drafts by Hydra heads."""

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from model_runner.draft_tree import NO_DRAFT, DraftTree
from model_runner.kernels.structs import DRAFT_CHOICE, DraftStruct
from model_runner.models.features import Feature
from model_runner.models.heads.hydra import HydraHeads
from model_runner.models.heads.native_hydra import NativeHydra
from model_runner.speculative.growing import Bud, Extend, GrowthLimits, grow, to_array
from model_runner.speculative.proposer import ChoiceStep, Embed, NewChoice, TargetStep


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
        wanted = np.array([_native_choice(choice) for choice in choices], dtype=DRAFT_CHOICE)
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

        def extend(buds: Sequence[Bud]) -> Tensor:
            tokens = torch.tensor([bud.token for bud in buds], device=hidden.device)
            embedded = self._embed(tokens).unsqueeze(1)
            before = torch.stack([paths.get((bud.choice, bud.parent), root_path[bud.choice]) for bud in buds])
            path = torch.cat([before, embedded], 1)  # [buds, depth + 1, hidden]
            paths.update({(bud.choice, bud.node): its_path for bud, its_path in zip(buds, path, strict=True)})
            return heads.head(path.shape[1], hidden[[bud.choice for bud in buds]], path)

        return extend


def _native_draft(embed: Embed, limits: GrowthLimits) -> DraftStruct | None:
    """What is the same for all drafts; None if the embedding is no table of float32 in the host's memory."""
    weight = embed.weight if isinstance(embed, nn.Embedding) else None
    scale = 1.0 if type(embed) is nn.Embedding else getattr(embed, "embed_scale", None)
    if weight is None or scale is None or weight.dtype != torch.float32 or weight.device.type != "cpu":
        return None
    return DraftStruct(
        max_depth=limits.max_depth,
        branches=limits.branches,
        front=limits.front,
        candidates=limits.candidates,
        least=limits.least,
        followed=limits.followed,
        embedding_scale=float(scale),
        embedding=weight.data_ptr(),
    )


def _native_choice(choice: ChoiceStep) -> tuple[int, int, int, float, int, int, int]:
    """See SwDraftChoice."""
    sampling, tokens = choice.sampling, choice.tokens
    noise = sampling.seed, sampling.choice, len(tokens) - choice.num_prompt
    return choice.rows[-1], tokens[-1], choice.max_nodes, sampling.temperature, *noise
