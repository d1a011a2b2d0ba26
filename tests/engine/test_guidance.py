"""Classifier-free guidance against transformers' implementation, and together with other requests."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from model_runner.contract import SamplingParams, Speculation
from scheduler.interface import ChoiceState, EngineRequest
from tests.engine.conftest import SMALL_VOCAB, Harness

GREEDY = SamplingParams(temperature=0.0, logprobs=2)


def guided(name: str, pick: random.Random, scale: float, vocab_size: int = 320, **changes: object) -> EngineRequest:
    """Prompt and guide of different lengths."""
    prompt, guide = (tuple(pick.randrange(3, vocab_size) for _ in range(pick.randint(1, 70))) for _ in range(2))
    request = EngineRequest(name, prompt, replace(GREEDY, guidance=scale), 14, guide=guide)
    return replace(request, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [0.5, 1.5, 4.0])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_tokens_are_those_of_generate(
    family: str, scale: float, load: Callable[..., Harness], tiny_model: Callable[..., Path]
) -> None:
    pick = random.Random(7)
    requests = [guided(f"{number}", pick, scale) for number in range(3)]
    harness = load(family, "none")
    answers = harness.run(harness.engine(), requests)
    model = AutoModelForCausalLM.from_pretrained(tiny_model(family), dtype=torch.float32)
    changed = 0
    for request in requests:
        prompt, guide = torch.tensor([request.prompt]), torch.tensor([request.guide])
        expected = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=request.max_tokens,
            do_sample=False,
            guidance_scale=scale,
            negative_prompt_ids=guide,
            negative_prompt_attention_mask=torch.ones_like(guide),
        )
        tokens = expected[0, len(request.prompt) :].tolist()
        got = answers[request.request_id, 0].tokens
        assert got[: len(tokens)] == tokens  # generate() ends with the end of a sequence
        plain = replace(request, request_id=f"plain-{request.request_id}", sampling=GREEDY, guide=())
        changed += harness.run(harness.engine(), [plain])[plain.request_id, 0].tokens != got
    assert changed


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_alone_in_a_crowd_in_chunks_preempted_and_resumed(quantization: str, load: Callable[..., Harness]) -> None:
    pick = random.Random(3)
    harness = load("llama", quantization)
    drawn = SamplingParams(seed=5, top_p=0.9, frequency_penalty=0.5, logprobs=1, guidance=2.0)
    two = (ChoiceState(0), ChoiceState(1))
    requests = [
        guided("greedy", pick, 1.5),
        guided("drawn", pick, 2.0, sampling=drawn, choices=two),
        guided("prompt", pick, 0.5, sampling=replace(drawn, prompt_logprobs=1)),
        *(guided(f"plain-{index}", pick, 1.0, sampling=SamplingParams(seed=index), guide=()) for index in range(8)),
    ]
    together = harness.run(harness.engine(), requests)
    for request in requests:
        alone = harness.run(harness.engine(), [request])
        assert all(alone[key].tokens == together[key].tokens for key in alone)
        assert all(alone[key].logprobs == together[key].logprobs for key in alone)
    small = harness.run(harness.engine(chunk=9, prefix_caching=False), requests[:3])
    scarce = harness.engine(num_blocks=12)
    preempted = harness.run(scarce, requests)
    assert scarce.stats().preemptions > 0
    for key, answer in small.items():
        assert answer.tokens == together[key].tokens
        assert answer.logprobs == preempted[key].logprobs == together[key].logprobs
    output = tuple(together["greedy", 0].tokens)
    resumed = replace(requests[0], choices=(ChoiceState(0, output[:5]),))
    assert harness.run(harness.engine(), [resumed])["greedy", 0].tokens == list(output)


def test_drafts_change_nothing(load: Callable[..., Harness]) -> None:
    pick = random.Random(11)
    harness = load("llama", "none", SMALL_VOCAB)
    plain = [guided(f"{number}", pick, 1.5, SMALL_VOCAB, max_tokens=40) for number in range(4)]
    expected = harness.run(harness.engine(), plain)
    accepted = 0
    for method in ("suffix", "lookahead"):
        requests = [replace(request, speculation=Speculation(method, 4)) for request in plain]
        answers = harness.run(harness.engine(), requests)
        for key, answer in answers.items():
            assert (answer.tokens, answer.logprobs) == (expected[key].tokens, expected[key].logprobs)
            accepted += answer.num_accepted
    assert accepted > 20
