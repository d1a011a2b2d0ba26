"""The setup of the learner's process, made from the engine's first message."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from model_runner.heads.base import TargetShape
from model_runner.heads.loading import load_heads
from model_runner.learning.learner import InitialHeads, Learner, Publication, Ring
from model_runner.learning.link import Begin, Piece
from model_runner.learning.plan import check_model, learning_needs, ring_bytes
from model_runner.learning.store import HeadsStore, LearntFormat, Stored, fingerprint
from model_runner.modules.loading import load_config
from model_runner.training.examples import Example
from model_runner.training.loop import product_type
from model_runner.training.teacher import TargetWeights


@dataclass(frozen=True, slots=True)
class Setup:
    """A learner and its environment."""

    learner: Learner
    needs: tuple[str, ...]
    hidden: int
    store: HeadsStore | None
    stored: Stored | None
    """Heads that an earlier run trained."""

    def keep(self, publication: Publication) -> None:
        """Store heads for the next run."""
        if self.store is not None:
            self.store.write(publication.version, publication.checkpoint)

    def example(self, piece: Piece) -> Example:
        """A piece as the trainer needs it. Raises ValueError if it does not match the setup."""
        tokens = np.frombuffer(piece.tokens, dtype=np.int32).astype(np.int64)
        features = {
            name: np.frombuffer(rows, dtype=np.float16).reshape(len(tokens), self.hidden)
            for name, rows in piece.features.items()
        }
        if piece.num_prompt < 1 or features.keys() != set(self.needs):
            raise ValueError(f"a piece has {piece.num_prompt} tokens before its output, and {', '.join(features)}")
        return Example(tokens, piece.num_prompt, piece.temperature, features, piece.start)


def set_up(begin: Begin) -> Setup:
    """Raises ValueError, HeadsError or OSError, with a message for the user, if training is not possible."""
    model = Path(begin.model)
    shape = TargetShape.of(load_config(model))
    first = None if begin.heads is None else load_heads(Path(begin.heads), shape)
    if first is None and begin.kind != "hydra":
        raise ValueError(f"training of {begin.kind} heads needs initial heads; only hydra heads can start fresh")
    if first is not None and first.kind != begin.kind:
        raise ValueError(f"{begin.heads} holds {first.kind} heads, not {begin.kind}")
    ring = Ring(ring_bytes(begin.memory, first, shape))
    check_model(begin.memory, model)
    store = identity = None
    if begin.cache is not None:
        identity = fingerprint(model, begin.kind, None if begin.heads is None else Path(begin.heads), Path(begin.cache))
        store = HeadsStore(Path(begin.cache), identity)
    packer = LearntFormat(shape, identity or "", first)
    stored = None if store is None else store.read(packer.load)
    version = 0 if store is None else store.last_version
    start = InitialHeads(first, None if stored is None else stored.heads, version)
    learner = Learner(TargetWeights.load(model), start, packer, ring, product_type(torch.device("cpu")))
    return Setup(learner, learning_needs(first, shape), shape.hidden, store, stored)
