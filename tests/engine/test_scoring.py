"""Contrastive decoding and DoLa against transformers: everything computed anew for each answer, without a cache."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM

from model_runner.contract import Contrastive, DoLa, SamplingParams
from model_runner.sampling.noise import Stream, gumbels, noise_key
from scheduler.interface import ChoiceState, EngineRequest
from tests.engine.conftest import Answer, Harness
from tests.engine.test_oracle import prompts

OBRIEN = [Contrastive(), Contrastive(alpha=0.0, expert_weight=1.25, amateur_weight=0.25), Contrastive(alpha=0.3)]
LI = Contrastive(expert_weight=1.0, amateur_weight=1.0, temperature=0.5)
DOLA = [DoLa("low"), DoLa("high", alpha=0.0), DoLa((0, 1, 2)), DoLa((1, 2), alpha=0.5)]
NUM_TOKENS = 12

Rows = NDArray[np.float64]


def log_softmax(logits: Rows) -> Rows:
    return logits - np.logaddexp.reduce(logits, -1, keepdims=True)


def plausible(scores: Rows, expert: Rows, alpha: float) -> Rows:
    """By probabilities, as the papers define it."""
    probs = np.exp(log_softmax(expert))
    return np.where(probs >= alpha * probs.max(-1, keepdims=True), scores, -np.inf)


def obrien(expert: Rows, amateur: Rows, alpha: float, beta: float) -> Rows:
    return plausible((1 + beta) * expert - beta * amateur, expert, alpha)


def li(expert: Rows, amateur: Rows, alpha: float, temperature: float) -> Rows:
    return plausible(log_softmax(expert) - log_softmax(amateur / temperature), expert, alpha)


def dola(final: Rows, early: Mapping[int, Rows], alpha: float) -> Rows:
    """The divergence by its definition, row after row."""
    scores = []
    for row, of_row in enumerate(log_softmax(final)):
        others = [log_softmax(early[layer][row]) for layer in sorted(early)]
        farthest = others[int(np.argmax([jensen_shannon(np.exp(of_row), np.exp(other)) for other in others]))]
        scores.append(of_row - farthest)
    return plausible(np.array(scores), final, alpha)


def jensen_shannon(p: Rows, q: Rows) -> float:
    middle = (p + q) / 2
    return float((p * np.log(p / middle)).sum() / 2 + (q * np.log(q / middle)).sum() / 2)


def picked(scores: Rows, sampling: SamplingParams) -> list[int]:
    """Tokens that the sampler draws from these scores with its noise."""
    if sampling.temperature == 0:
        return [int(token) for token in scores.argmax(-1)]
    tokens = np.arange(scores.shape[1])
    keys = [noise_key(sampling.seed, sampling.choice, Stream.TARGET, position) for position in range(len(scores))]
    noise = np.stack([gumbels(key, tokens) for key in keys])
    return [int(token) for token in (scores / sampling.temperature + noise).argmax(-1)]


class Oracle:
    """A model of transformers; all that it says of an answer comes from one pass over prompt and answer."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def __call__(self, prompt: Sequence[int], answer: Sequence[int]) -> tuple[Rows, dict[int, Rows]]:
        """Logits for each token of the answer, and what head and norm make of each layer's input."""
        tokens = torch.tensor([[*prompt, *answer[:-1]]])
        output = self._model(tokens, output_hidden_states=True)
        states = [hidden[0, len(prompt) - 1 :] for hidden in output.hidden_states[:-1]]
        early = {layer: self._head(self._model.get_decoder().norm(state)) for layer, state in enumerate(states)}
        return rows_of(output.logits[0, len(prompt) - 1 :]), early

    def _head(self, normed: Tensor) -> Rows:
        logits = self._model.lm_head(normed)
        cap = getattr(self._model.config, "final_logit_softcapping", None)
        return rows_of(logits if cap is None else torch.tanh(logits / cap) * cap)


def rows_of(logits: Tensor) -> Rows:
    return logits.double().numpy()


def requests_of(harness: Harness, settings: Sequence[SamplingParams]) -> list[EngineRequest]:
    found = prompts(len(settings), harness.runner.info.vocab_size, (1, 80), seed=3)
    return [
        EngineRequest(f"{index}", prompt, replace(sampling, seed=index), NUM_TOKENS)
        for index, (prompt, sampling) in enumerate(zip(found, settings, strict=True))
    ]


def answers_of(harness: Harness, requests: Sequence[EngineRequest]) -> list[Answer]:
    answers = harness.run(harness.engine(chunk=64), requests)
    return [answers[request.request_id, 0] for request in requests]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_contrastive_decoding_is_that_of_the_papers(
    family: str, temperature: float, load: Callable[..., Harness], tiny_model: Callable[[str], Path]
) -> None:
    harness = load(family, "none")
    expert, amateur = Oracle(tiny_model(family)), Oracle(tiny_model("qwen3"))
    settings = [SamplingParams(temperature=temperature, contrastive=each) for each in (*OBRIEN, LI)]
    requests = requests_of(harness, settings)
    differs = False
    for request, answer in zip(requests, answers_of(harness, requests), strict=True):
        ours = request.sampling.contrastive
        assert ours is not None
        logits = expert(request.prompt, answer.tokens)[0], amateur(request.prompt, answer.tokens)[0]
        scores = li(*logits, ours.alpha, 0.5) if ours is LI else obrien(*logits, ours.alpha, ours.amateur_weight)
        assert answer.tokens == picked(scores, request.sampling)
        differs |= answer.tokens != picked(logits[0], request.sampling)
    assert differs


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma2"])  # the last one has a soft cap after its head
def test_dola_is_that_of_the_paper(
    family: str, temperature: float, load: Callable[..., Harness], tiny_model: Callable[[str], Path]
) -> None:
    harness, oracle = load(family, "none"), Oracle(tiny_model(family))
    layers: dict[object, Sequence[int]] = {"low": [2 if family == "gemma2" else 0], "high": [1]}  # of three
    requests = requests_of(harness, [SamplingParams(temperature=temperature, dola=each) for each in DOLA])
    differs = False
    for request, answer in zip(requests, answers_of(harness, requests), strict=True):
        ours = request.sampling.dola
        assert ours is not None
        final, early = oracle(request.prompt, answer.tokens)
        candidates = layers.get(ours.layers, ours.layers)
        scores = dola(final, {layer: early[layer] for layer in candidates}, ours.alpha)  # type: ignore[union-attr]
        assert answer.tokens == picked(scores, request.sampling)
        differs |= answer.tokens != picked(final, request.sampling)
    assert differs


def test_choices_of_one_request_fork_both_caches(
    load: Callable[..., Harness], tiny_model: Callable[[str], Path]
) -> None:
    harness = load("llama", "none")
    expert, amateur = Oracle(tiny_model("llama")), Oracle(tiny_model("qwen3"))
    sampling = SamplingParams(contrastive=Contrastive(), seed=4)
    (prompt,) = prompts(1, 320, (45, 46), seed=1)
    request = EngineRequest("r", prompt, sampling, NUM_TOKENS, tuple(ChoiceState(index) for index in range(3)))
    answers = harness.run(harness.engine(chunk=32), [request])
    assert len({tuple(answer.tokens) for answer in answers.values()}) == 3
    for (_, choice), answer in answers.items():
        scores = obrien(expert(prompt, answer.tokens)[0], amateur(prompt, answer.tokens)[0], 0.1, 0.5)
        assert answer.tokens == picked(scores, replace(sampling, choice=choice))


def test_logprobs_are_the_models_own(load: Callable[..., Harness], tiny_model: Callable[[str], Path]) -> None:
    harness, oracle = load("llama", "none"), Oracle(tiny_model("llama"))
    settings = [SamplingParams(logprobs=2, contrastive=LI), SamplingParams(logprobs=2, dola=DoLa("low"))]
    requests = requests_of(harness, settings)
    for request, answer in zip(requests, answers_of(harness, requests), strict=True):
        expected = log_softmax(oracle(request.prompt, answer.tokens)[0])
        chosen = expected[np.arange(NUM_TOKENS), answer.tokens]
        np.testing.assert_allclose([token.logprob for token in answer.logprobs], chosen, atol=1e-4)
        assert [token.top[0][0] for token in answer.logprobs] == expected.argmax(-1).tolist()


def test_a_weightless_amateur_changes_no_greedy_answer(load: Callable[..., Harness]) -> None:
    harness = load("llama", "none")
    weightless = Contrastive(expert_weight=1.0, amateur_weight=0.0)
    plain = requests_of(harness, [SamplingParams(temperature=0)] * 2)
    contrasted = [replace(each, sampling=replace(each.sampling, contrastive=weightless)) for each in plain]
    assert answers_of(harness, contrasted) == answers_of(harness, plain)


def test_contrastive_choices_find_only_prefixes_that_both_models_know(load: Callable[..., Harness]) -> None:
    harness = load("llama", "none")
    (prompt,) = prompts(1, 320, (100, 101), seed=9)
    plain = EngineRequest("plain", prompt, SamplingParams(temperature=0), NUM_TOKENS)
    contrasted = replace(plain, request_id="a", sampling=SamplingParams(temperature=0, contrastive=Contrastive()))
    dola_ = replace(plain, request_id="d", sampling=SamplingParams(temperature=0, dola=DoLa("low")))
    engine = harness.engine()
    answers: dict[tuple[str, int], Answer] = {}
    for request in (plain, contrasted, replace(contrasted, request_id="b"), dola_):
        answers |= harness.run(engine, [request])
    found = {name: answer.num_cached for (name, _), answer in answers.items()}
    assert found == {"plain": 0, "a": 0, "b": 96, "d": 96}
    assert answers["a", 0].tokens == answers["b", 0].tokens
