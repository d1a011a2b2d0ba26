"""Measures of texts, against values computed by hand."""

import math

import pytest

from bench.text_quality import TextQuality, distinct, perplexity, text_quality


@pytest.mark.parametrize(
    ("tokens", "n", "share"),
    [
        ((1, 2, 3, 4, 5), 1, 1.0),
        ((7, 7, 7, 7), 1, 1 / 4),
        ((7, 7, 7, 7), 2, 1 / 3),  # (7 7) three times
        ((1, 2, 1, 2, 1, 2), 2, 2 / 5),  # (1 2) three times, (2 1) twice
        ((1, 2, 3, 4, 1, 2, 3, 4), 4, 4 / 5),  # (1 2 3 4) twice
        ((1, 2, 3, 4), 4, 1.0),
        ((1, 2, 3), 4, 1.0),  # there are none
        ((), 1, 1.0),
    ],
)
def test_distinct_counts_different_ngrams(tokens: tuple[int, ...], n: int, share: float) -> None:
    assert distinct(tokens, n) == pytest.approx(share)


def test_the_perplexity_is_one_over_the_geometric_mean_of_the_probabilities() -> None:
    assert perplexity([math.log(1 / 2), math.log(1 / 8)]) == pytest.approx(4)
    assert perplexity([0.0, 0.0]) == 1


def test_a_strategy_is_judged_by_the_mean_over_its_texts_and_the_perplexity_over_all_tokens() -> None:
    continuations = [(1, 2, 3, 4, 1, 2, 3, 4), (5, 6, 7, 8, 9, 10, 11, 12)]
    logprobs = [*[math.log(1 / 2)] * 8, *[math.log(1 / 32)] * 8]
    quality = text_quality("some", continuations, logprobs)
    assert quality == TextQuality(
        "some",
        perplexity=pytest.approx(8),
        distinct_1=pytest.approx((4 / 8 + 1) / 2),
        distinct_2=pytest.approx((4 / 7 + 1) / 2),
        distinct_4=pytest.approx((4 / 5 + 1) / 2),
        repeated_4grams=pytest.approx(1 / 10),
    )
