import pytest

from server.client.openai_answers import Choice, Delta, Logprobs, TokenLogprob
from server.page.compare.answer import Answer, compared, num_same


def chunk(text: str, *logprobs: float, **more) -> Choice:
    tokens = [TokenLogprob(token=text, logprob=logprob) for logprob in logprobs]
    return Choice(delta=Delta(content=text), logprobs=Logprobs(content=tokens) if tokens else None, **more)


def test_an_answer_grows_chunk_by_chunk():
    answer = Answer()
    answer.add(Choice(), 0.1)  # the role alone
    answer.add(chunk("Hel", -1.0), 0.5)
    answer.add(chunk("lo", -2.0), 1.0)
    answer.add(Choice(finish_reason="stop", score=-1.5, cumulative_logprob=-3.0), 1.1)
    assert (answer.text, answer.num_tokens, answer.mean_logprob) == ("Hello", 2, -1.5)
    assert (answer.score, answer.cumulative_logprob) == (-1.5, -3.0)
    assert answer.facts == "2 tokens · 2 tokens/s · first after 500 ms · ended by itself · mean log-probability −1.500"


def test_tokens_are_counted_by_their_ids_where_there_are_no_logprobs():
    answer = Answer()
    answer.add(chunk("Hello", token_ids=[7, 8]), 0.5)
    answer.add(chunk("!", token_ids=[9]), 0.6)
    assert answer.num_tokens == 3


def test_reasoning_stands_beside_the_text():
    answer = Answer()
    answer.add(Choice(delta=Delta(reasoning_content="Hm")), 0.5)
    answer.add(chunk("Yes"), 0.6)
    assert (answer.reasoning, answer.text, answer.first_token_s) == ("Hm", "Yes", 0.5)


def test_endings_in_words():
    assert Answer().ending == ""
    assert Answer(finish_reason="length").ending == "cut off at the most tokens"
    assert Answer(finish_reason="of another server").ending == "of another server"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("abc", "The same as the first."),
        ("xbc", "Differs from the first from its beginning."),
        ("axc", "The same as the first for 1 character."),
        ("ab", "The same as the first for 2 characters."),
        ("abcd", "The same as the first for 3 characters."),
    ],
)
def test_where_a_text_parts_with_the_first(text, said):
    assert compared(text, "abc") == said


def test_num_same_of_any_sequences():
    assert num_same([], [1]) == 0
    assert num_same([1, 2, 3], [1, 2, 4]) == 2
    assert num_same("ab", "abc") == 2
