"""The learner's process, `model_runner.learning.process`, started by the engine.

It runs only when the processor is otherwise idle: the operating system schedules it last, so it needs no measure of
load. It reads pieces from its connection, trains while that is useful, sleeps otherwise, and ends when the connection
is closed or the engine dies. Importing this module must not import torch, whose threads have to inherit the settings of
`step_aside`.
"""

import contextlib
import ctypes
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from model_runner.learning.link import EXIT_IMPOSSIBLE, Begin, LearnerNote
from model_runner.processes import connect_to_parent

if TYPE_CHECKING:
    from model_runner.heads.base import Example
    from model_runner.learning.learner import Learner


logger = logging.getLogger("samewise.learning")

REPORT_EVERY_S = 1.0
_ROWS_AT_ONCE = 512
"""Output tokens that are tested before the next training step: as many as a step trains on."""
_M_MMAP_THRESHOLD, _MMAP_THRESHOLD = -3, 1 << 20
"""Option number from malloc.h, and the size from which freed memory returns to the system."""
_OOM_SCORE = "1000"
"""If memory runs out, the system should end this process first."""


def step_aside() -> None:
    """Run only when the processor is idle."""
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(19)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)


def prepare_torch(threads: int) -> None:
    """Call before torch is imported. Idle threads sleep, and GPUs are not used.

    Batch sizes vary. By default, malloc would keep their tensors in fragments too small for the next ones, and oneDNN
    would keep code for each size. The process would then hold twice the memory that it uses.
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

    from model_runner.kernels.vector_math import prepare_vector_math  # noqa: PLC0415

    prepare_vector_math()
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)  # Adam's moments of rows without gradients become subnormal, which is slow


def run(connection: Connection, begin: Begin) -> None:
    """Train until the connection is closed; then raises EOFError or ConnectionError.

    Raises ValueError, HeadsError or OSError, with a message for the user, if training is not possible.
    """
    from model_runner.learning.learner import make_learner  # noqa: PLC0415  (brings torch)

    learner = make_learner(begin)
    if learner.restored is not None:
        connection.send(learner.restored)
    try:
        _learn(connection, learner)
    finally:
        learner.decide(is_last=True)


def _learn(connection: Connection, learner: "Learner") -> None:
    reported = 0.0
    while True:
        learner.take(_receive(connection, wait=not learner.has_work))
        if learner.has_work:
            learner.train()
        heads = learner.decide()
        if heads is not None:
            connection.send(heads)
        if heads is not None or time.monotonic() - reported >= REPORT_EVERY_S or not learner.has_work:
            connection.send(learner.stats())
            reported = time.monotonic()


def _receive(connection: Connection, *, wait: bool) -> "list[Example]":
    """The pieces that have arrived, up to a number of tokens; with `wait`, at least one."""
    pieces: list[Example] = []
    while sum(piece.num_answer for piece in pieces) < _ROWS_AT_ONCE and (wait or connection.poll()):
        pieces.append(connection.recv())
        wait = False
    return pieces


class _ToEngine(logging.Handler):
    """Sends log records to the engine, which writes them."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(logging.INFO)
        self._connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        """Send the record, unless the engine is gone."""
        with contextlib.suppress(OSError):
            self._connection.send(LearnerNote(record.levelno, record.getMessage()))


@contextmanager
def _logged(connection: Connection) -> Iterator[None]:
    """Log errors as one line; unexpected ones also print their traceback to standard error."""
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(_ToEngine(connection))
    try:
        yield
    except (EOFError, ConnectionError):
        pass
    except (ValueError, OSError) as error:
        logger.error("Training of heads is not possible: %s", error)
        raise SystemExit(EXIT_IMPOSSIBLE) from error
    except Exception as error:
        logger.error("Training of heads has failed: %s: %s", type(error).__name__, error)
        raise


def main() -> None:
    """Train as the first message, a `Begin`, says, until the connection ends."""
    connected = connect_to_parent()
    step_aside()
    with connected as connection, _logged(connection):
        begin: Begin = connection.recv()
        prepare_torch(begin.threads)
        run(connection, begin)


if __name__ == "__main__":
    main()
