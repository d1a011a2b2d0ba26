"""The learner's process, over its connection, with a tiny model."""

import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from model_runner.heads.base import Example, TargetShape
from model_runner.learning.learner import make_learner
from model_runner.learning.link import EXIT_IMPOSSIBLE, Begin, LearnerNote, NewHeads
from model_runner.learning.store import load_learnt
from model_runner.modules.loading import load_config
from model_runner.processes import isolated_module, start_connected
from model_runner.refusal import UnsupportedModelError
from model_runner.runner_interface import LearningStats
from model_runner.training.teacher import TargetWeights
from tests.model_runner.learning.traffic import pieces

SUBJECT = list(range(10, 40))
COMMAND = isolated_module("tests.model_runner.learning.quick_learner")


class Learner:
    """The engine's end."""

    def __init__(self, connection: Connection, process: subprocess.Popen[bytes]) -> None:
        self.connection = connection
        self.process = process
        self.notes: list[LearnerNote] = []

    def send(self, piece: Example) -> None:
        self.connection.send(piece)

    def receive(self) -> NewHeads | LearningStats:
        """The next message that is no line of a log."""
        while isinstance(message := self.connection.recv(), LearnerNote):
            self.notes.append(message)
        return message


@contextmanager
def started(begin: Begin) -> Iterator[Learner]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
        process, connection = start_connected(COMMAND)
    with connection:
        connection.send(begin)
        yield Learner(connection, process)
    process.wait()


def begin(model: Path, cache: Path, memory: int = 64 << 20) -> Begin:
    return Begin(str(model), "hydra", None, str(cache), threads=1, memory=memory)


def test_it_learns_ends_and_goes_on_from_what_it_kept(tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    model = tiny_model("llama")
    shape = TargetShape.of(load_config(model))
    target = TargetWeights.load(model)
    heads, reports = list[NewHeads](), list[LearningStats]()
    with started(begin(model, tmp_path)) as learner:
        for number in range(40):
            for piece in pieces(target, SUBJECT, 16, number):
                learner.send(piece)
            if heads:
                break
            while not reports or reports[-1].tokens < 624 * (number + 1):
                message = learner.receive()
                heads += [message] if isinstance(message, NewHeads) else []
                reports += [message] if isinstance(message, LearningStats) else []
        assert heads
    assert learner.process.returncode == 0
    assert [one.version for one in heads] == list(range(1, len(heads) + 1))
    assert load_learnt(heads[-1].checkpoint, shape).kind == "hydra"
    assert any("tokens per step" in note.text for note in learner.notes)
    assert reports[-1].tokens_per_step_first == 1.0

    with started(begin(model, tmp_path)) as again:
        message = again.receive()
        assert isinstance(message, NewHeads)
        assert message.version >= heads[-1].version
        again.send(pieces(target, SUBJECT, 1, 0)[0])
        report = again.receive()
        assert isinstance(report, LearningStats)
        assert report.tokens_per_step_current is not None
        assert report.tokens_per_step_current > 1.0
        again.process.send_signal(signal.SIGTERM)  # the engine says when it is over
        again.send(pieces(target, SUBJECT, 1, 1)[0])
        assert isinstance(again.receive(), LearningStats)
    assert again.process.returncode == 0


def test_what_cannot_be_learnt_is_said_at_the_start(tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    with started(begin(tiny_model("llama"), tmp_path, memory=1 << 20)) as learner:
        with pytest.raises(EOFError):
            learner.receive()
        assert learner.process.wait() == EXIT_IMPOSSIBLE
    (note,) = learner.notes
    assert "--learn-memory" in note.text


def test_what_is_wrong_with_the_model_or_the_heads_is_said(tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(UnsupportedModelError, match="holds no model"):
        make_learner(begin(tmp_path, tmp_path))
    with pytest.raises(ValueError, match=r"training of .* needs initial heads"):
        make_learner(Begin(str(tiny_model("llama")), "medusa", None, str(tmp_path), 1, 64 << 20))
