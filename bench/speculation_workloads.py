"""Workloads for measuring speculation: questions, repeated questions, copies of the prompt, and random tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from pydoc_data.topics import topics

from model_runner.training.prompts import held_out_prompts
from server.cli.loadtest.load import Lengths, make_requests
from server.cli.loadtest.load import Workload as LoadWorkload
from server.text.tokenizer import Tokenizer

_REPEATED = (
    "Summarise the rules of chess for a beginner.",
    "Give me a checklist for packing before a camping trip.",
    "What are the main differences between Python and JavaScript?",
    "Write a polite reminder about an unpaid invoice.",
)
_TIMES = 2
"""Number of repetitions of each question."""
_COPIED = ("for", "while", "with", "import", "class", "function", "lambda", "raise")
"""Topics of Python's documentation that are to be copied."""
_COPIED_LETTERS = 600
_RANDOM_TOKENS = 128
_NUM_RANDOM = 128


@dataclass(frozen=True, slots=True)
class Workload:
    """Tokenised prompts."""

    prompts: list[tuple[int, ...]]
    before: tuple[tuple[int, ...], ...] = ()
    """Prompts that are answered before the measurement."""
    is_endless: bool = False
    """Whether answers continue after stop tokens."""


def asked(tokenizer: Tokenizer) -> Workload:
    """Held-out questions, alternating between the kinds."""
    kinds = [[prompt.text for prompt in prompts if prompt.kind == "chat"] for prompts in held_out_prompts().values()]
    longest = max(map(len, kinds))
    texts = [texts[place] for place in range(longest) for texts in kinds if place < len(texts)]
    return Workload([_encode(tokenizer, text) for text in texts])


def repeated(tokenizer: Tokenizer) -> Workload:
    """Repeated questions, as agents and evaluations send them."""
    prompts = [_encode(tokenizer, text) for text in _REPEATED]
    return Workload(prompts * _TIMES, tuple(prompts))


def copied(tokenizer: Tokenizer) -> Workload:
    """Requests to repeat a text unchanged."""
    texts = [" ".join(topics[name].split())[:_COPIED_LETTERS] for name in _COPIED]
    return Workload([_encode(tokenizer, f"Repeat the following text exactly.\n\n{text}") for text in texts])


def unrelated(tokenizer: Tokenizer) -> Workload:
    """Random tokens, as `bench.serving` sends them. Greedy answers to them become repetitive."""
    length = Lengths(_RANDOM_TOKENS, _RANDOM_TOKENS)
    requests = make_requests(LoadWorkload(_NUM_RANDOM, length, length), tokenizer.vocab_size)
    return Workload([tuple(map(int, request.prompt)) for request in requests], is_endless=True)


def _encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Tokenise a user message as a prompt."""
    if tokenizer.chat_template is None:
        return tuple(tokenizer.encode(text, add_special_tokens=True))
    message: Mapping[str, str] = {"role": "user", "content": text}
    prompt = tokenizer.chat_template.render([message], add_generation_prompt=True, variables={})
    return tuple(tokenizer.encode(prompt, add_special_tokens=False))
