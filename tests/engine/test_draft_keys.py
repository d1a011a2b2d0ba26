"""A drafter attends to keys and values of the current tokens, even if blocks were used by others before."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from model_runner.batch import Batch
from model_runner.config import RunnerConfig
from model_runner.contract import SamplingParams, Speculation
from model_runner.runner import ModelRunner
from model_runner.speculative.draft_model import DraftModelProposer
from model_runner.target import TargetModel
from scheduler.engine import Engine
from scheduler.interface import EngineRequest
from tests.engine.conftest import SMALL_VOCAB, Harness

GREEDY = SamplingParams(temperature=0.0)
DRAFTING = Speculation("draft_model", 4)
NUM_FULL = 3
"""Blocks that a prompt fills."""


@dataclass
class Listener:
    """Stands in for a draft model, and keeps what it says."""

    model: TargetModel
    logits: list[torch.Tensor] = field(default_factory=list)
    num_computed: int = 0
    sizes: list[int] = field(default_factory=list)

    def forward(self, batch: Batch) -> torch.Tensor:
        logits = self.model.forward(batch)
        self.num_computed += len(batch.tokens)
        self.sizes.append(len(batch.tokens))
        self.logits.append(logits.clone())
        return logits


@pytest.fixture(scope="module")
def harness(tiny_model: Callable[..., Path]) -> Iterator[Harness]:
    config = RunnerConfig(
        model=tiny_model("llama", SMALL_VOCAB),
        draft_model=tiny_model("qwen3", SMALL_VOCAB),
        kv_cache_gib=0.02,
        max_num_seqs=4,
    )
    harness = Harness(ModelRunner.load(config))
    yield harness
    harness.forget()


@pytest.fixture
def listener(harness: Harness) -> Iterator[Listener]:
    proposer = harness.runner._speculator._proposers["draft_model"]
    assert isinstance(proposer, DraftModelProposer)
    listener = Listener(proposer._model)
    proposer._model = listener  # type: ignore[assignment]
    yield listener
    proposer._model = listener.model


@dataclass
class Blocks:
    """As many blocks as one request fills with prompt and output, which go from one to the next."""

    harness: Harness
    engine: Engine = field(init=False)

    def __post_init__(self) -> None:
        self.engine = self.harness.engine(num_blocks=NUM_FULL + 1)

    def prompt(self, seed: int) -> tuple[int, ...]:
        """Fills NUM_FULL blocks and a part of the next."""
        length = NUM_FULL * self.harness.runner.info.block_size + 3
        return tuple(np.random.default_rng(seed).integers(3, SMALL_VOCAB, size=length).tolist())

    def run(self, seed: int, speculation: Speculation | None, engine: Engine | None = None) -> int:
        """One request to its end; returns how much of its prompt was found."""
        prompt = self.prompt(seed)
        max_tokens = (NUM_FULL + 1) * self.harness.runner.info.block_size - len(prompt)
        request = EngineRequest(str(seed), prompt, GREEDY, max_tokens, speculation=speculation)
        (answer,) = self.harness.run(engine or self.engine, [request]).values()
        return answer.num_cached


@pytest.mark.parametrize("between", [None, Speculation("suffix", 4), Speculation("draft_model", 0)], ids=str)
def test_keys_of_a_block_do_not_outlive_its_tokens(
    harness: Harness, listener: Listener, between: Speculation | None
) -> None:
    """A request that does not draft takes over the blocks of one that does, and a third goes on from its tokens."""
    blocks = Blocks(harness)
    fresh, again = listener.logits, Listener(listener.model)
    blocks.run(1, DRAFTING, harness.engine(prefix_caching=False))
    harness.forget()
    listener.logits = again.logits
    blocks.run(0, DRAFTING)
    blocks.run(1, between)
    again.logits.clear()
    assert blocks.run(1, DRAFTING) == NUM_FULL * harness.runner.info.block_size
    assert len(fresh) == len(again.logits) > 2
    assert all(torch.equal(one, other) for one, other in zip(fresh, again.logits, strict=True))


def test_keys_that_are_there_are_not_computed_again(harness: Harness, listener: Listener) -> None:
    blocks = Blocks(harness)
    num_computed = []
    for _ in range(2):
        listener.num_computed = 0
        blocks.run(2, DRAFTING)
        num_computed.append(listener.num_computed)
    assert num_computed[0] - num_computed[1] == NUM_FULL * harness.runner.info.block_size


def test_a_drafter_catches_up_in_steps(harness: Harness, listener: Listener) -> None:
    """A long prompt takes no more memory than is planned for a step, and drafts begin once all of it was computed."""
    most = harness.runner.info.max_num_batched_tokens
    prompt = tuple(np.random.default_rng(5).integers(3, SMALL_VOCAB, size=most + 300).tolist())
    request = EngineRequest("long", prompt, GREEDY, 30, speculation=DRAFTING)
    (drafted,) = harness.run(harness.engine(prefix_caching=False), [request]).values()
    assert listener.sizes[0] == most
    assert listener.sizes[1] in range(300, most)
    assert drafted.num_accepted + drafted.num_rejected > 0
    (alone,) = harness.run(harness.engine(prefix_caching=False), [replace(request, speculation=None)]).values()
    assert drafted.tokens == alone.tokens
