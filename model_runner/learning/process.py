"""The learner's process, `python -P -m model_runner.learning.process`, started by the engine.

It takes only what the processor has to spare: the operating system runs it when nothing else wants to run, so that it
needs no notion of load. It reads pieces from its connection, trains while there is something to learn, sleeps when
there is not, and ends when the connection is closed or the engine dies. Importing the module costs no torch: its
threads shall inherit what `step_aside` sets.
"""

import argparse
import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from model_runner.learning.learner import Learner, Publication, Ring, Start
from model_runner.learning.link import (
    EXIT_IMPOSSIBLE,
    Begin,
    FromLearner,
    LearnerNote,
    LearnerReport,
    NewHeads,
    Piece,
    decode_to_learner,
    encode,
)
from model_runner.learning.plan import check_model, learning_needs, ring_bytes
from model_runner.learning.store import HeadsStore, Stored, fingerprint, load_learnt, pack_learnt
from model_runner.models.heads.base import Heads, HeadsError, TargetShape
from model_runner.models.heads.loading import load_heads
from model_runner.models.loading import load_config
from model_runner.processes import die_with_parent
from model_runner.training.examples import Example
from model_runner.training.loop import product_type
from model_runner.training.teacher import TargetWeights

if TYPE_CHECKING:
    from model_runner.learning.learner import Learner
    from model_runner.training.examples import Example


@dataclass(frozen=True, slots=True)
class LearntFormat:
    """Packs and unpacks heads for one target. Implements Packer."""

    target: TargetShape
    identity: str
    """What `fingerprint` returned; empty where nothing is kept."""
    first: Heads | None

    def pack(self, heads: Heads, version: int) -> bytes:
        """See Packer."""
        return pack_learnt(heads, version, self.identity, self.target.num_layers)

    def load(self, checkpoint: bytes) -> Heads:
        """See Packer. Raises HeadsError, too, for heads that take something else than the first ones."""
        heads = load_learnt(checkpoint, self.target)
        kind = "hydra" if self.first is None else self.first.kind
        needs = learning_needs(self.first, self.target)
        if heads.kind != kind or learning_needs(heads, self.target) != needs:
            raise HeadsError(f"it holds {heads.kind} heads on {', '.join(heads.needs)}; {kind} heads were expected")
        if self.first is not None and heads.depth != self.first.depth:
            raise HeadsError(f"its heads guess {heads.depth} tokens ahead, the first ones {self.first.depth}")
        return heads


@dataclass(frozen=True, slots=True)
class Setup:
    """A learner, and what is around it."""

    learner: Learner
    needs: tuple[str, ...]
    hidden: int
    store: HeadsStore | None
    stored: Stored | None
    """What an earlier run has learnt."""

    def keep(self, publication: Publication) -> None:
        """For the next run."""
        if self.store is not None:
            self.store.write(publication.version, publication.checkpoint)

    def example(self, piece: Piece) -> Example:
        """A piece as the trainer takes it. Raises ValueError if it is not what was agreed."""
        tokens = np.frombuffer(piece.tokens, dtype=np.int32).astype(np.int64)
        features = {
            name: np.frombuffer(rows, dtype=np.float16).reshape(len(tokens), self.hidden)
            for name, rows in piece.features.items()
        }
        if piece.num_prompt < 1 or features.keys() != set(self.needs):
            raise ValueError(f"a piece has {piece.num_prompt} tokens before its output, and {', '.join(features)}")
        return Example(tokens, piece.num_prompt, piece.temperature, features, piece.start)


def set_up(begin: Begin) -> Setup:
    """Raises ValueError, HeadsError or OSError, in words for the user, if there can be no learning."""
    model = Path(begin.model)
    shape = TargetShape.of(load_config(model))
    first = None if begin.heads is None else load_heads(Path(begin.heads), shape)
    if first is None and begin.kind != "hydra":
        raise ValueError(f"{begin.kind} heads have to be given to go on from; without any, hydra heads are learnt")
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
    start = Start(first, None if stored is None else stored.heads, version)
    learner = Learner(TargetWeights.load(model), start, packer, ring, product_type(torch.device("cpu")))
    return Setup(learner, learning_needs(first, shape), shape.hidden, store, stored)


logger = logging.getLogger("samewise.learning")

REPORT_EVERY_S = 1.0
_ROWS_AT_ONCE = 512
"""Tokens of output that are tested before the next training step: as many as that step has."""
_M_MMAP_THRESHOLD, _MMAP_THRESHOLD = -3, 1 << 20
"""malloc.h, and the bytes from which on an allocation goes back to the system when it is freed."""
_OOM_SCORE = "1000"
"""Should memory run out, let the system end this process first."""


def step_aside() -> None:
    """Leave the processor to everyone else, and the terminal's signals to the engine."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(19)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)


def prepare_torch(threads: int) -> None:
    """To be called before torch is imported. Threads without work sleep; a GPU is left alone.

    Batches are of ever new sizes. By default malloc would soon keep their tensors for itself, in pieces too small for
    the next ones, and oneDNN the code that it compiles for each size, until the process held twice what it uses.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)
    os.environ |= {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "CUDA_VISIBLE_DEVICES": "",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
    }
    import torch  # noqa: PLC0415

    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)  # moments of rows without gradients decay to where arithmetic is slow


def run(connection: Connection, begin: Begin) -> None:
    """Learn until the connection is closed; raises EOFError or ConnectionError then.

    Raises ValueError, HeadsError or OSError, in words for the user, if there can be no learning.
    """
    from model_runner.learning.process import set_up  # noqa: PLC0415  (brings torch)

    setup = set_up(begin)
    if setup.stored is not None:
        connection.send_bytes(encode(NewHeads(setup.stored.version, setup.stored.checkpoint)))
    try:
        _learn(connection, setup)
    finally:
        last = setup.learner.decide(is_last=True)
        if last is not None:
            setup.keep(last)


def _learn(connection: Connection, setup: "Setup") -> None:
    learner, reported = setup.learner, 0.0
    while True:
        learner.take(_receive(connection, setup, wait=not learner.has_work))
        if learner.has_work:
            learner.train()
        publication = learner.decide()
        if publication is not None:
            connection.send_bytes(encode(NewHeads(publication.version, publication.checkpoint)))
            setup.keep(publication)
        if publication is not None or time.monotonic() - reported >= REPORT_EVERY_S or not learner.has_work:
            connection.send_bytes(encode(_report(learner)))
            reported = time.monotonic()


def _receive(connection: Connection, setup: "Setup", *, wait: bool) -> list["Example"]:
    """The pieces that are there, up to a number of tokens; with `wait`, at least one."""
    pieces: list[Example] = []
    while sum(piece.num_answer for piece in pieces) < _ROWS_AT_ONCE and (wait or connection.poll()):
        message = decode_to_learner(connection.recv_bytes())
        if isinstance(message, Piece):
            pieces.append(setup.example(message))
        wait = False
    return pieces


def _report(learner: "Learner") -> LearnerReport:
    return LearnerReport(
        version=learner.version,
        steps=learner.steps,
        tokens=learner.tokens,
        held=learner.held,
        published=learner.published,
        rolled_back=learner.rolled_back,
        first=learner.first,
        current=learner.current,
    )


class _ToEngine(logging.Handler):
    """Sends lines of the log to the engine, which knows where they go."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(logging.INFO)
        self._connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        """An engine that is gone reads no log."""
        note: FromLearner = LearnerNote(record.levelno, record.getMessage())
        with contextlib.suppress(OSError):
            self._connection.send_bytes(encode(note))


@contextmanager
def _logged(connection: Connection) -> Iterator[None]:
    """What goes wrong is told in a line; a fault of our own leaves its traceback on the error output as well."""
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(_ToEngine(connection))
    try:
        yield
    except (EOFError, ConnectionError):
        pass
    except (ValueError, OSError) as error:
        logger.error("learning is not possible: %s", error)
        raise SystemExit(EXIT_IMPOSSIBLE) from error
    except Exception as error:
        logger.error("learning has failed: %s: %s", type(error).__name__, error)
        raise


def main() -> None:
    """Learn from the `Begin` that comes first to the end of the connection."""
    parser = argparse.ArgumentParser(description="Trains draft heads on a server's traffic; started by the server.")
    parser.add_argument("--connection", required=True, type=int, help="descriptor of the socket to the engine")
    parser.add_argument("--parent", required=True, type=int, help="process id of the engine")
    arguments = parser.parse_args()
    die_with_parent()
    step_aside()
    if os.getppid() != arguments.parent:
        sys.exit(0)
    with Connection(arguments.connection) as connection, _logged(connection):
        begin = decode_to_learner(connection.recv_bytes())
        if not isinstance(begin, Begin):
            raise ValueError("the first message names nothing to learn")
        prepare_torch(begin.threads)
        run(connection, begin)


if __name__ == "__main__":
    main()
