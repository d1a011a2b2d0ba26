"""Processed logits against the float64 oracle and against transformers' processors."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from model_runner.contract import SAMPLER_ORDER, Breaker, Dry, Mirostat, SamplingParams, Xtc
from model_runner.sampling.sampler import constrained

from . import oracle
from .cases import OUTPUT, PROMPT, SETTINGS
from .harness import Case, processed, random_logits, rows_of


def assert_agrees(logits: torch.Tensor, case: Case) -> None:
    result = processed(logits, [case] * len(logits)).double().numpy()
    for row, mine in enumerate(result):
        truth = oracle.final(logits[row].double().numpy(), case.params, case.prompt, case.output)
        np.testing.assert_array_equal(np.isfinite(mine), np.isfinite(truth), err_msg=str(case))
        np.testing.assert_allclose(oracle.softmax(mine), oracle.softmax(truth), atol=1e-5)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("vocab_size", [25, 1003])
def test_each_setting_agrees_with_the_oracle(name, vocab_size):
    logits = random_logits(12, vocab_size, seed=vocab_size)
    assert_agrees(logits, Case(SETTINGS[name], PROMPT, OUTPUT))
    assert_agrees(logits, Case(SETTINGS[name], PROMPT))


IDLE = {
    *("top_k above vocabulary", "no_repeat_ngram 40", "min_tokens reached", "xtc idle", "dry without repetition"),
    "length penalty not yet",
}


@pytest.mark.parametrize("name", sorted(SETTINGS.keys() - IDLE))
def test_each_setting_matters(name):
    """So that the comparison with the oracle compares something."""
    logits = random_logits(4, 25, seed=1)
    assert not torch.equal(processed(logits, [Case(SETTINGS[name], PROMPT, OUTPUT)] * 4), logits)


def number(low: float, high: float) -> st.SearchStrategy[float]:
    """Numbers that do not meet sums of probabilities exactly, where rounding would decide."""
    return st.integers(0, 10_000).map(lambda i: low + (high - low) * (i + 1 / math.pi) / 10_001)


def optional(strategy: st.SearchStrategy[float], off: float) -> st.SearchStrategy[float]:
    return st.one_of(st.just(off), strategy)


@st.composite
def problems(draw: st.DrawFn) -> tuple[torch.Tensor, Case]:
    vocab_size = draw(st.integers(1, 70))
    tokens = st.integers(0, vocab_size - 1)
    logits = random_logits(1, vocab_size, draw(st.integers(0, 10**6)), draw(st.sampled_from([0.0, 1.0, 4.0, 30.0])))
    if draw(st.booleans()):
        logits = (logits * 2).round() / 2  # many ties
    if draw(st.booleans()):
        logits[0, draw(st.lists(tokens, max_size=vocab_size - 1, unique=True))] = -math.inf
    mirostat = draw(st.one_of(st.none(), st.builds(Mirostat, number(0.01, 4)))) if draw(st.booleans()) else None
    params = SamplingParams(
        logit_bias=tuple(draw(st.lists(st.tuples(tokens, number(-9, 9)), max_size=4))),
        bad_words=tuple(tuple(word) for word in draw(st.lists(st.lists(tokens, min_size=2, max_size=3), max_size=3))),
        no_repeat_ngram_size=draw(st.sampled_from([0, 0, 2, 3])),
        repetition_penalty=draw(optional(number(0.5, 2), 1.0)),
        frequency_penalty=draw(optional(number(-2, 2), 0.0)),
        presence_penalty=draw(optional(number(-2, 2), 0.0)),
        dry=draw(
            st.one_of(
                st.none(),
                st.builds(
                    Dry,
                    number(0.1, 2),
                    number(1, 1.5),
                    st.integers(1, 4),
                    st.integers(-1, 14),
                    st.lists(
                        st.builds(
                            Breaker,
                            st.lists(tokens, min_size=1, max_size=3).map(tuple),
                            st.lists(tokens, max_size=2).map(tuple),
                        ),
                        max_size=2,
                    ).map(tuple),
                ),
            )
        ),
        stop_token_ids=tuple(draw(st.lists(tokens, max_size=2))),
        exponential_decay_length_penalty=draw(
            st.one_of(st.none(), st.tuples(st.integers(0, 9), number(0.5, 1.5))),
        ),
        temperature=draw(st.one_of(st.just(0.0), st.just(1.0), number(0.05, 2))),
        top_n_sigma=draw(optional(number(0, 3), 0.0)),
        typical_p=draw(optional(number(0, 1), 1.0)),
        epsilon_cutoff=draw(optional(number(0, 0.3), 0.0)),
        eta_cutoff=draw(optional(number(0, 0.3), 0.0)),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 5, 40, 1000])),
        top_p=draw(optional(number(0, 1), 1.0)),
        min_p=draw(optional(number(0, 1), 0.0)),
        xtc=draw(st.one_of(st.none(), st.builds(Xtc, st.just(1.0), number(0, 0.5)))),
        mirostat=mirostat,
        sampler_order=draw(st.one_of(st.just(SAMPLER_ORDER), st.permutations(SAMPLER_ORDER).map(tuple))),
    )
    history = [tuple(draw(st.lists(tokens, max_size=12))) for _ in range(2)]
    return logits, Case(params, *history)


@given(problems())
def test_any_combination_agrees_with_the_oracle(problem):
    logits, case = problem
    if np.isfinite(oracle.constrained(logits[0].numpy(), case.params, case.prompt, case.output)).any():
        assert_agrees(logits, case)


def test_the_oracle_tells_wrong_definitions_apart():
    logits = random_logits(40, 200, seed=0)
    case = Case(SamplingParams(top_p=0.8, top_k=20))
    truth = processed(logits, [case] * 40).isfinite()
    wrong_order = [oracle.top_k(oracle.top_p(row, 0.8), 20) for row in logits.double().numpy()]
    assert not np.array_equal(truth.numpy(), np.isfinite(wrong_order))


HISTORY = torch.tensor([[*PROMPT, *OUTPUT]])
HUGGING_FACE = {
    "top_k": (SamplingParams(top_k=7), hf.TopKLogitsWarper(7)),
    "top_p": (SamplingParams(top_p=0.87), hf.TopPLogitsWarper(0.87)),
    "min_p": (SamplingParams(min_p=0.07), hf.MinPLogitsWarper(0.07)),
    "typical_p": (SamplingParams(typical_p=0.83), hf.TypicalLogitsWarper(0.83)),
    "epsilon_cutoff": (SamplingParams(epsilon_cutoff=0.02), hf.EpsilonLogitsWarper(0.02)),
    "epsilon_cutoff high": (SamplingParams(epsilon_cutoff=0.9), hf.EpsilonLogitsWarper(0.9)),
    "eta_cutoff": (SamplingParams(eta_cutoff=0.01), hf.EtaLogitsWarper(0.01)),
    "eta_cutoff high": (SamplingParams(eta_cutoff=0.9), hf.EtaLogitsWarper(0.9)),
    "length penalty": (
        SamplingParams(stop_token_ids=(2, 12), exponential_decay_length_penalty=(4, 1.3)),
        hf.ExponentialDecayLengthPenalty((4, 1.3), [2, 12], len(PROMPT)),
    ),
    "length penalty not yet": (
        SamplingParams(stop_token_ids=(2, 12), exponential_decay_length_penalty=(7, 1.3)),
        hf.ExponentialDecayLengthPenalty((7, 1.3), [2, 12], len(PROMPT)),
    ),
    "temperature": (SamplingParams(temperature=0.6), hf.TemperatureLogitsWarper(0.6)),
    "repetition": (SamplingParams(repetition_penalty=1.3), hf.RepetitionPenaltyLogitsProcessor(1.3)),
    "ngram 1": (SamplingParams(no_repeat_ngram_size=1), hf.NoRepeatNGramLogitsProcessor(1)),
    "ngram 3": (SamplingParams(no_repeat_ngram_size=3), hf.NoRepeatNGramLogitsProcessor(3)),
    "bad words": (
        SamplingParams(bad_words=((6,), (3, 5, 1), (9, 5, 0))),
        hf.NoBadWordsLogitsProcessor([[6], [3, 5, 1], [9, 5, 0]]),
    ),
}


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_each_setting_agrees_with_transformers(name):
    params, reference = HUGGING_FACE[name]
    logits = random_logits(12, 1003, seed=12)
    mine = processed(logits, [Case(params, PROMPT, OUTPUT)] * 12)
    theirs = reference(HISTORY.expand(12, -1), logits.clone())
    assert torch.equal(mine.isfinite(), theirs.isfinite())
    torch.testing.assert_close(mine.softmax(-1), theirs.softmax(-1))


@pytest.mark.parametrize(
    ("params", "logits", "support"),
    [
        (SamplingParams(top_k=2), [1, 3, 2, 2, 0], {1, 2, 3}),  # ties with the last stay
        (SamplingParams(top_k=1), [5, 5, 5, 5], {0, 1, 2, 3}),
        (SamplingParams(top_p=0.5), [0] * 8, {0, 1, 2, 3}),  # ties go by id, and the mass is met exactly
        (SamplingParams(top_p=0.51), [0] * 8, {0, 1, 2, 3, 4}),
        (SamplingParams(top_p=0.0), [1, 4, 4, 2], {1}),
        (SamplingParams(top_p=0.9), [-math.inf, -math.inf, 0, -math.inf], {2}),
        (SamplingParams(typical_p=0.2), [0] * 8, set(range(8))),
        (SamplingParams(typical_p=0.2), [-math.inf, 0, -math.inf], {1}),
        (SamplingParams(min_p=1.0), [2, 7, 7, 1], {1, 2}),
        (SamplingParams(temperature=1e-3, top_p=0.9), [1e4, -1e4, 1e4, 0], {0, 2}),
        (SamplingParams(temperature=1e-3, min_p=0.1), [1e4, 9999, -math.inf, 1e4], {0, 3}),
        (SamplingParams(temperature=1e-320), [1, 2, 2, -3], {1, 2}),
        (SamplingParams(top_p=1 - 1e-16), [0, 1, -math.inf, 2], {0, 1, 3}),
        (SamplingParams(top_k=3, top_p=0.7), [0] * 3 + [-9] * 5, {0, 1, 2}),  # mass after top_k: a third each
        (SamplingParams(top_n_sigma=1e-9), [3, 3, 1, -math.inf], {0, 1}),
        (SamplingParams(top_n_sigma=1.0), [2] * 5, {0, 1, 2, 3, 4}),  # no deviation, and all are the highest
        (SamplingParams(top_n_sigma=1.0), [-math.inf, 2, -math.inf], {1}),
        (SamplingParams(epsilon_cutoff=0.999), [4, 4, 1], {0, 1}),
        (SamplingParams(eta_cutoff=0.999), [-math.inf, 4, -math.inf, 1], {1}),
        (SamplingParams(xtc=Xtc(1.0, 0.2)), [0, 0, 0, -9], {2, 3}),  # of equals the last stays
        (SamplingParams(xtc=Xtc(1.0, 0.2)), [9, -math.inf, 0], {0, 2}),  # one top choice is no choice
        (SamplingParams(xtc=Xtc(1.0, 0.0)), [9, -math.inf, 0, 1], {2}),
        (SamplingParams(mirostat=Mirostat(tau=0.0)), [1, 5, 5, 0], {1}),  # of equals the first stays
        (SamplingParams(mirostat=Mirostat(tau=1.0)), [0] * 4, {0, 1, 2, 3}),  # 2 bits each, as much as mu
        (SamplingParams(mirostat=Mirostat(tau=1.0)), [-math.inf, 0, -math.inf], {1}),
        (SamplingParams(temperature=2, min_p=0.2, sampler_order=("temperature", "min_p")), [3, 0, -9], {0, 1}),
        (SamplingParams(temperature=2, min_p=0.2, sampler_order=("min_p", "temperature")), [3, 0, -9], {0}),
    ],
)
def test_support_at_the_edges(params, logits, support):
    result = processed(torch.tensor([logits], dtype=torch.float32), [Case(params)])[0]
    assert set(result.isfinite().nonzero().flatten().tolist()) == support
    assert not result.isnan().any()


def test_a_long_flat_tail_is_not_lost():
    """Most of what is kept is far less probable than the head, and must be sorted nevertheless."""
    logits = torch.full((1, 100_001), math.log(0.1 / 100_000))
    logits[0, 7] = math.log(0.9)
    assert processed(logits, [Case(SamplingParams(typical_p=0.95))]).isfinite().all()
    nucleus = processed(logits, [Case(SamplingParams(top_p=0.95))])[0].isfinite().nonzero().flatten().tolist()
    assert nucleus == list(range(len(nucleus)))
    assert len(nucleus) == pytest.approx(50_001, abs=2)


@pytest.mark.parametrize("z", [-3.0, 3.0])
def test_the_largest_penalties_on_the_same_token_leave_it_finite(z):
    """DRY takes 1e30 from the end of output 1, and the length penalty multiplies that with 1e30."""
    params = SamplingParams(
        stop_token_ids=(1,), dry=Dry(100.0, 100.0, 1), exponential_decay_length_penalty=(0, 100.0), bad_words=((2,),)
    )
    story = (1,) * 100
    logits = torch.full((1, 4), z)
    result = processed(logits, [Case(params, story, story)])[0]
    assert result.tolist() == [z, torch.finfo(torch.float32).max, -math.inf, z]


def test_nothing_changes_with_default_settings():
    rows = rows_of([Case(SamplingParams(), PROMPT, OUTPUT), Case(SamplingParams(temperature=0), PROMPT)], 25)
    logits = random_logits(2, 25, seed=1)
    assert constrained(logits, rows) is logits
    assert not rows.truncations


@pytest.mark.parametrize("vocab_size", [25, 1003, 40_001])
def test_mixed_settings_in_one_batch_equal_each_alone_bit_by_bit(vocab_size):
    cases = [Case(params, PROMPT, OUTPUT) for params in SETTINGS.values()]
    cases += [Case(SamplingParams()), Case(SamplingParams(temperature=0))]
    logits = random_logits(len(cases), vocab_size, seed=4)
    before = logits.clone()
    together = processed(logits, cases)
    assert torch.equal(logits, before)  # the model's own logits are kept for logprobs
    for row, case in enumerate(cases):
        assert torch.equal(together[row : row + 1], processed(logits[row : row + 1], [case])), case.params
    assert torch.equal(together[-2:], logits[-2:])
