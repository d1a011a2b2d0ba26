"""Divides a learner's memory: training gets what it needs, the ring gets the rest."""

from pathlib import Path

import torch

from model_runner.features import LAST, Feature
from model_runner.heads.base import Heads, TargetShape
from model_runner.heads.hydra import HydraHeads, HydraShape, hydra_features

TRAINED_KINDS = ("hydra", "medusa", "eagle3")
"""Kinds of heads that can be trained."""
FRESH_DEPTH = 3
"""Depth of fresh heads: how many tokens ahead they predict."""
FRESH_DRAFT_VOCAB = 6144
"""Draft vocabulary of fresh heads, the same as of the embedded model's heads."""
BATCH_ROWS = 256
"""Output tokens in a training step."""

_COPIES = 10
"""Copies of the weights in float32: in training, their gradients, Adam's two moments, the mean, three versions to
compare with (in use, previous, first), and two more while a version is packed."""
_LEAST_BATCHES = 8
"""Minimum batches that the ring must hold: some of its tokens belong to prompts, and batches need variety."""
_GRANULE = 1 << 20


class LearnMemoryError(ValueError):
    """The memory is too small for training; the message says what to do."""


def learning_needs(heads: Heads) -> tuple[Feature, ...]:
    """Hidden states that pieces must hold: the heads' inputs, and the input of the target's own head."""
    return tuple(dict.fromkeys((*heads.needs, LAST)))


def weight_bytes(heads: Heads) -> int:
    """Bytes of these heads in float32."""
    return _num_weights(heads) * 4


def training_bytes(heads: Heads, target: TargetShape) -> int:
    """Bytes that training these heads needs in addition to the ring.

    This counts weights, optimizer, versions to compare with, the target's rows of the draft vocabulary, and a step's
    temporaries. It does not count the interpreter with its libraries. The target's embedding and head are memory-mapped
    files, which the system can drop.
    """
    draft_vocab = target.vocab_size if heads.draft_ids is None else len(heads.draft_ids)
    depth = heads.depth or FRESH_DEPTH
    step = BATCH_ROWS * draft_vocab * 4 * (depth + 3)  # gradients of each depth; logits and teacher of one
    return weight_bytes(heads) * _COPIES + draft_vocab * target.hidden * 4 + step


def ring_bytes(memory: int, heads: Heads, target: TargetShape) -> int:
    """The bytes that training these heads leaves for the ring.

    Raises:
        LearnMemoryError: if that is too little to train.
    """
    training = training_bytes(heads, target)
    per_token = len(learning_needs(heads)) * target.hidden * 2 + 8
    least = _LEAST_BATCHES * BATCH_ROWS * per_token
    if memory < training + least:
        needed = -(-(training + least) // _GRANULE)
        raise LearnMemoryError(
            f"training heads of {_num_weights(heads):,} weights needs {needed:,} MiB, but only {memory >> 20:,} MiB "
            "are allowed; raise --learn-memory, or serve without --learn"
        )
    return memory - training


def check_model(memory: int, folder: Path) -> None:
    """Raises LearnMemoryError if embedding and head can only be read with the whole model, which does not fit."""
    from model_runner.training.teacher import ends_in_files  # noqa: PLC0415 - imports transformers, which takes seconds

    if not ends_in_files(folder):
        files = [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
        needed = 2 * sum(file.stat().st_size for file in files)  # as float32; files store half of that
        if needed > memory:
            raise LearnMemoryError(
                f"embedding and head of {folder} can only be read with the whole model, which needs "
                f"{-(-needed // _GRANULE):,} MiB; raise --learn-memory, or serve without --learn"
            )


def _num_weights(heads: Heads) -> int:
    return sum(one.numel() for one in heads.parameters())


def fresh_shape(target: TargetShape) -> HydraHeads:
    """The heads that training starts from if there are none, on the meta device: only their shape is real."""
    draft_vocab = min(FRESH_DRAFT_VOCAB, target.vocab_size)
    features = hydra_features(target.num_layers)
    with torch.device("meta"):
        shape = HydraShape(target.hidden, FRESH_DEPTH, 1, draft_vocab, shared_head=True, features=features)
        return HydraHeads(shape, torch.arange(draft_vocab))
