"""A step for which there is not enough memory costs at most its largest request, not the others and not the engine."""

from typing import Any

import pytest
import torch
from torch import Tensor

from model_runner.batch import Batch
from scheduler.interface import EngineRequest
from tests.conftest import VOCAB_SIZE
from tests.engine.conftest import GREEDY
from tests.engine.test_oracle import prompts
from tests.gpu.conftest import Load

FITTING = 128
"""Tokens of a step."""
MOST_STEPS = 500


def test_the_largest_request_ends_alone(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = load("llama")
    short = [
        EngineRequest(f"short{index}", prompt, GREEDY, max_tokens=10)
        for index, prompt in enumerate(prompts(4, VOCAB_SIZE, (5, 25), seed=4))
    ]
    large = EngineRequest("large", prompts(1, VOCAB_SIZE, (300, 301), seed=5)[0], GREEDY, max_tokens=10)
    requests = [*short[:2], large, *short[2:]]
    alone = {
        request.request_id: harness.run(harness.engine(), [request])[request.request_id, 0] for request in requests
    }
    target, failures = harness.runner._target, 0
    forward = target.forward

    def limited(batch: Batch, *arguments: Any, **options: Any) -> Tensor:
        nonlocal failures
        if len(batch.tokens) > FITTING:
            failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(batch, *arguments, **options)

    monkeypatch.setattr(target, "forward", limited)
    engine = harness.engine(chunk=512)
    for request in requests:
        engine.add(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    errors, unfinished = {}, set(tokens)
    for _ in range(MOST_STEPS):
        for output in engine.step() if unfinished else ():
            tokens[output.request_id] += output.tokens
            if output.error is not None:
                errors[output.request_id] = output.error
            if output.error is not None or output.finish_reason is not None:
                unfinished.discard(output.request_id)
    assert failures > 0
    assert not unfinished
    assert set(errors) <= {"large"}
    for name in set(tokens) - set(errors):
        assert tokens[name] == alone[name].tokens
    engine.check_integrity()
    later = EngineRequest("later", short[0].prompt, GREEDY, max_tokens=10)
    assert harness.run(engine, [later])["later", 0].tokens == alone["short0"].tokens
