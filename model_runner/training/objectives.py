"""Objectives and judges for all kinds of heads that can be trained."""

from collections.abc import Sequence

import torch

from model_runner.heads.base import Heads
from model_runner.heads.eagle3 import Eagle3Heads
from model_runner.heads.hydra import HydraHeads
from model_runner.heads.medusa import MedusaHeads
from model_runner.training.eagle3 import Eagle3Objective
from model_runner.training.examples import Example
from model_runner.training.hydra import HydraObjective
from model_runner.training.medusa import MedusaObjective
from model_runner.training.objective import Judge, Objective, answer_rows
from model_runner.training.teacher import TargetWeights

SELF_FED_DEPTH = 3
"""Depth at which heads that feed on their own output are judged and trained online."""


def depth_of(heads: Heads) -> int:
    """How many tokens ahead the heads are judged by online."""
    return heads.depth or SELF_FED_DEPTH


def judge_of(heads: Heads, target: TargetWeights, device: torch.device, dtype: torch.dtype) -> Judge:
    """A judge for the heads' draft vocabulary. Products run in `dtype`."""
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
    """The objective for heads, to compare or (with a sample of the training data) to train them; it takes ownership.

    Args:
        heads: Hydra, Medusa or EAGLE-3 heads.
        target: embedding and head of the model.
        judge: from `judge_of`.
        sample: typical training data; only needed for Hydra heads.
        depth: how many tokens ahead heads that feed on their own output are judged.

    Raises:
        ValueError: for a kind of heads without objective.
    """
    if isinstance(heads, HydraHeads):
        rows = answer_rows(sample, heads.needs, judge.device) if sample else None
        return HydraObjective(target, judge, heads, rows)
    if isinstance(heads, MedusaHeads):
        return MedusaObjective(judge, heads)
    if isinstance(heads, Eagle3Heads):
        return Eagle3Objective(target, judge, heads, depth)
    raise ValueError(f"heads of the kind {heads.kind} cannot be trained, only hydra, medusa and eagle3")
