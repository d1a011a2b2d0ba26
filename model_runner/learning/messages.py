"""Messages between the runner and its learner, pickled, as it is a process of our own. Imports no torch.

Either end is a `multiprocessing.connection.Connection`, whose `send_bytes` and `recv_bytes` keep messages apart. The
first message to a new learner is `Begin`. It ends when its connection is closed.
"""

import pickle
from dataclasses import dataclass
from typing import Literal

EXIT_IMPOSSIBLE = 65
"""Exit code of a learner that would end in the same way if it was started again."""
LearnedKind = Literal["hydra", "medusa", "eagle3"]
"""Heads for which there is an objective."""


@dataclass(frozen=True, slots=True)
class Begin:
    """What to learn, and with what."""

    model: str
    """The target's folder."""
    kind: LearnedKind
    heads: str | None
    """The folder of the heads to go on from; None begins with fresh ones, which only `hydra` can."""
    cache: str | None
    """The folder under which learnt heads are kept; None keeps none."""
    threads: int
    memory: int
    """Bytes that features, weights in training and the versions to compare with may take together."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of one choice, all of which the target has computed.

    Row t of a feature belongs to tokens[t] and is what tokens[t + 1] is guessed from. So tokens[num_prompt:] are what
    is learnt from, and the rows before them are what came before: num_prompt is at least 1, and exactly 1 where a piece
    begins within the output.
    """

    start: int
    """The position of the first token in its sequence."""
    num_prompt: int
    temperature: float
    tokens: bytes
    """[T] int32"""
    features: dict[str, bytes]
    """By name (models/features.py), each [T, hidden] float16, clipped to its range."""


@dataclass(frozen=True, slots=True)
class NewHeads:
    """Heads to be used from now on."""

    version: int
    """Greater than that of all before; the heads that the engine began with are version 0."""
    checkpoint: bytes
    """For `checkpoint.load_learnt`."""


@dataclass(frozen=True, slots=True)
class LearnerReport:
    """Where learning is. Sent after a training step, at most once a second."""

    version: int
    """Of the heads in use."""
    steps: int
    """Of training, since the process began."""
    tokens: int
    """Of output that were taken in."""
    held: int
    """Tokens that can be trained on now."""
    published: int
    """Versions that were found better; those of earlier runs do not count."""
    rolled_back: int
    """Times that an older version was found better again."""
    first: float | None
    """Tokens per step that the engine's first heads would give on what came in lately: expected of a chain of first
    guesses, the target's own token included. None before anything was judged."""
    current: float | None
    """The same of the heads in use."""


@dataclass(frozen=True, slots=True)
class LearnerNote:
    """A line for the log: the engine's process knows where and how it is written."""

    level: int
    """As `logging` has them."""
    text: str


ToLearner = Begin | Piece
FromLearner = NewHeads | LearnerReport | LearnerNote


def encode(message: ToLearner | FromLearner) -> bytes:
    """A message as it is sent."""
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def decode_to_learner(sent: bytes) -> ToLearner:
    """A message that the learner got. Raises what pickle does, or TypeError for anything else."""
    message = pickle.loads(sent)
    if not isinstance(message, ToLearner):
        raise TypeError(f"{type(message).__name__} is no message to a learner")
    return message


def decode_from_learner(sent: bytes) -> FromLearner:
    """A message of the learner. Raises what pickle does, or TypeError for anything else."""
    message = pickle.loads(sent)
    if not isinstance(message, FromLearner):
        raise TypeError(f"{type(message).__name__} is no message of a learner")
    return message
