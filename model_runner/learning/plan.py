"""How a learner's memory is divided: what training takes, and the ring, which gets the rest."""

from pathlib import Path

import torch

from model_runner.models.features import LAST, Feature
from model_runner.models.heads.base import Heads, TargetShape
from model_runner.models.heads.hydra import HydraHeads, HydraShape, hydra_features
from model_runner.training.teacher import ends_in_files

FRESH_DEPTH = 3
"""Tokens ahead that heads guess that begin with nothing, ..."""
FRESH_DRAFT_VOCAB = 6144
"""... and the tokens that they guess from: as the heads that come with the embedded model."""
BATCH_ROWS = 256
"""Tokens of output in a training step."""

_COPIES = 10
"""Of the weights in float32: in training with their gradients, Adam's two moments and their mean, the versions that
they are compared with (in use, the one before, the first), and twice as much for a moment when a version is packed."""
_LEAST_BATCHES = 8
"""That the ring must hold: some of the tokens in it are of prompts, and there has to be a choice."""
_GRANULE = 1 << 20


class LearnMemoryError(ValueError):
    """Learning does not fit into its memory; the message says what to do."""


def learning_needs(heads: Heads | None, target: TargetShape) -> tuple[Feature, ...]:
    """The hidden states that pieces must hold: what the heads take, and what the target's own guesses follow from.

    None are heads that begin with nothing.
    """
    taken = hydra_features(target.num_layers) if heads is None else heads.needs
    return tuple(dict.fromkeys((*taken, LAST)))


def weight_bytes(heads: Heads | None, target: TargetShape) -> int:
    """Of these heads, or of fresh ones, in float32."""
    return _num_weights(_fresh_on_meta(target) if heads is None else heads) * 4


def training_bytes(heads: Heads | None, target: TargetShape) -> int:
    """What training takes of these heads, or of fresh ones, beside the ring.

    Counted are weights, optimizer, versions to compare with, the target's rows over the draft vocabulary and what a
    step computes; not the interpreter with its libraries. The target's two ends are parts of its files that the system
    reads when they are asked for, and may drop again.
    """
    shape = _fresh_on_meta(target) if heads is None else heads
    draft_vocab = target.vocab_size if shape.draft_ids is None else len(shape.draft_ids)
    depth = shape.depth or FRESH_DEPTH
    step = BATCH_ROWS * draft_vocab * 4 * (depth + 3)  # a gradient for each depth; the logits and teacher's of one
    return weight_bytes(shape, target) * _COPIES + draft_vocab * target.hidden * 4 + step


def ring_bytes(memory: int, heads: Heads | None, target: TargetShape) -> int:
    """What of `memory` bytes is left for the ring beside the training of these heads, or of fresh ones.

    Raises:
        LearnMemoryError: if that is too little to learn from.
    """
    shape = _fresh_on_meta(target) if heads is None else heads
    training = training_bytes(shape, target)
    per_token = len(learning_needs(heads, target)) * target.hidden * 2 + 8
    least = _LEAST_BATCHES * BATCH_ROWS * per_token
    if memory < training + least:
        needed = -(-(training + least) // _GRANULE)
        raise LearnMemoryError(
            f"heads of {_num_weights(shape):,} weights cannot learn in {memory >> 20:,} MiB, they need {needed:,} MiB: "
            f"raise --learn-memory, or serve without --learn"
        )
    return memory - training


def check_model(memory: int, folder: Path) -> None:
    """Raises LearnMemoryError if the whole model must be read to find its two ends, and does not fit."""
    if not ends_in_files(folder):
        files = [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
        needed = 2 * sum(file.stat().st_size for file in files)  # as float32, where they are stored in half of that
        if needed > memory:
            raise LearnMemoryError(
                f"the embedding and the head of {folder} cannot be read without the rest of the model, for which "
                f"{-(-needed // _GRANULE):,} MiB are needed: raise --learn-memory, or serve without --learn"
            )


def _num_weights(heads: Heads) -> int:
    return sum(one.numel() for one in heads.parameters())


def _fresh_on_meta(target: TargetShape) -> HydraHeads:
    """Heads without content."""
    draft_vocab = min(FRESH_DRAFT_VOCAB, target.vocab_size)
    features = hydra_features(target.num_layers)
    with torch.device("meta"):
        shape = HydraShape(target.hidden, FRESH_DEPTH, 1, draft_vocab, shared_head=True, features=features)
        return HydraHeads(shape, torch.arange(draft_vocab))
