import math

import pytest

from server.client.openai_answers import Alternative, TokenLogprob
from server.page.inside.tokens import Tokens, is_part, probability, spelled, token_bytes


def token(text: str, share: float = 0.5, *others: tuple[str, float]) -> TokenLogprob:
    top = [Alternative(token=other, logprob=math.log(one)) for other, one in others]
    return TokenLogprob(token=text, logprob=math.log(share), top_logprobs=top)


def tokens_of(*texts: str, prefix: str = "") -> Tokens:
    tokens = Tokens(prefix)
    tokens.add([token(text) for text in texts], None)
    return tokens


def test_tokens_of_parts_of_characters():
    tokens = tokens_of("a", r"bytes:\xf0\x9f", r"bytes:\x8c", r"bytes:\x9f", "b")
    assert tokens.text == "a🌟b"
    assert [one.text for one in tokens.all] == ["a", "⟨f0 9f⟩", "⟨8c⟩", "🌟", "b"]
    assert [(one.start, one.is_within) for one in tokens.all] == [
        (0, False), (1, False), (1, True), (1, True), (2, False)
    ]  # fmt: skip


def test_a_token_may_end_one_character_and_begin_another():
    tokens = tokens_of(r"bytes:\x20\xf0\x9f", r"bytes:\x8c\x9f\xc3", r"bytes:\xa9")
    assert [one.text for one in tokens.all] == [" ⟨f0 9f⟩", "🌟⟨c3⟩", "é"]


def test_a_part_of_a_character_may_come_with_another_chunk():
    tokens = tokens_of(r"bytes:\xc3")
    tokens.add([token(r"bytes:\xa9")], None)
    assert tokens.text == "é"


def test_bytes_are_those_that_the_server_tells():
    told = Alternative(token=r"bytes:\xe2", logprob=0.0, bytes=list(rb"bytes:\xe2"))
    assert token_bytes(told) == rb"bytes:\xe2"
    assert spelled(told) == r"bytes:\xe2"
    assert not is_part(told)
    assert token_bytes(Alternative(token=r"bytes:\xe2\x9c", logprob=0.0)) == b"\xe2\x9c"


def test_the_rank_and_the_rest():
    tokens = Tokens()
    tokens.add([token("b", 0.3, ("a", 0.6), ("b", 0.3)), token("z", 0.1, ("a", 0.6)), token("q")], None)
    assert [one.rank for one in tokens.all] == [2, None, None]
    assert [round(one.rest, 6) for one in tokens.all] == [0.1, 0.3, 0.5]


def test_impossible_tokens_have_no_probability():
    assert probability(Alternative(token="a", logprob=-9999.0)) == 0
    assert probability(Alternative(token="a", logprob=1e-7)) == 1


def test_sources_that_are_not_told_for_each_token_are_left_out():
    tokens = Tokens()
    tokens.add([token("a"), token("b")], ["drawn"])
    tokens.add([token("c")], ["draft:ngram"])
    assert [one.source for one in tokens.all] == [None, None, "draft:ngram"]


@pytest.mark.parametrize(("num_characters", "place"), [(0, None), (3, None), (4, 0), (5, 0), (6, 1), (7, 4), (8, None)])
def test_the_token_after_so_many_characters(num_characters, place):
    tokens = tokens_of("ab", r"bytes:\xf0\x9f", r"bytes:\x8c", r"bytes:\x9f", "c", prefix="The ")
    assert tokens.at(num_characters) == (0 if place is None and num_characters < 4 else place)


def test_what_is_behind_the_end_is_cut():
    tokens = tokens_of("ab", "cd", "ef")
    tokens.cut(3)
    assert (tokens.text, len(tokens.all)) == ("abc", 2)


def test_another_answer_begins_with_the_prefix_the_text_before_and_the_alternative():
    tokens = tokens_of(" cat", " sat", prefix="The")
    assert tokens.branch(tokens.all[1], Alternative(token=" ran", logprob=-1.0)) == "The cat ran"


@pytest.mark.parametrize(
    ("place", "alternative", "content", "said"),
    [
        (1, " ran", "The cat sat", ""),
        (1, "<b>", "The cat sat", ""),
        (1, r"bytes:\xf0\x9f", "The cat sat", "part of a character"),
        (1, "<|im_end|>", "The cat sat", "a control token"),
        (1, "</s>", "The cat sat", "a control token"),
        (3, "a", "The cat sat", "inside a character"),
        (1, " ran", "sat", "not only text"),
    ],
)
def test_where_no_answer_can_go_on(place, alternative, content, said):
    tokens = tokens_of("The cat", " sat", r"bytes:\xf0\x9f", r"bytes:\x8c")
    obstacle = tokens.obstacle(tokens.all[place], Alternative(token=alternative, logprob=-1.0), content)
    assert said in obstacle
    assert bool(said) == bool(obstacle)
