"""The sampler as a whole: frequencies, sameness in a crowd, errors, logprobs."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from model_runner.contract import Failure, Mirostat, SamplingParams, Xtc
from model_runner.sampling.noise import Stream, noise_key, uniform
from model_runner.sampling.rows import SamplingState
from model_runner.sampling.sampler import NO_TOKEN, Picks, Sampler
from tests.model_runner.oracles.draw import GumbelMax, TorchDraw

from . import oracle
from .cases import OUTPUT, PROMPT, SETTINGS
from .harness import ALPHA, CPU, Case, chi_square_p, random_logits, rows_of

VOCAB = 25
DRAWS = 20_000


def sample(logits: torch.Tensor, cases: list[Case], mode: str = "raw") -> Picks:
    return Sampler(TorchDraw(logits.shape[-1], CPU), mode)(logits, rows_of(cases, logits.shape[-1]))


def draws(logits: torch.Tensor, case: Case, count: int = DRAWS) -> tuple[int, ...]:
    """Samples of the same row with seeds from 0."""
    cases = [replace(case, params=replace(case.params, seed=seed)) for seed in range(count)]
    return sample(logits.expand(count, -1), cases).tokens


def part_of(picks: Picks, rows: slice) -> Picks:
    return Picks(picks.tokens[rows], picks.logprobs[rows], picks.errors[rows], picks.surprises[rows])


FREQUENCIES = {
    "default": SamplingParams(),
    "warm": SamplingParams(temperature=1.6),
    "typical_p": SamplingParams(typical_p=0.8),
    "top_k": SamplingParams(top_k=6),
    "top_p": SamplingParams(top_p=0.9),
    "min_p": SamplingParams(min_p=0.05),
    "top_n_sigma": SamplingParams(top_n_sigma=1.2),
    "eta_cutoff": SamplingParams(eta_cutoff=0.1),
    "mirostat": SamplingParams(mirostat=Mirostat(tau=3.0)),
    "everything": replace(SETTINGS["everything"], choice=3),
}


@pytest.mark.parametrize("name", FREQUENCIES)
def test_tokens_come_as_often_as_the_oracle_says(name):
    logits = random_logits(1, VOCAB, seed=20, scale=1.5)
    case = Case(FREQUENCIES[name], PROMPT, OUTPUT)
    probs = oracle.softmax(oracle.final(logits[0].double().numpy(), case.params, PROMPT, OUTPUT))
    tokens = draws(logits, case)
    assert set(tokens) == set(np.flatnonzero(probs).tolist())
    assert chi_square_p(tokens, probs) > ALPHA
    colder = oracle.softmax(np.log(np.maximum(probs, 1e-300)) / 0.89) * (probs > 0)
    assert chi_square_p(tokens, colder) < ALPHA  # the same test finds a temperature that is 11% off


def test_xtc_mixes_two_distributions():
    logits = random_logits(1, VOCAB, seed=20, scale=1.5)
    z = logits[0].double().numpy()
    with_top, without = oracle.softmax(z), oracle.softmax(oracle.xtc(z, 0.1))
    tokens = draws(logits, Case(SamplingParams(xtc=Xtc(0.4, 0.1))))
    assert chi_square_p(tokens, 0.6 * with_top + 0.4 * without) > ALPHA
    assert chi_square_p(tokens, 0.5 * with_top + 0.5 * without) < ALPHA
    for seed in range(50):
        excluded = uniform(noise_key(seed, 0, Stream.XTC, 0), 0) < 0.4
        assert not excluded or np.isfinite(oracle.xtc(z, 0.1))[tokens[seed]]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_surprise_is_that_of_what_the_token_was_drawn_from(temperature):
    params = SamplingParams(mirostat=Mirostat(tau=1.1), temperature=temperature)
    logits = random_logits(30, VOCAB, seed=3, scale=2.0)
    picks = sample(logits, [Case(replace(params, seed=seed)) for seed in range(30)])
    for row, (token, surprise) in enumerate(zip(picks.tokens, picks.surprises, strict=True)):
        probs = oracle.softmax(oracle.final(logits[row].double().numpy(), params))
        assert surprise == pytest.approx(-np.log2(probs[token]), abs=1e-5)
    others = sample(logits[:2], [Case(SamplingParams(top_k=3)), Case(replace(params, temperature=0.0))])
    assert others.surprises == (None, None)


def test_mirostat_holds_the_surprise_at_its_target():
    """Where a flat distribution would surprise by 8 bits."""
    state = SamplingState(1, 256, CPU)
    state.admit(0, SamplingParams(mirostat=Mirostat(tau=4.0, eta=0.1)), PROMPT)
    sampler = Sampler(TorchDraw(256, CPU))
    surprises = []
    for step in range(600):
        picks = sampler(random_logits(1, 256, seed=step, scale=1.5), state.rows([0]))
        state.commit(0, picks.tokens[0], picks.surprises[0])
        surprises.append(picks.surprises[0])
    assert np.mean(surprises[100:]) == pytest.approx(4.0, abs=0.15)


def test_successive_positions_and_choices_draw_independently():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]]))
    base = draws(logits, Case(SamplingParams()), 20_000)
    others = [
        draws(logits, Case(SamplingParams(), output=(0,)), 20_000),
        draws(logits, Case(SamplingParams(choice=1)), 20_000),
    ]
    joint = np.outer([0.5, 0.3, 0.2], [0.5, 0.3, 0.2]).flatten()
    for other in others:
        assert chi_square_p([3 * a + b for a, b in zip(base, other, strict=True)], joint) > ALPHA
    assert chi_square_p([3 * a + a for a in base], joint) < ALPHA


@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("vocab_size", [25, 1003, 40_001])
def test_a_crowd_of_mixed_settings_equals_each_alone(vocab_size, mode):
    cases = [
        Case(replace(params, seed=seed, logprobs=(None, 0, 5)[seed % 3]), PROMPT, OUTPUT)
        for seed, params in enumerate([*SETTINGS.values(), SamplingParams(), SamplingParams(temperature=0)])
    ]
    logits = random_logits(len(cases), vocab_size, seed=5)
    crowd = sample(logits, cases, mode)
    backwards = sample(logits.flip(0), cases[::-1], mode)
    assert crowd == part_of(backwards, slice(None, None, -1))
    for row, case in enumerate(cases):
        alone = sample(logits[row : row + 1], [case], mode)
        assert alone == part_of(crowd, slice(row, row + 1))


def test_the_number_of_threads_does_not_matter():
    cases = [Case(replace(params, logprobs=3), PROMPT, OUTPUT) for params in SETTINGS.values()]
    logits = random_logits(len(cases), 49_152, seed=6)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results += [sample(logits, cases), sample(logits[15:16], cases[15:16])]
    finally:
        torch.set_num_threads(before)
    assert results[0] == results[2] == results[4]
    assert results[1] == results[3] == results[5]
    assert results[1].logprobs[0] == results[0].logprobs[15]


def test_greedy_takes_the_lowest_of_equals_and_draws_no_noise(monkeypatch):
    def forbidden(*args):
        raise AssertionError("greedy rows pay for noise")

    monkeypatch.setattr(GumbelMax, "__call__", forbidden)
    logits = torch.full((3, 40_001), -1.0)
    logits[0, [40_000, 77, 39_999]] = 2.0
    logits[1, 40_000] = 0.5
    greedy = Case(SamplingParams(temperature=0, top_p=0.5, logprobs=0))
    assert sample(logits, [greedy] * 3).tokens == (77, 40_000, 0)
    assert sample(torch.tensor([[-0.0, 0.0]]), [greedy]).tokens == (0,)


def test_equal_logits_stay_a_fair_choice_at_any_temperature_and_size():
    logits = torch.tensor([[1e4, -1e4, 1e4, 0.0]])
    for case in (Case(SamplingParams(temperature=1e-3)), Case(SamplingParams())):
        assert chi_square_p(draws(logits, case, 2000), np.array([0.5, 0, 0.5, 0])) > ALPHA
    huge = torch.tensor([[1e30, 1e30]])
    assert chi_square_p(draws(huge, Case(SamplingParams()), 2000), np.array([0.5, 0.5])) > ALPHA


def test_a_single_finite_token_is_the_answer():
    cases = [Case(params, PROMPT, OUTPUT) for params in SETTINGS.values() if params.allowed_token_ids is None]
    logits = torch.full((len(cases), 1003), -math.inf)
    logits[:, 500] = -3.0
    assert set(sample(logits, cases).tokens) == {500}


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("params", [*FREQUENCIES.values(), SamplingParams(temperature=0)])
def test_a_row_that_is_not_finite_fails_alone(poison, params):
    logits = random_logits(4, VOCAB, seed=7)
    cases = [Case(replace(params, seed=seed, logprobs=2), PROMPT, OUTPUT) for seed in range(4)]
    healthy = sample(logits, cases)
    logits[1, 24] = poison  # a token that a list of allowed ones may hide
    logits[2] = -math.inf
    picks = sample(logits, cases)
    for row in (0, 3):
        assert picks.tokens[row] == healthy.tokens[row]
        assert picks.logprobs[row] == healthy.logprobs[row]
    assert picks.tokens[1:3] == (NO_TOKEN, NO_TOKEN)
    assert picks.logprobs[1:3] == (None, None)
    assert picks.errors == (None, *[Failure("the model's logits are not finite")] * 2, None)


def test_greedy_rows_that_nothing_is_asked_of_get_what_they_get_with_logprobs():
    logits = random_logits(9, VOCAB, seed=9)
    logits[1, 7], logits[2, 24], logits[3] = math.nan, math.inf, -math.inf
    logits[4, 3], logits[5, :20] = -math.inf, 99.0
    logits[6, 2:4] = torch.tensor([math.inf, math.nan])
    greedy = SamplingParams(temperature=0, top_p=0.5)
    plain = sample(logits, [Case(greedy)] * 9)
    asked = sample(logits, [Case(replace(greedy, logprobs=0))] * 9)
    assert (plain.tokens, plain.errors) == (asked.tokens, asked.errors)
    assert plain.logprobs == (None,) * 9
    assert [row for row, error in enumerate(plain.errors) if error] == [1, 2, 3, 6]
    assert sample(logits.bfloat16(), [Case(greedy)] * 9).errors == plain.errors


@pytest.mark.parametrize(
    ("params", "names"),
    [
        (SamplingParams(allowed_token_ids=(1, 2), bad_words=((1,), (2,))), "allowed_token_ids, bad_words"),
        (SamplingParams(allowed_token_ids=(2,), min_tokens=99, stop_token_ids=(2,)), "allowed_token_ids, min_tokens"),
        (SamplingParams(allowed_token_ids=(), temperature=0), "allowed_token_ids"),
        (SamplingParams(repetition_penalty=1e-40), "repetition_penalty"),
    ],
)
def test_settings_that_leave_nothing_fail_alone_and_are_named(params, names):
    logits = random_logits(3, VOCAB, seed=8).abs() + 1
    picks = sample(logits, [Case(SamplingParams()), Case(params, PROMPT, OUTPUT), Case(SamplingParams(temperature=0))])
    assert picks.tokens[1] == NO_TOKEN
    assert picks.errors == (
        None,
        Failure(f"no token can be chosen with these settings: {names}", by_request=True),
        None,
    )
    assert picks.tokens[0] == sample(logits[:1], [Case(SamplingParams())]).tokens[0]
    assert picks.tokens[2] == int(logits[2].argmax())


def test_raw_logprobs_are_before_every_processor_and_processed_ones_after():
    logits = random_logits(1, VOCAB, seed=9)
    case = Case(replace(SETTINGS["truncations"], logprobs=VOCAB), PROMPT, OUTPUT)
    raw, final = (sample(logits, [case], mode).logprobs[0] for mode in ("raw", "processed"))
    z = logits[0].double().numpy()
    raw_truth = np.log(oracle.softmax(z))
    final_truth = oracle.softmax(oracle.final(z, case.params, PROMPT, OUTPUT))
    np.testing.assert_allclose([value for _, value in sorted(raw.top)], raw_truth, atol=1e-5)
    np.testing.assert_allclose(np.exp([value for _, value in sorted(final.top)]), final_truth, atol=1e-5)
    assert raw.token_id == final.token_id
    assert min(value for _, value in final.top) == -9999.0


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_listed_tokens_are_reported_in_place_of_the_best(mode):
    logits = random_logits(3, VOCAB, seed=9)
    params = replace(SETTINGS["truncations"], logprobs=2)
    cases = [Case(replace(params, logprobs=count), PROMPT, OUTPUT) for count in (VOCAB, 0, 2)]
    cases[1] = Case(replace(cases[1].params, logprob_token_ids=(7, 3, 7)), PROMPT, OUTPUT)
    reports = sample(logits[:1].expand(3, -1), cases, mode).logprobs
    everything = dict(reports[0].top)
    assert reports[1].top == tuple((token, everything[token]) for token in (7, 3, 7))
    assert reports[2].top == reports[0].top[:2]
    assert len({(report.token_id, report.logprob, report.rank) for report in reports}) == 1


def test_processed_logprobs_of_a_greedy_row_ignore_what_it_ignores():
    logits = random_logits(1, VOCAB, seed=10)
    settings = SamplingParams(temperature=0, top_k=1, top_p=0.1, frequency_penalty=0.5, logprobs=VOCAB)
    report = sample(logits, [Case(settings, PROMPT, OUTPUT)], "processed").logprobs[0]
    z = oracle.constrained(logits[0].double().numpy(), settings, PROMPT, OUTPUT)
    np.testing.assert_allclose([value for _, value in sorted(report.top)], np.log(oracle.softmax(z)), atol=1e-5)
    assert report.token_id == int(z.argmax())
    assert report.rank == 1


def test_half_precision_logits_are_taken_and_no_rows_is_fine():
    logits = random_logits(6, VOCAB, seed=11).bfloat16()
    cases = [Case(replace(params, logprobs=2)) for params in list(FREQUENCIES.values())[:6]]
    assert sample(logits, cases) == sample(logits.float(), cases)
    state = SamplingState(1, VOCAB, CPU)
    assert Sampler(TorchDraw(VOCAB, CPU))(torch.empty(0, VOCAB), state.rows([])) == Picks((), (), (), ())
