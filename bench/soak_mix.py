"""The mix of requests for the soak: every shape that a server meets, the same for the same seed."""

import random
from dataclasses import dataclass
from typing import Any

from server.loadtest.workload import WORDS

MOST_INPUT = 300
MOST_OUTPUT = 64


@dataclass(frozen=True, slots=True)
class SoakRequest:
    """One request, and whether its client waits for the answer."""

    path: str
    body: dict[str, Any]
    leaves_after: int | None
    """Chunks after which the client closes the connection; None stays to the end."""


def make_mix(num_requests: int, leave_share: float, model: str, vocab_size: int, seed: int) -> list[SoakRequest]:
    """Completions and chats, short and long, greedy and sampled, streamed and not; some share their first half."""
    rng = random.Random(seed)
    common = rng.choices(range(vocab_size), k=MOST_INPUT)
    return [_make_request(rng, common, model, vocab_size, rng.random() < leave_share) for _ in range(num_requests)]


def _make_request(rng: random.Random, common: list[int], model: str, vocab_size: int, leaves: bool) -> SoakRequest:
    length = round(MOST_INPUT ** rng.random())  # many short, few long
    is_chat = rng.random() < 0.4
    body: dict[str, Any] = {
        "model": model,
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
        body["prompt"] = common[:shared] + rng.choices(range(vocab_size), k=length - shared)
        body |= rng.choice([{}, {}, {"logprobs": 2}, {"echo": True}])
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    return SoakRequest(path, body, rng.randint(0, 12) if leaves else None)


def _sampling(rng: random.Random) -> dict[str, Any]:
    """Always with a seed or greedy, so that the answer is determined."""
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
