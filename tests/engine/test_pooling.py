"""Numbers in place of tokens: against transformers' own hidden states, and the same whatever else happens."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from model_runner.contract import Pooling, SamplingParams
from scheduler.interface import EngineRequest
from tests.engine.conftest import Answer, Harness
from tests.engine.test_sameness import make_requests, same

MODELS = [
    ("llama", "int8"),
    ("gemma3", "none"),
    pytest.param(("embedded", "int8"), marks=pytest.mark.embedded),
]
WAYS = [
    Pooling("last", normalizes=True),
    Pooling("mean"),
    Pooling("logits", tokens=(5, 9)),
    Pooling("mean", dimensions=10, normalizes=True),
    Pooling("last", dimensions=7),
]


def asking(requests: Sequence[EngineRequest], name: str = "e") -> list[EngineRequest]:
    """The same prompts, for numbers made of them in every way."""
    return [
        replace(
            request,
            request_id=f"{name}{index}",
            sampling=SamplingParams(pooling=WAYS[index % len(WAYS)]),
            max_tokens=0,
        )
        for index, request in enumerate(requests)
    ]


def vector(answer: Answer) -> np.ndarray:
    return np.frombuffer(answer.pooled, dtype="<f4")


class Case:
    """A model, requests for numbers and for tokens, and what each of them gets alone."""

    def __init__(self, harness: Harness, *, is_small: bool) -> None:
        self.harness = harness
        self.others = make_requests(harness, 4, 6, 60)
        self.requests = asking(make_requests(harness, 5 if is_small else 10, 1, 90 if is_small else 300))
        self.alone: dict[tuple[str, int], Answer] = {}
        for request in [*self.requests, *self.others]:
            self.alone |= harness.run(harness.engine(prefix_caching=False), [request])


@pytest.fixture(scope="module", params=MODELS, ids="-".join)
def case(request: pytest.FixtureRequest, load: Callable[..., Harness]) -> Case:
    return Case(load(*request.param), is_small=request.param[0] == "embedded")


def agrees(answers: dict[tuple[str, int], Answer], case: Case) -> bool:
    return same(answers, case.alone) and all(answer.pooled == case.alone[key].pooled for key, answer in answers.items())


def test_an_answer_is_numbers_and_no_tokens(case: Case) -> None:
    hidden = max(len(vector(answer)) for answer in case.alone.values())
    sizes = [hidden, hidden, 2, 10, 7] * 2
    for request, size in zip(case.requests, sizes, strict=False):
        answer = case.alone[request.request_id, 0]
        assert (answer.tokens, answer.finish_reason) == ([], "length")
        assert len(vector(answer)) == size
        if request.sampling.pooling is not None and request.sampling.pooling.normalizes:
            assert np.linalg.norm(vector(answer)) == pytest.approx(1, abs=1e-6)
    assert not any(case.alone[request.request_id, 0].pooled for request in case.others)


@pytest.mark.parametrize("chunk", [16, 512])
def test_in_a_crowd_at_every_chunk_size(case: Case, chunk: int) -> None:
    mixed = [*case.requests[:3], *case.others, *case.requests[3:]]
    answers = case.harness.run(case.harness.engine(chunk=chunk), mixed)
    assert agrees(answers, case)
    assert not agrees({("e0", 0): answers["e2", 0]}, case)


def test_with_a_warm_prefix_cache(case: Case) -> None:
    engine = case.harness.engine(chunk=64)
    case.harness.run(engine, case.requests)
    again = asking(case.requests, "again")
    answers = case.harness.run(engine, again)
    assert agrees({(name.replace("again", "e"), choice): answer for (name, choice), answer in answers.items()}, case)
    for request in again:
        cached = answers[request.request_id, 0].num_cached
        may_skip = request.sampling.pooling is not None and request.sampling.pooling.by != "mean"
        assert (cached > 0) == (may_skip and len(request.prompt) > case.harness.runner.info.block_size)


def test_under_forced_preemption(case: Case) -> None:
    longest = max(len(request.prompt) + request.max_tokens for request in [*case.requests, *case.others])
    engine = case.harness.engine(chunk=32, num_blocks=longest // case.harness.runner.info.block_size + 4)
    growing = [replace(request, request_id=f"g{index}", max_tokens=60) for index, request in enumerate(case.others)]
    urgent = [replace(request, priority=-1) for request in growing]
    answers = case.harness.run(engine, [*urgent, *case.requests])
    assert engine.stats().preemptions > 0
    assert agrees({(request.request_id, 0): answers[request.request_id, 0] for request in case.requests}, case)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_they_are_those_of_transformers(
    family: str, load: Callable[..., Harness], tiny_model: Callable[[str], Path]
) -> None:
    harness = load(family, "none")
    requests = asking(make_requests(harness, 10, 1, 200))
    answers = harness.run(harness.engine(chunk=64), requests)
    model = AutoModelForCausalLM.from_pretrained(tiny_model(family), dtype=torch.float32)
    for request in requests:
        with torch.inference_mode():
            output = model(torch.tensor([request.prompt]), output_hidden_states=True)
        expected = pooled(output.hidden_states[-1][0], output.logits[0, -1], request.sampling.pooling)
        np.testing.assert_allclose(vector(answers[request.request_id, 0]), expected, rtol=2e-3, atol=2e-3)


def pooled(hidden: torch.Tensor, logits: torch.Tensor, pooling: Pooling | None) -> np.ndarray:
    assert pooling is not None
    made = {"last": hidden[-1], "mean": hidden.mean(0), "logits": logits[list(pooling.tokens)]}[pooling.by]
    kept = made[: pooling.dimensions]
    return (torch.nn.functional.normalize(kept, dim=0) if pooling.normalizes else kept).numpy()


def test_int8_weights_hardly_turn_a_vector(load: Callable[..., Harness]) -> None:
    ours, exact = (
        load("llama", quantization).run(load("llama", quantization).engine(), asking(case_requests(load)))
        for quantization in ("int8", "none")
    )
    pairs = [(vector(answer), vector(exact[key])) for key, answer in ours.items()]
    closeness = [one @ other / (np.linalg.norm(one) * np.linalg.norm(other)) for one, other in pairs]
    assert min(closeness) > 0.98  # a tiny model may turn one of them more
    assert np.median(closeness) > 0.998


def case_requests(load: Callable[..., Harness]) -> list[EngineRequest]:
    return make_requests(load("llama", "none"), 5, 1, 100)


@pytest.mark.parametrize("changes", [{"max_tokens": 1}, {"choices": ()}])
def test_what_asks_for_tokens_as_well_is_refused(changes: dict, load: Callable[..., Harness]) -> None:
    harness = load("llama", "none")
    request = replace(asking(make_requests(harness, 1, 1, 9))[0], **changes)
    with pytest.raises(ValueError, match="request 'e0'"):
        harness.engine().add(request)
