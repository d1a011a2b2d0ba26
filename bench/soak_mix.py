"""Random mix of requests for the soak test; the same seed gives the same requests."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from server.cli.loadtest.load import WORDS

MOST_INPUT = 300
MOST_OUTPUT = 64


@dataclass(frozen=True, slots=True)
class SoakRequest:
    """A request, and whether its client disconnects early."""

    path: str
    body: dict[str, Any]
    leaves_after: int | None
    """Number of chunks after which the client disconnects; None: never."""


@dataclass(frozen=True, slots=True)
class SoakTarget:
    """The server's properties that requests depend on."""

    model: str
    vocab_size: int
    speculation_methods: tuple[str, ...] = ()


def make_mix(num_requests: int, leave_share: float, target: SoakTarget, seed: int) -> list[SoakRequest]:
    """Make requests for both endpoints: short and long, greedy and sampled, streamed and not, with every draft method.

    Half of the completions share the first half of their prompt.
    """
    rng = random.Random(seed)
    common = rng.choices(range(target.vocab_size), k=MOST_INPUT)
    return [_make_request(rng, common, target, rng.random() < leave_share) for _ in range(num_requests)]


def _make_request(rng: random.Random, common: list[int], target: SoakTarget, leaves: bool) -> SoakRequest:
    length = round(MOST_INPUT ** rng.random())  # many short, few long
    is_chat = rng.random() < 0.4
    body: dict[str, Any] = {
        "model": target.model,
        "max_tokens": rng.randint(1, MOST_OUTPUT),
        "stream": leaves or rng.random() < 0.6,
    }
    body |= _sampling(rng)
    if is_chat:
        words = " ".join(rng.choices(WORDS, k=length))
        body["messages"] = [{"role": "user", "content": words}]
        body |= rng.choice([{}, {}, {"logprobs": True, "top_logprobs": 2}])
    else:
        shared = length // 2 if rng.random() < 0.5 else 0
        body["prompt"] = common[:shared] + rng.choices(range(target.vocab_size), k=length - shared)
        body |= rng.choice([{}, {}, {"logprobs": 2}, {"echo": True}])
    speculation = _speculation(rng, target.speculation_methods)
    body |= speculation
    if is_chat and not speculation and rng.random() < 0.5:
        body["prediction"] = {"type": "content", "content": body["messages"][0]["content"]}
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    return SoakRequest(path, body, rng.randint(0, 12) if leaves else None)


def _sampling(rng: random.Random) -> dict[str, Any]:
    """Random sampling fields, always with a seed, so that the answer is deterministic."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "ignore_eos": True},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 40},
        {"temperature": 1.2, "min_p": 0.05, "repetition_penalty": 1.1},
        {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.5, "stop": ["the", "\n"]},
        {"temperature": 1.0, "n": rng.randint(2, 3)},
    ]
    return {**rng.choice(kinds), "seed": rng.getrandbits(32)}


def _speculation(rng: random.Random, methods: Sequence[str]) -> dict[str, Any]:
    """Random `speculation` field; half of the requests have none."""
    named = [method for method in methods if method != "prediction"]  # needs the field `prediction`; tested by `auto`
    if not named or rng.random() < 0.5:
        return {}
    wanted: dict[str, Any] = {"method": rng.choice(named)}
    if rng.random() < 0.5:
        wanted["num_tokens"] = rng.randint(1, 8)
    return {"speculation": rng.choice([wanted, wanted, wanted, "off"])}
