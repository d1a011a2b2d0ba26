"""Prompts that the model makes itself.

A model that was trained to chat, given its chat template up to where the user's text would stand, goes on with a
question of the kind that it was trained to answer (Magpie, arXiv:2406.08464). So there is no need for a data set of
questions, and what heads learn from are the answers that the model will give.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from model_runner.contract import SamplingParams
from model_runner.training.examples import Answer, Question
from model_runner.training.prompts import Prompt

OPENING = Prompt("", "opening")
MAX_TOKENS = 96
"""Longer questions are left out."""
_SHORTEST = 12
"""Characters of the shortest question that is used."""


def opening_questions(count: int) -> Iterator[Question]:
    """Have the model write `count` questions, each with a seed of its own."""
    for index in range(count):
        yield Question(OPENING, SamplingParams(temperature=1.0, top_p=0.95, seed=index), MAX_TOKENS)


def own_prompts(answers: Iterable[Answer], decode: Callable[[Sequence[int]], str]) -> list[Prompt]:
    """The questions that came to an end, without repetitions, in the order of the answers."""
    ended = (answer for answer in answers if len(answer.tokens) - answer.num_prompt < MAX_TOKENS)
    texts = (decode(answer.tokens[answer.num_prompt :]).strip() for answer in ended)
    return [Prompt(text) for text in dict.fromkeys(texts) if len(text) >= _SHORTEST]
