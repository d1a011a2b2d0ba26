"""Beam search against transformers' implementation, and together with other requests."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from model_runner.contract import Breaker, Dry, SamplingParams
from model_runner.sampling.rows import SamplingState
from scheduler.engine import Engine
from scheduler.interface import BeamScore, BeamSearch, ChoiceState, EngineRequest
from tests.conftest import load_dense
from tests.engine.conftest import SMALL_VOCAB, Harness

SETTINGS = list(product([0.0, 0.6, 1.0, 2.0], [True, False, "never"], [False, True]))
PENALTIES = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}
STOP = 2


@dataclass
class Found:
    """One sequence as it came out."""

    tokens: list[int] = field(default_factory=list)
    beam: BeamScore | None = None


def search(
    name: str, prompt: Sequence[int], max_tokens: int, num_return: int, beams: BeamSearch, **sampling: Any
) -> EngineRequest:
    choices = tuple(ChoiceState(index) for index in range(num_return))
    params = SamplingParams(temperature=0.0, stop_token_ids=(STOP,), **sampling)
    return EngineRequest(name, tuple(prompt), params, max_tokens, choices, beam_search=beams)


def run(engine: Engine, requests: Sequence[EngineRequest]) -> dict[str, list[Found]]:
    """Run requests; returns the results of each request's choices."""
    found = {request.request_id: [Found() for _ in request.choices] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            found[output.request_id][output.choice].tokens += output.tokens
            found[output.request_id][output.choice].beam = output.beam
        engine.check_integrity()
    assert engine.stats().kv_usage == 0
    return found


def generate(model: PreTrainedModel, request: EngineRequest) -> list[tuple[list[int], float]]:
    """Sequences and scores of transformers, whose outputs are filled up behind the end of a sequence."""
    assert request.beam_search is not None
    prompt = torch.tensor([request.prompt])
    output: Any = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=request.max_tokens,
        do_sample=False,
        num_beams=request.beam_search.width,
        num_return_sequences=len(request.choices),
        length_penalty=request.beam_search.length_penalty,
        early_stopping=request.beam_search.early_stopping,
        repetition_penalty=request.sampling.repetition_penalty,
        no_repeat_ngram_size=request.sampling.no_repeat_ngram_size,
        return_dict_in_generate=True,
        output_scores=True,
    )
    sequences = [tokens[len(request.prompt) :] for tokens in output.sequences.tolist()]
    cut = [tokens[: tokens.index(STOP) + 1] if STOP in tokens else tokens for tokens in sequences]
    return list(zip(cut, output.sequences_scores.tolist(), strict=True))


def check(found: Sequence[Found], expected: Sequence[tuple[list[int], float]]) -> None:
    assert [one.tokens for one in found] == [tokens for tokens, _ in expected]
    scores = [one.beam.score for one in found if one.beam is not None]
    assert scores == pytest.approx([score for _, score in expected], abs=1e-4)


@pytest.mark.parametrize(
    ("family", "width"), [("llama", 2), ("llama", 3), ("llama", 4), ("llama", 5), ("llama", 6), ("gemma3", 3)]
)
def test_sequences_and_scores_are_those_of_generate(
    family: str, width: int, load: Callable[..., Harness], tiny_model: Callable[..., Path]
) -> None:
    """All at the same time; so few tokens that many sequences end."""
    pick = random.Random(width)
    requests = []
    for number, (penalty, early, penalised) in enumerate(SETTINGS[width % 2 :: 2]):
        prompt = [pick.randrange(3, SMALL_VOCAB) for _ in range(pick.randint(1, 40))]
        beams = BeamSearch(width, penalty, early)
        sampling = PENALTIES if penalised else {}
        num_return = pick.randint(1, width)
        requests.append(search(f"{number}", prompt, pick.choice([3, 10, 20]), num_return, beams, **sampling))
    found = run(load(family, "none", SMALL_VOCAB).engine(), requests)
    model = AutoModelForCausalLM.from_pretrained(tiny_model(family, SMALL_VOCAB), dtype=torch.float32)
    for request in requests:
        check(found[request.request_id], generate(model, request))


@pytest.mark.embedded
def test_the_embedded_models_are_too(load: Callable[..., Harness], embedded_folder: Path) -> None:
    pick = random.Random(1)
    requests = [
        search(
            f"{number}",
            [pick.randrange(49152) for _ in range(pick.randint(3, 40))],
            6,
            2,
            BeamSearch(width, penalty, early),
            **(PENALTIES if penalised else {}),
        )
        for number, (width, (penalty, early, penalised)) in enumerate(zip([2, 4, 6], SETTINGS[3::8], strict=True))
    ]
    found = run(load("embedded", "none").engine(), requests)
    model = load_dense(embedded_folder)
    for request in requests:
        check(found[request.request_id], generate(model, request))


def test_forks_that_take_over_what_was_counted_change_nothing(
    load: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens and scores equal the ones of forks whose prompt and output are counted anew."""
    harness = load("llama", "int8", SMALL_VOCAB)
    pick = random.Random(5)
    penalties: dict[str, Any] = {
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.1,
        "no_repeat_ngram_size": 4,
        "bad_words": ((5, 6), (7,)),
        "dry": Dry(0.4, 1.3, 1, breakers=(Breaker((9,)),)),
    }
    prompt = [pick.randrange(3, SMALL_VOCAB) for _ in range(45)]
    requests = [
        search("beams", prompt, 20, 4, BeamSearch(4), logprobs=2, **penalties),
        EngineRequest(
            "choices",
            tuple(prompt),
            SamplingParams(seed=1, logprobs=2, **penalties),
            20,
            tuple(ChoiceState(index) for index in range(3)),
        ),
    ]
    found = run(harness.engine(), requests)
    parents: list[int | None] = []
    admit = SamplingState.admit

    def count_anew(self: SamplingState, *arguments: Any) -> None:
        *others, parent = arguments
        parents.append(parent)
        admit(self, *others)

    monkeypatch.setattr(SamplingState, "admit", count_anew)
    assert run(harness.engine(), requests) == found
    assert len(parents) - parents.count(None) > 10


def crowd(pick: random.Random, count: int) -> list[EngineRequest]:
    """Requests that draw."""
    return [
        EngineRequest(
            f"drawn-{index}",
            tuple(pick.randrange(3, 320) for _ in range(pick.randint(1, 60))),
            SamplingParams(seed=index, top_p=0.9, frequency_penalty=0.5, stop_token_ids=(STOP,)),
            max_tokens=20,
        )
        for index in range(count)
    ]


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_beams_beside_sixteen_that_draw_change_neither(quantization: str, load: Callable[..., Harness]) -> None:
    pick = random.Random(3)
    harness = load("llama", quantization)
    searches = [
        search(
            f"search-{number}",
            [pick.randrange(3, 320) for _ in range(30)],
            16,
            2,
            BeamSearch(4, groups=groups, diversity_penalty=0.5 * (groups > 1)),
            frequency_penalty=0.3,
            logprobs=2,
        )
        for number, groups in enumerate([1, 2, 4])
    ]
    requests = [*searches, *crowd(pick, 16)]
    together = run(harness.engine(), requests)
    for request in requests:
        assert run(harness.engine(), [request])[request.request_id] == together[request.request_id]
    chunked = run(harness.engine(chunk=7, prefix_caching=False), searches)
    scarce = harness.engine(num_blocks=14)
    preempted = run(scarce, [*searches, *crowd(pick, 8)])
    assert scarce.stats().preemptions > 0
    for request in searches:
        assert chunked[request.request_id] == together[request.request_id]
        assert preempted[request.request_id] == together[request.request_id]
