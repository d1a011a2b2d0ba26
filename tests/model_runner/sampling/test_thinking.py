"""A bound on the reasoning: its end comes at the bound at the latest, and nothing else is forced."""

import random

import pytest
import torch

from model_runner.contract import SamplingParams, Thinking
from model_runner.sampling.draw import TorchDraw
from model_runner.sampling.rows import SamplingState
from model_runner.sampling.sampler import Sampler
from model_runner.sampling.thinking import ThinkingBudget

BEGIN, END = (7,), (8, 9)
VOCAB = 12
CPU = torch.device("cpu")


def forced_by_hand(thinking: Thinking, output: list[int]) -> int | None:
    """The definition, with a look at the whole output."""
    begins = [0] if thinking.is_begun else [at + 1 for at, token in enumerate(output[:2]) if token == BEGIN[0]]
    if not begins:
        return None
    thought = output[begins[0] :]
    if any(tuple(thought[at : at + 2]) == END for at in range(len(thought))):
        return None
    if len(thought) < thinking.max_tokens:
        return None
    return END[1] if output[-1:] == [END[0]] else END[0]


@pytest.mark.parametrize("is_begun", [False, True])
def test_what_is_forced_is_what_the_definition_says(is_begun: bool) -> None:
    pick = random.Random(3)
    num_forced = 0
    for _ in range(400):
        thinking = Thinking(pick.randrange(4), BEGIN, END, is_begun)
        output = [pick.choice((1, 7, 8, 9)) for _ in range(pick.randrange(8))]
        budget = ThinkingBudget(thinking, output[: len(output) // 2])
        for token in output[len(output) // 2 :]:
            budget.add(token)
        expected = forced_by_hand(thinking, output)
        assert budget.forced == expected, (thinking, output)
        num_forced += expected is not None
    assert num_forced > 50


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_an_output_thinks_no_longer_than_it_may(max_tokens: int, temperature: float) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[:, 8:10] = -1e9  # the model would never end by itself
    state, sampler = SamplingState(1, VOCAB, CPU), Sampler(TorchDraw(VOCAB, CPU))
    thinking = Thinking(max_tokens, BEGIN, END, is_begun=True)
    state.admit(0, SamplingParams(temperature=temperature, thinking=thinking, seed=4), [1])
    output: list[int] = []
    for _ in range(10):
        (token,) = sampler(logits, state.rows([0])).tokens
        state.commit(0, token)
        output.append(token)
    assert tuple(output[max_tokens : max_tokens + 2]) == END
    assert not set(END) & set(output[:max_tokens] + output[max_tokens + 2 :])
