"""From heads of any kind that can be trained to what they are trained and judged by."""

from collections.abc import Sequence

import torch

from model_runner.models.heads.base import Heads
from model_runner.models.heads.eagle3 import Eagle3Heads
from model_runner.models.heads.hydra import HydraHeads
from model_runner.models.heads.medusa import MedusaHeads
from model_runner.training.eagle3 import Eagle3Objective
from model_runner.training.examples import Example
from model_runner.training.hydra import HydraObjective
from model_runner.training.medusa import MedusaObjective
from model_runner.training.objective import Judge, Objective, answer_rows
from model_runner.training.teacher import TargetWeights

SELF_FED_DEPTH = 3
"""Tokens ahead that heads which feed on themselves are judged by and trained for while they serve."""


def depth_of(heads: Heads) -> int:
    """Tokens ahead that they are judged by while they serve."""
    return heads.depth or SELF_FED_DEPTH


def judge_of(heads: Heads, target: TargetWeights, device: torch.device, dtype: torch.dtype) -> Judge:
    """With the tokens that the heads guess from. Products run in `dtype`."""
    ids = torch.arange(target.shape.vocab_size) if heads.draft_ids is None else heads.draft_ids.clone()
    return Judge(target, ids, device, dtype)


def objective_of(
    heads: Heads,
    target: TargetWeights,
    judge: Judge,
    *,
    sample: Sequence[Example] = (),
    depth: int = SELF_FED_DEPTH,
) -> Objective:
    """The heads, taken over, to be compared or, with a sample of what they will be trained on, to be trained.

    Args:
        heads: of the kind Hydra, Medusa or EAGLE-3.
        target: the two ends of the model.
        judge: see `judge_of`.
        sample: typical of what comes; only Hydra heads want it.
        depth: tokens ahead by which heads that feed on themselves are judged.

    Raises:
        ValueError: for a kind of heads that has no objective.
    """
    if isinstance(heads, HydraHeads):
        rows = answer_rows(sample, heads.needs, judge.device) if sample else None
        return HydraObjective(target, judge, heads, rows)
    if isinstance(heads, MedusaHeads):
        return MedusaObjective(judge, heads)
    if isinstance(heads, Eagle3Heads):
        return Eagle3Objective(target, judge, heads, depth)
    raise ValueError(f"heads of the kind {heads.kind} cannot learn; those of hydra, medusa and eagle3 can")
