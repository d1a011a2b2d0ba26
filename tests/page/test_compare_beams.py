import math

import pytest

from server.client.openai_answers import TokenLogprob
from server.page.answer import MeasuredAnswer
from server.page.compare.beams import Branch, Piece, pieces_of, tree_json, tree_of


def beam(text: str) -> list[Piece]:
    return [Piece(word.encode(), -1.0) for word in text.split("|")]


def drawn(branch: Branch) -> tuple:
    return branch.text, branch.ending, [drawn(one) for one in branch.branches]


def test_what_beams_have_in_common_stands_once():
    tree = tree_of([beam("The| moon| is"), beam("The| sun| is"), beam("The| moon| was")])
    assert drawn(tree) == ("The", (), [(" moon", (), [(" is", (0,), []), (" was", (2,), [])]), (" sun is", (1,), [])])
    assert [branch.beams for branch in tree.branches] == [(0, 2), (1,)]


def test_beams_without_a_common_beginning():
    assert drawn(tree_of([beam("a"), beam("b")])) == ("", (), [("a", (0,), []), ("b", (1,), [])])


def test_a_beam_may_end_where_another_goes_on():
    assert drawn(tree_of([beam("a|b"), beam("a")])) == ("a", (1,), [("b", (0,), [])])


def test_equal_beams_end_together():
    assert drawn(tree_of([beam("a|b"), beam("a|b")])) == ("ab", (0, 1), [])


def test_logprobs_that_differ_in_their_last_digits_part_no_beams():
    tree = tree_of([[Piece(b"a", -0.1), Piece(b"b", -0.5)], [Piece(b"a", -0.1000001), Piece(b"c", -2.0)]])
    assert tree.text == "a"
    assert [branch.share for branch in tree.branches] == [math.exp(-0.5), math.exp(-2.0)]


def test_tokens_that_are_parts_of_a_character_make_a_character():
    first, second = "é".encode()[:1], "é".encode()[1:]
    answer = MeasuredAnswer(
        tokens=[TokenLogprob("?", -1.0, bytes=list(first)), TokenLogprob("?", -1.0, bytes=list(second))]
    )
    assert tree_of([pieces_of(answer)]).text == "é"


@pytest.mark.parametrize("text", ["Hello there", "  two\n words ", "", " "])
def test_without_tokens_the_pieces_are_words(text):
    assert b"".join(piece.spelled for piece in pieces_of(MeasuredAnswer(content=text))).decode() == text


def test_a_tree_as_it_is_shown():
    answers = [
        MeasuredAnswer(content="a b", score=-0.5, cumulative_logprob=-1.0, completion_tokens=2, finish_reason="stop"),
        MeasuredAnswer(content="a c"),
    ]
    tree = tree_json(tree_of([pieces_of(answer) for answer in answers]), answers)
    assert (tree["text"], tree["best"], tree["through"], tree["share"]) == ("a", True, "2 beams", "")
    first, second = tree["branches"]
    assert first["ending"] == [{"name": "Beam 1", "facts": "score −0.500 · sum −1.000 · 2 tokens · ended by itself"}]
    assert (second["text"], second["best"]) == (" c", False)


def test_shares_are_rounded_for_people():
    answers = [
        MeasuredAnswer(tokens=[TokenLogprob("a", math.log(0.994))]),
        MeasuredAnswer(tokens=[TokenLogprob("b", math.log(0.001))]),
    ]
    tree = tree_json(tree_of([pieces_of(answer) for answer in answers]), answers)
    assert [branch["share"] for branch in tree["branches"]] == ["99 %", "< 1 %"]
