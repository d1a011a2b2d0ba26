"""The objectives of all kinds of heads that can be trained, and Medusa heads, the simplest kind."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from model_runner.features import LAST
from model_runner.heads.base import Example, Heads
from model_runner.heads.eagle3 import Eagle3Heads
from model_runner.heads.hydra import HydraHeads
from model_runner.heads.medusa import MedusaHeads, MedusaShape
from model_runner.training.eagle3 import Eagle3Objective
from model_runner.training.hydra import HydraObjective
from model_runner.training.objective import Guess, Judge, Objective, answer_rows
from model_runner.training.teacher import TargetWeights

SELF_FED_DEPTH = 3
"""Depth at which heads that feed on their own output are judged and trained online."""
_CPU = torch.device("cpu")


def objective_of(
    heads: Heads,
    target: TargetWeights,
    dtype: torch.dtype,
    device: torch.device = _CPU,
    *,
    sample: Sequence[Example] = (),
    depth: int = SELF_FED_DEPTH,
) -> Objective:
    """The objective for heads, to compare or (with a sample of the training data) to train them; it takes ownership.

    Args:
        heads: Hydra, Medusa or EAGLE-3 heads.
        target: embedding and head of the model.
        dtype: type of products.
        device: device of training.
        sample: typical training data; only needed for Hydra heads.
        depth: how many tokens ahead heads that feed on their own output are judged.

    Raises:
        ValueError: for a kind of heads without objective.
    """
    ids = torch.arange(target.shape.vocab_size) if heads.draft_ids is None else heads.draft_ids.clone()
    judge = Judge(target, ids, device, dtype)
    if isinstance(heads, HydraHeads):
        return HydraObjective(heads, judge, sample)
    if isinstance(heads, MedusaHeads):
        return MedusaObjective(heads, judge)
    if isinstance(heads, Eagle3Heads):
        return Eagle3Objective(heads, judge, depth)
    raise ValueError(f"heads of the kind {heads.kind} cannot be trained, only hydra, medusa and eagle3")


class MedusaObjective(Objective):
    """Trains every head at every position of an answer."""

    heads: MedusaHeads

    def guesses(self, examples: Sequence[Example]) -> Iterator[Guess]:
        rows = answer_rows(examples, self.needs, self.judge.device)
        hidden = rows.features[LAST]
        for index in range(1, self.heads.depth + 1):
            at = rows.before(index)
            with self.judge.products():
                logits = self.heads.head(index, hidden[at])
            yield Guess(at, logits, rows.tokens[at + index], hidden[at + index])


@torch.no_grad()
def fresh_medusa(target: TargetWeights, draft_ids: Tensor, depth: int, num_layers: int) -> MedusaHeads:
    """Heads that start like the target's own head: identity layers, and the target's rows as output matrix."""
    shape = MedusaShape(target.shape.hidden, depth, num_layers, len(draft_ids), shared_head=True)
    heads = MedusaHeads(shape, draft_ids)
    for name, parameter in heads.named_parameters():
        if name == "lm_head.weight":
            parameter.copy_(target.head[draft_ids.cpu()])
        else:
            nn.init.zeros_(parameter)
    return heads
