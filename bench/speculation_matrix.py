"""Checks that every speculation method, with every request feature, returns exactly the answer without speculation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from model_runner.contract import Dry, Mirostat, SamplingParams, Speculation, TokenLogprobs, Xtc
from scheduler.engine import Engine
from scheduler.interface import ChoiceState, EngineRequest, FinishReason

NUM_DRAFT = 4
NUM_TOKENS = 24
_GREEDY = SamplingParams(temperature=0.0, logprobs=1)
_SAMPLED = SamplingParams(temperature=0.8, logprobs=1, seed=5)


@dataclass(frozen=True, slots=True)
class Feature:
    """A request feature: settings, and the conditions under which the requests run."""

    sampling: SamplingParams = _SAMPLED
    num_choices: int = 1
    chunk: int = 256
    """Maximum tokens per step."""
    is_warm: bool = False
    """Whether the prompts are in the prefix cache."""
    is_short_of_blocks: bool = False
    """Whether requests are preempted. They then generate twice as many tokens, to exceed the blocks in any case."""
    is_mixed: bool = False
    """Whether only every other request speculates."""


FEATURES = {
    "greedy": Feature(_GREEDY),
    "sampling, top-p": Feature(replace(_SAMPLED, top_p=0.9)),
    "min-p, top-k": Feature(replace(_SAMPLED, min_p=0.02, top_k=50)),
    "penalties": Feature(
        replace(_SAMPLED, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2),
    ),
    "DRY, XTC": Feature(replace(_SAMPLED, dry=Dry(0.5), xtc=Xtc(0.5, 0.05))),
    "cutoffs, own order": Feature(
        replace(
            _SAMPLED,
            top_n_sigma=2.0,
            eta_cutoff=0.01,
            sampler_order=("top_n_sigma", "eta_cutoff", "temperature"),
        )
    ),
    "mirostat, preemption": Feature(replace(_SAMPLED, mirostat=Mirostat(tau=2.0)), chunk=64, is_short_of_blocks=True),
    "n-gram blocking": Feature(replace(_GREEDY, no_repeat_ngram_size=3)),
    "bad words": Feature(replace(_GREEDY, bad_words=((5,), (6, 7)))),
    "logit_bias": Feature(replace(_SAMPLED, logit_bias=((7, 4.0), (9, -100.0)))),
    "allowed ids": Feature(replace(_SAMPLED, allowed_token_ids=tuple(range(5, 20)))),
    "logprobs": Feature(replace(_SAMPLED, logprobs=5)),
    "stop tokens": Feature(replace(_GREEDY, stop_token_ids=(3, 13))),
    "min_tokens": Feature(replace(_GREEDY, stop_token_ids=(3, 13), min_tokens=8)),
    "n = 3": Feature(num_choices=3),
    "echo": Feature(replace(_SAMPLED, prompt_logprobs=1)),
    "prefix hit": Feature(is_warm=True),
    "chunked prefill": Feature(_GREEDY, chunk=16),
    "preemption": Feature(_GREEDY, chunk=64, is_short_of_blocks=True),
    "mixed batch": Feature(is_mixed=True),
}


@dataclass
class Answer:
    """All output of one choice."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """Result of one method with one feature."""

    is_equal: bool
    num_drafted: int
    num_accepted: int
    num_preempted: int


MakeEngine = Callable[[int, int], Engine]
"""Creates an engine with an empty prefix cache, given maximum tokens per step and number of blocks."""


class Matrix:
    """Runs methods and compares their answers with the answers without speculation."""

    def __init__(
        self,
        make_engine: MakeEngine,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        features: Mapping[str, Feature] = FEATURES,
    ) -> None:
        self._make_engine = make_engine
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._features = features
        self._prompts = _prompts(vocab_size)
        self._plain: dict[str, dict[tuple[str, int], Answer]] = {}

    def cell(self, method: str, name: str) -> Cell:
        """Run a feature's requests with a method."""
        feature = self._features[name]
        if name not in self._plain:
            self._plain[name], _, _ = self._run(feature, None)
        prediction = tuple(self._plain[name]["r0", 0].tokens) if method == "prediction" else ()
        answers, engine, counts = self._run(feature, Speculation(method, NUM_DRAFT, prediction=prediction))
        return Cell(answers == self._plain[name], *counts, engine.stats().preemptions)

    def _run(
        self, feature: Feature, speculation: Speculation | None
    ) -> tuple[dict[tuple[str, int], Answer], Engine, tuple[int, int]]:
        num_tokens = NUM_TOKENS * (2 if feature.is_short_of_blocks else 1)
        requests = [
            EngineRequest(
                request_id=f"r{index}",
                prompt=prompt,
                sampling=feature.sampling,
                max_tokens=num_tokens,
                choices=tuple(ChoiceState(choice) for choice in range(feature.num_choices)),
                speculation=None if feature.is_mixed and index % 2 else speculation,
            )
            for index, prompt in enumerate(self._prompts)
        ]
        num_blocks = self._num_blocks
        if feature.is_short_of_blocks:
            longest = max(map(len, self._prompts)) + num_tokens
            num_blocks = longest // self._block_size + 2
        engine = self._make_engine(feature.chunk, num_blocks)
        if feature.is_warm:
            warm = [replace(request, request_id=f"w{request.request_id}", max_tokens=1) for request in requests]
            _run(engine, warm)
        answers, counts = _run(engine, requests)
        engine.check_integrity()
        return answers, engine, counts


def _run(engine: Engine, requests: Sequence[EngineRequest]) -> tuple[dict[tuple[str, int], Answer], tuple[int, int]]:
    """Run requests to their end; returns the answers and the numbers of verified and accepted draft tokens."""
    for request in requests:
        engine.add(request)
    answers: dict[tuple[str, int], Answer] = {}
    num_accepted = num_rejected = 0
    while engine.has_work:
        for output in engine.step():
            answer = answers.setdefault((output.request_id, output.choice), Answer())
            answer.tokens += output.tokens
            answer.logprobs += output.logprobs
            answer.prompt_logprobs += output.prompt_logprobs
            answer.finish_reason = output.finish_reason
            num_accepted += output.num_accepted
            num_rejected += output.num_rejected
            if output.error is not None:
                raise RuntimeError(f"{output.request_id}: {output.error}")
    return answers, (num_accepted + num_rejected, num_accepted)


def _prompts(vocab_size: int) -> list[tuple[int, ...]]:
    """Repetitive prompts, so that drafts can be accepted."""
    rng = np.random.default_rng(3)
    parts = rng.integers(3, vocab_size, size=(6, 12))
    return [tuple(int(t) for t in np.tile(part, 2 + index)[: 20 + 9 * index]) for index, part in enumerate(parts)]
