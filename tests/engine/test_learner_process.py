"""A runner with a real learner process: it uses heads learnt by earlier servers, and works without a learner."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from model_runner.config import RunnerConfig
from model_runner.contract import SamplingParams, Speculation
from model_runner.heads.base import Heads, TargetShape
from model_runner.heads.loading import load_heads
from model_runner.learning import wiring
from model_runner.learning.link import Begin, ProcessLink
from model_runner.learning.store import fingerprint, pack_learnt
from model_runner.modules.loading import load_config
from model_runner.processes import Backoff
from model_runner.runner import ModelRunner
from scheduler.interface import EngineRequest
from tests.engine.conftest import SMALL_VOCAB, Harness
from tests.engine.test_sameness import same
from tests.engine.tiny_heads import write_hydra

AT_ONCE = "from model_runner.learning import process; process.step_aside = lambda: None; process.main()"
"""The learner without its patience: a busy machine would keep it waiting."""
WAIT_S = 120.0


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setattr(wiring, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def config(tiny_model: Callable[..., Path], tmp_path: Path) -> RunnerConfig:
    torch.manual_seed(1)
    heads = write_hydra(tmp_path / "first", SMALL_VOCAB)
    return RunnerConfig(tiny_model("llama", SMALL_VOCAB), kv_cache_gib=0.02, max_num_seqs=8, heads=(heads,), learn=True)


@pytest.fixture
def learnt(config: RunnerConfig, cache: Path, tmp_path: Path) -> bytes:
    """Write an earlier server's files: good heads, and a newer file that is damaged."""
    torch.manual_seed(2)
    target = TargetShape.of(load_config(config.model))
    heads = load_heads(write_hydra(tmp_path / "second", SMALL_VOCAB), target)
    identity = fingerprint(config.model, "hydra", config.heads[0], cache)
    checkpoint = pack_learnt(heads, 4, identity, target.num_layers)
    folder = cache / "learnt" / identity
    folder.mkdir(parents=True)
    (folder / "heads-00000004.safetensors").write_bytes(checkpoint)
    (folder / "heads-00000005.safetensors").write_bytes(checkpoint[:-100])
    return checkpoint


class Learner:
    """Makes the line to a real learner, and waits for what comes along it."""

    link: ProcessLink

    def __init__(self) -> None:
        self._come = threading.Semaphore(0)
        self.checkpoints: list[bytes] = []

    def make_link(self, begin: Begin, prepare: Callable[[bytes], Heads]) -> ProcessLink:
        def listen(checkpoint: bytes) -> Heads:
            self.checkpoints.append(checkpoint)
            self._come.release()
            return prepare(checkpoint)

        self.link = ProcessLink(begin, listen, (sys.executable, "-c", AT_ONCE), Backoff(max_failures=1))
        return self.link

    def wait_heads(self) -> None:
        assert self._come.acquire(timeout=WAIT_S)
        while not self.link._fresh:
            assert self.link.is_open
            os.sched_yield()

    def wait_ended(self) -> None:
        assert self.link._receiver is not None
        self.link._receiver.join(WAIT_S)


@pytest.fixture
def learner() -> Iterator[Learner]:
    learner = Learner()
    yield learner
    learner.link.close()


def requests(speculation: Speculation | None) -> list[EngineRequest]:
    prompts = np.random.default_rng(1).integers(3, SMALL_VOCAB, (4, 20)).tolist()
    sampling = SamplingParams(temperature=0.7, seed=3, logprobs=1)
    return [
        EngineRequest(f"r{index}", tuple(prompt), sampling, 60, speculation=speculation)
        for index, prompt in enumerate(prompts)
    ]


def test_what_was_learnt_is_used_and_a_killed_learner_is_not_missed(
    config: RunnerConfig, learnt: bytes, learner: Learner, caplog: pytest.LogCaptureFixture
) -> None:
    harness = Harness(ModelRunner.load(replace(config, learn=False)))
    expected = harness.run(harness.engine(), requests(None))
    harness = Harness(ModelRunner.load(config, make_link=learner.make_link))
    before = harness.run(harness.engine(), requests(Speculation("hydra", 4)))
    learner.wait_heads()
    assert learner.checkpoints == [learnt]
    assert [one for one in caplog.messages if "Skipping" in one and "heads-00000005" in one]
    after = harness.run(harness.engine(), requests(Speculation("hydra", 4)))
    assert not learner.link._fresh  # they are in use
    assert same(before, expected)
    assert same(after, expected)

    engine = harness.engine()
    for request in requests(Speculation("hydra", 4)):
        engine.add(request)
    outputs = [output for _ in range(10) for output in engine.step()]
    os.kill(learner.link.pid, signal.SIGKILL)
    learner.wait_ended()
    while engine.has_work:
        outputs += engine.step()
    for (name, _), answer in expected.items():
        assert answer.tokens == [token for one in outputs if one.request_id == name for token in one.tokens]
    endings = [one for one in caplog.records if "has ended" in one.getMessage()]
    assert [one.levelno for one in endings] == [logging.WARNING]
    assert "was killed by SIGKILL" in endings[0].getMessage()
