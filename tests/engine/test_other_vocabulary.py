"""A draft model, or one to contrast with, that is filled up to another number of tokens than the model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from model_runner.config import RunnerConfig
from model_runner.contract import Contrastive, SamplingParams, Speculation
from model_runner.runner import ModelRunner
from scheduler.interface import EngineRequest
from tests.engine.conftest import SMALL_VOCAB, Harness

DRAFTING = Speculation("draft_model", 4)
CONTRASTIVE = SamplingParams(seed=3, logprobs=1, contrastive=Contrastive())
EVERY_TOKEN = tuple(range(3, SMALL_VOCAB))


@pytest.mark.parametrize(
    ("size", "quantization"), [(SMALL_VOCAB - 6, "auto"), (2 * SMALL_VOCAB, "none")], ids=["fewer", "more"]
)
def test_tokens_that_one_of_them_lacks_change_no_answer_and_end_no_step(
    size: int, quantization: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny_model("llama", SMALL_VOCAB)
    other = shutil.copytree(tiny_model("qwen3", size), tmp_path / "other")
    shutil.copy(model / "tokenizer.json", other)
    assert json.loads((other / "config.json").read_text())["vocab_size"] == size
    config = RunnerConfig(
        model, draft_model=other, aux_model=other, quantization=quantization, kv_cache_gib=0.02, max_num_seqs=8
    )
    harness = Harness(ModelRunner.load(config), has_aux_model=True)

    def answers(name: str, sampling: SamplingParams, speculation: Speculation | None) -> tuple[list[int], int]:
        request = EngineRequest(name, EVERY_TOKEN * 2, sampling, 24, speculation=speculation)
        (answer,) = harness.run(harness.engine(), [request]).values()
        return answer.tokens, answer.num_accepted + answer.num_rejected

    for name, sampling in {
        "greedy": SamplingParams(temperature=0.0),
        "drawn": SamplingParams(seed=2, logprobs=2),
        "contrastive": CONTRASTIVE,
    }.items():
        plain, _ = answers(name, sampling, None)
        drafted, num_drafts = answers(name, sampling, DRAFTING)
        assert drafted == plain
        assert len(plain) == 24
        assert num_drafts > 0
