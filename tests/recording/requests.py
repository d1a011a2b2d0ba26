"""The requests of a recording: for each kind of model, what its answers can depend on."""

import base64
import io
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from tests.recording.models import Kind, RecordedModel

Body = dict[str, Any]
_COMPLETIONS, _CHAT, _EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
_LONG = 600
"""Tokens of a prompt that no step computes at once: a step has 512 at most."""
_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
}


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request of a recording."""

    name: str
    path: str
    body: Body
    is_alone: bool = False
    """Whether it runs alone. All other requests to the model run together, after these."""


class _Prompts:
    """Random tokens, the same for every run."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def make(self, length: int, seed: int = 0) -> list[int]:
        """Tokens that are no control tokens."""
        numbers = random.Random(f"{length} {seed}")
        return [numbers.randrange(3, self._vocab_size) for _ in range(length)]

    def repeating(self, times: int) -> list[int]:
        """A text that speculation finds something in."""
        return self.make(9) * times


def requests_of(model: RecordedModel) -> list[RecordedRequest]:
    """The requests to a model."""
    prompts = _Prompts(model.vocab_size)
    by_kind = {
        "text": _of_text,
        "drafts": lambda prompts: [*_of_text(prompts), *_with_drafts(prompts)],
        "images": lambda _: _about_images(),
        "vectors": lambda _: _for_vectors(),
        "classes": lambda _: _for_classes(),
        "embedded": _of_embedded,
        "interpreted": _interpreted,
    }
    of_kind: Mapping[Kind, Any] = by_kind
    found: list[RecordedRequest] = of_kind[model.kind](prompts)
    return found


def _completion(name: str, prompt: Any, tokens: int, *, is_alone: bool = False, **fields: Any) -> RecordedRequest:
    """A completion that reports its tokens, and goes on to its limit unless a constraint ends it."""
    form = {"guided_regex", "guided_json", "guided_grammar"}
    whole = {} if form & fields.keys() else {"ignore_eos": True}
    body = {"prompt": prompt, "max_tokens": tokens, "seed": 7, "return_token_ids": True, **whole, **fields}
    return RecordedRequest(name, _COMPLETIONS, body, is_alone)


def _of_text(prompts: _Prompts) -> list[RecordedRequest]:
    """Alone: greedy, a prompt in chunks, and its prefix. In a crowd: one request for each way of decoding."""
    long = prompts.make(_LONG)
    hit = [*long[:480], *prompts.make(20, 1)]
    sampled = {"temperature": 0.8, "top_p": 0.9}
    return [
        _completion("greedy", prompts.make(33), 16, is_alone=True, temperature=0, logprobs=3, speculation="off"),
        _completion("chunked", long, 6, is_alone=True, temperature=0, logprobs=0, prompt_logprobs=0),
        _completion("prefix hit", hit, 6, is_alone=True, logprobs=1, **sampled),
        _completion("three choices", prompts.make(20), 10, n=3, logprobs=0, **sampled),
        _completion("in a crowd", hit, 12, temperature=0, logprobs=1, speculation="off"),
        _completion(
            "penalties",
            prompts.repeating(4),
            14,
            logprobs=2,
            temperature=0.9,
            min_p=0.02,
            repetition_penalty=1.2,
            frequency_penalty=0.3,
            presence_penalty=0.2,
            dry_multiplier=0.5,
        ),
        _completion(
            "filters",
            prompts.make(12),
            12,
            logprobs=1,
            top_k=40,
            typical_p=0.9,
            xtc_probability=0.5,
            xtc_threshold=0.05,
            logit_bias={"7": 4, "9": -100},
            no_repeat_ngram_size=3,
        ),
        _completion("expression", prompts.make(15), 24, guided_regex="[ab]{4,9}[0-3]{2,5}", logprobs=0),
        _completion("schema", prompts.make(18), 40, guided_json=_SCHEMA, temperature=0.7, logprobs=0),
        _completion("beams", prompts.make(17), 8, beam_search={"width": 3, "num_return": 2}, logprobs=0),
        _completion("stop", prompts.make(14), 30, stop=["a", "b", "0"], include_stop_str_in_output=True, **sampled),
        _completion("suffix", prompts.repeating(6), 20, temperature=0, logprobs=0, speculation={"method": "suffix"}),
    ]


def _with_drafts(prompts: _Prompts) -> list[RecordedRequest]:
    """Every method of speculation, and what needs an auxiliary model."""
    methods = ("draft_model", "eagle", "hydra", "medusa", "lookahead", "grammar", "auto")
    drafted: list[RecordedRequest] = [
        _completion(
            f"{method}, {temperature}",
            prompts.repeating(3),
            16,
            temperature=temperature,
            logprobs=1,
            speculation={"method": method, "num_tokens": 5},
            **({"guided_json": _SCHEMA} if method == "grammar" else {}),
        )
        for method in methods
        for temperature in (0, 0.8)
    ]
    return [
        *drafted,
        _completion("contrastive search", prompts.make(21), 10, penalty_alpha=0.6, top_k=4, logprobs=0),
        _completion("contrastive decoding", prompts.make(22), 10, temperature=0, contrastive={}, logprobs=0),
        _completion("guidance", prompts.make(23), 10, temperature=0, guidance={"scale": 1.5}, logprobs=0),
        _completion("layers", prompts.make(24), 10, temperature=0, dola={"layers": "low"}, logprobs=0),
        RecordedRequest("states", _EMBEDDINGS, {"input": [prompts.make(9), prompts.make(70)]}),
    ]


def _of_embedded(prompts: _Prompts) -> list[RecordedRequest]:
    """The text requests, and conversations."""
    asked = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    chat = {"messages": asked, "max_tokens": 24, "seed": 3, "logprobs": True, "return_token_ids": True}
    ways: Mapping[str, Body] = {
        "greedy chat": {"temperature": 0, "top_logprobs": 3},
        "three answers": {"temperature": 0.9, "n": 3},
        "hydra": {"temperature": 0, "speculation": {"method": "hydra", "num_tokens": 6}},
        "contrastive search in a chat": {"penalty_alpha": 0.6, "top_k": 4},
        "layers of a chat": {"temperature": 0, "dola": {"layers": "high"}},
        "schema in a chat": {"temperature": 0.5, "guided_json": _SCHEMA},
    }
    return [*_of_text(prompts), *(RecordedRequest(name, _CHAT, {**chat, **way}) for name, way in ways.items())]


def _about_images() -> list[RecordedRequest]:
    """Pictures of several sizes, one of them twice."""
    sizes = {"alone": (40, 30), "wide": (90, 40), "tall": (30, 100), "again": (40, 30)}
    chat = {"max_tokens": 10, "seed": 5, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    return [
        RecordedRequest(
            name,
            _CHAT,
            {
                **chat,
                "messages": [{"role": "user", "content": [{"type": "text", "text": "ab"}, _picture(*size)]}],
                "temperature": 0 if name == "alone" else 0.8,
                "ignore_eos": True,
            },
            is_alone=name == "alone",
        )
        for name, size in sizes.items()
    ]


def _picture(width: int, height: int) -> Body:
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"},
    }


def _for_vectors() -> list[RecordedRequest]:
    texts = ["the quick brown fox", "a", "jumps over the lazy dog and runs away " * 4]
    return [
        RecordedRequest("one text", _EMBEDDINGS, {"input": texts[0]}, is_alone=True),
        RecordedRequest("texts", _EMBEDDINGS, {"input": texts}),
        RecordedRequest("text of a crowd", _EMBEDDINGS, {"input": texts[2]}),
    ]


def _for_classes() -> list[RecordedRequest]:
    texts = ["the quick brown fox", "a", "zebra quiz"]
    return [
        RecordedRequest("one text", "/v1/classify", {"input": texts[0]}, is_alone=True),
        RecordedRequest("texts", "/v1/classify", {"input": texts}),
    ]


def _interpreted(prompts: _Prompts) -> list[RecordedRequest]:
    """Few tokens: a step of the interpreter takes a tenth of a second and more."""
    prefix = prompts.make(16)
    return [
        _completion("greedy", prefix[:11], 5, is_alone=True, temperature=0, logprobs=2, speculation="off"),
        _completion("sampled", prefix[2:14], 5, temperature=0.8, logprobs=0),
        _completion("penalties", [*prefix, 5], 4, top_p=0.9, repetition_penalty=1.2, logprobs=1, prompt_logprobs=1),
        _completion("two choices", [*prefix, 7, 7], 3, n=2, temperature=0.8, logprobs=0),
        _completion("suffix", prefix[:6] * 3, 6, temperature=0, logprobs=0, speculation={"method": "suffix"}),
        _completion("expression", prefix[:9], 6, guided_regex="[ab]{2,4}0", logprobs=0),
    ]
