"""A process that replaces the learner and behaves as its first argument says."""

import os
import pickle
import signal
import sys
import time
from multiprocessing.connection import Connection

from model_runner.heads.base import Example
from model_runner.learning.link import EXIT_IMPOSSIBLE, Begin, LearnerNote, NewHeads
from model_runner.processes import connect_to_parent
from model_runner.runner_interface import LearningStats

HEADS = 3
"""Versions that `heads` sends."""
BIG = 32 << 20
"""Bytes that no socket takes at once."""


def report(tokens: int) -> LearningStats:
    return LearningStats(tokens, 0, 5, 2, 1, 1.5, None)


def learn(mode: str, connection: Connection) -> None:
    """Returns when it has done what the mode is for."""
    begin = connection.recv()
    assert isinstance(begin, Begin)
    if mode == "heads":
        connection.send(LearnerNote(30, f"begun with {begin.kind}"))
        for version in range(1, HEADS + 1):
            connection.send(NewHeads(version, b"%d" % version))
        num_tokens = 0
        while True:
            piece = connection.recv()
            assert isinstance(piece, Example)
            num_tokens += len(piece.tokens)
            connection.send(report(num_tokens))
    elif mode == "dies-sending":
        heads = pickle.dumps(NewHeads(1, bytes(BIG)))
        os.write(connection.fileno(), len(heads).to_bytes(4, "big") + heads[:100_000])
        os.kill(os.getpid(), signal.SIGKILL)
    elif mode == "dies-receiving":
        connection.send(report(1))
        os.read(connection.fileno(), 10_000)  # of a piece that is on its way
        os.kill(os.getpid(), signal.SIGKILL)
    elif mode == "says-nonsense":
        connection.send_bytes(b"nonsense")
        time.sleep(600)
    elif mode == "deaf":
        connection.send(report(0))
        time.sleep(600)
    elif mode == "fails":
        os._exit(3)  # the connection closes with the process, however long an orderly end takes on a busy machine
    elif mode == "cannot":
        os._exit(EXIT_IMPOSSIBLE)


def main() -> None:
    with connect_to_parent() as connection:
        learn(sys.argv[1], connection)


if __name__ == "__main__":
    main()
