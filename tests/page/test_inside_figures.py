import math

import pytest

from server.client.openai_answers import TokenLogprob
from server.page.inside.tokens import Token, TokenStatistics, percent, surprise


def token(logprob: float, source: str | None = None) -> Token:
    return Token(0, TokenLogprob(token="a", logprob=logprob), source, 0, False, "a")


def test_of_nothing_nothing_is_said():
    figures = TokenStatistics()
    assert (figures.summary, figures.legend(), figures.perplexity) == ("", [], 1.0)


def test_the_summary():
    figures = TokenStatistics()
    figures.add([token(math.log(0.5), "drawn"), token(math.log(0.125), "draft:ngram")])
    assert figures.perplexity == pytest.approx(4.0)
    assert figures.summary == "2 tokens · mean probability 31.2 % · perplexity 4.00 · 50 % drafted by ngram"


def test_the_perplexity_of_an_impossible_token_is_infinite():
    figures = TokenStatistics()
    figures.add([token(-9999.0)])
    assert figures.summary == "1 token · mean probability 0 % · perplexity ∞"


def test_the_legend_counts_and_its_colours_stay():
    figures = TokenStatistics()
    figures.add([token(-1, "draft:suffix"), token(-1, "forced"), token(-1, "drawn")])
    first = {source: figures.colour(source) for source in figures.sources}
    figures.add([token(-1, "draft:ngram")])
    assert figures.legend() == [
        ("drafted by suffix: 1, 25 %", 2),
        ("forced: 1, 25 %", 1),
        ("drawn: 1, 25 %", 0),
        ("drafted by ngram: 1, 25 %", 3),
    ]
    assert first == {source: figures.colour(source) for source in first}
    assert figures.colour(None) == 0


def test_more_methods_than_colours_share_them():
    figures = TokenStatistics()
    figures.add([token(-1, f"draft:{number}") for number in range(7)])
    assert [colour for _, colour in figures.legend()] == [2, 3, 4, 5, 6, 7, 2]


@pytest.mark.parametrize(("share", "bits"), [(1.0, 0.0), (0.5, 0.1), (0.25, 0.2), (2**-10, 1.0), (1e-9, 1.0)])
def test_each_halving_is_as_surprising(share, bits):
    assert surprise(token(math.log(share))) == pytest.approx(bits)


@pytest.mark.parametrize(
    ("share", "said"), [(1, "100 %"), (0.5, "50 %"), (0.12345, "12.3 %"), (0.0001, "0.01 %"), (1e-9, "under 0.01 %")]
)
def test_percentages(share, said):
    assert percent(share) == said
