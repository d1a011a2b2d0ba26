"""A process that replaces the learner and behaves as its first argument says; options are the real one's."""

import argparse
import os
import signal
import time
from multiprocessing.connection import Connection

from model_runner.learning.link import (
    EXIT_IMPOSSIBLE,
    Begin,
    LearnerNote,
    LearnerReport,
    NewHeads,
    Piece,
    decode_to_learner,
    encode,
)
from model_runner.processes import die_with_parent

HEADS = 3
"""Versions that `heads` sends."""
BIG = 32 << 20
"""Bytes that no socket takes at once."""


def report(tokens: int) -> bytes:
    return encode(LearnerReport(HEADS, 5, tokens, tokens, 2, 1, 1.5, None))


def learn(mode: str, connection: Connection) -> None:
    """Returns when it has done what the mode is for."""
    begin = decode_to_learner(connection.recv_bytes())
    assert isinstance(begin, Begin)
    if mode == "heads":
        connection.send_bytes(encode(LearnerNote(30, f"begun with {begin.kind}")))
        for version in range(1, HEADS + 1):
            connection.send_bytes(encode(NewHeads(version, b"%d" % version)))
        num_tokens = 0
        while True:
            piece = decode_to_learner(connection.recv_bytes())
            assert isinstance(piece, Piece)
            num_tokens += len(piece.tokens) // 4
            connection.send_bytes(report(num_tokens))
    elif mode == "dies-sending":
        heads = encode(NewHeads(1, bytes(BIG)))
        os.write(connection.fileno(), len(heads).to_bytes(4, "big") + heads[:100_000])
        os.kill(os.getpid(), signal.SIGKILL)
    elif mode == "dies-receiving":
        connection.send_bytes(report(1))
        os.read(connection.fileno(), 10_000)  # of a piece that is on its way
        os.kill(os.getpid(), signal.SIGKILL)
    elif mode == "says-nonsense":
        connection.send_bytes(b"nonsense")
        time.sleep(600)
    elif mode == "deaf":
        connection.send_bytes(report(0))
        time.sleep(600)
    elif mode == "fails":
        os._exit(3)  # the connection closes with the process, however long an orderly end takes on a busy machine
    elif mode == "cannot":
        os._exit(EXIT_IMPOSSIBLE)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode")
    parser.add_argument("--connection", type=int)
    parser.add_argument("--parent", type=int)
    arguments = parser.parse_args()
    die_with_parent()
    with Connection(arguments.connection) as connection:
        learn(arguments.mode, connection)


if __name__ == "__main__":
    main()
