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
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from model_runner.learning.messages import (
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
from model_runner.parent import die_with_parent

if TYPE_CHECKING:
    from model_runner.learning.learner import Learner
    from model_runner.learning.startup import Setup
    from model_runner.training.examples import Example

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
    from model_runner.learning.startup import set_up  # noqa: PLC0415  (brings torch)

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
