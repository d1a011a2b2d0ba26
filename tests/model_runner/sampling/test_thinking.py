"""A bound on the reasoning: its end comes at the bound at the latest, and nothing else is forced."""

import random
import re
from itertools import accumulate

import pytest
import torch

from model_runner.contract import SamplingParams, Thinking
from model_runner.sampling.grammar import Grammars
from model_runner.sampling.rows import SamplingState
from model_runner.sampling.sampler import Sampler
from model_runner.sampling.thinking import ThinkingBudget
from tests import tiny_vocabulary
from tests.model_runner.oracles.draw import TorchDraw

SIZE = 300
CPU = torch.device("cpu")
GRAMMARS = Grammars(tiny_vocabulary.tokenizer(SIZE).to_str, SIZE)
NAMES = tiny_vocabulary.tokens(SIZE)
SPELLED = [
    b"\xff" + name.encode() if name in tiny_vocabulary.SPECIALS else text
    for name, text in zip(NAMES, tiny_vocabulary.spelled(SIZE), strict=True)
]
AS_TEXT, AS_TOKENS = (b"ab", b'"}]'), (b"\xff<pad>", b"\xff<s>")
PIECES = ["a", "b", "ab", "abc", '"', "}", '"}', "]", "]}", "]}", '{"', "Ġ", "<pad>", "<s>"]
"""Tokens that the tags consist of, or share with adjacent text."""


def ids(*names: str) -> list[int]:
    return [NAMES.index(name) for name in names]


def forced_by_hand(thinking: Thinking, output: list[int]) -> bytes:
    """The part of the end that is still to be forced, computed from the whole output."""
    text = b"".join(SPELLED[token] for token in output)
    start = re.match(rb"\s*" + re.escape(thinking.begin), text) if not thinking.is_begun else re.match(b"", text)
    if start is None or thinking.end in text[start.end() :]:
        return b""
    ends = accumulate((len(SPELLED[token]) for token in output), initial=0)
    if sum(end >= start.end() for end in ends) - 1 < thinking.max_tokens:
        return b""
    thought, end = text[start.end() :], thinking.end
    return next(end[length:] for length in range(len(end) - 1, -1, -1) if thought.endswith(end[:length]))


@pytest.mark.parametrize(("begin", "end"), [AS_TEXT, AS_TOKENS], ids=["text", "tokens"])
@pytest.mark.parametrize("is_begun", [False, True])
def test_what_is_forced_is_what_the_definition_says(begin: bytes, end: bytes, is_begun: bool) -> None:
    pick = random.Random(3)
    pieces = ids(*PIECES)
    num_forced = 0
    for _ in range(600):
        thinking = Thinking(pick.randrange(4), begin, end, is_begun)
        opening = ids(*pick.choice(([], ["ab"], ["a", "b"], ["abc"], ["Ġ", "Ġ", "ab"], ["<pad>"], ["Ġ", "<pad>"])))
        output = opening + [pick.choice(pieces) for _ in range(pick.randrange(8))]
        budget = ThinkingBudget(thinking, GRAMMARS.vocabulary, output[: len(output) // 2])
        for token in output[len(output) // 2 :]:
            budget.add(token)
        left, forced = forced_by_hand(thinking, output), budget.forced
        assert (forced is not None) == bool(left), (thinking, output)
        if forced is not None:
            assert left.startswith(SPELLED[forced])
            num_forced += 1
    assert num_forced > 50


@pytest.mark.parametrize(("begin", "end"), [AS_TEXT, AS_TOKENS], ids=["text", "tokens"])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_an_output_thinks_no_longer_than_it_may(max_tokens: int, temperature: float, begin: bytes, end: bytes) -> None:
    logits = torch.zeros(1, SIZE)
    logits[:, [token for token, text in enumerate(SPELLED) if set(text) & set(end)]] = -1e9  # it would never end
    state, sampler = SamplingState(1, SIZE, CPU, GRAMMARS), Sampler(TorchDraw(SIZE, CPU))
    thinking = Thinking(max_tokens, begin, end, is_begun=True)
    state.admit(0, SamplingParams(temperature=temperature, thinking=thinking, seed=4), [1])
    output: list[bytes] = []
    for _ in range(12):
        (token,) = sampler(logits, state.rows([0])).tokens
        state.commit(0, token)
        output.append(SPELLED[token])
    assert b"".join(output[max_tokens:]).startswith(end)
    assert b"".join(output).count(end) == 1


def test_a_bound_needs_a_tokenizer() -> None:
    state = SamplingState(1, SIZE, CPU)
    with pytest.raises(ValueError, match="no tokenizer"):
        state.admit(0, SamplingParams(thinking=Thinking(1, *AS_TEXT)), [1])
