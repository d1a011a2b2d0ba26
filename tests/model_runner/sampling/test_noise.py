"""Noise: known answers, uniformity, independence, and the pick against plain argmax(log p + g)."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from model_runner.sampling.noise import Stream, gumbels, noise_key, noise_keys, noise_state
from tests.model_runner.oracles.draw import GumbelMax, gumbel

from .harness import ALPHA, CPU, random_logits

WORD = 1 << 64


def splitmix_outputs(seed: int, count: int) -> list[int]:
    """SplitMix64 as a sequential generator, after the paper."""
    outputs, state = [], seed
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % WORD
        z = state
        z = (z ^ (z // 2**30)) * 0xBF58476D1CE4E5B9 % WORD
        z = (z ^ (z // 2**27)) * 0x94D049BB133111EB % WORD
        outputs.append(z ^ (z // 2**31))
    return outputs


def uniforms(key: int, count: int) -> np.ndarray:
    return np.array([((h >> 12) + 0.5) / 2.0**52 for h in splitmix_outputs(key, count)])


def key_of(seed: int = 0, choice: int = 0, position: int = 0) -> int:
    return noise_key(seed, choice, Stream.TARGET, position)


def test_the_reference_generator_gives_the_published_outputs():
    assert splitmix_outputs(1234567, 3) == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("words", [(0, 0, 0), (1, 2, 3), (WORD - 1, 127, 100_000)])
def test_a_key_is_a_chain_of_generators(words):
    seed, choice, position = words
    key = (0 + (seed + 1) * 0x9E3779B97F4A7C15 - 0x9E3779B97F4A7C15) % WORD
    key = splitmix_outputs(key, 1)[0]
    key = splitmix_outputs(key, choice + 1)[-1]
    key = splitmix_outputs(key, 1)[0]  # the stream TARGET is 0
    key = splitmix_outputs(key, position + 1)[-1]
    assert noise_key(seed, choice, Stream.TARGET, position) == key


def test_keys_of_many_rows_are_those_of_each():
    words = [(seed, choice, stream) for seed in (0, 7, 1 << 63, WORD - 1) for choice in (0, 127) for stream in Stream]
    states = np.array([noise_state(*of_row) for of_row in words], dtype=np.uint64)
    positions = np.arange(len(words)) * 5003
    expected = [noise_key(*of_row, position) for of_row, position in zip(words, positions.tolist(), strict=True)]
    assert noise_keys(states, positions).tolist() == expected
    assert len(set(expected)) == len(words)


@pytest.mark.parametrize("key", [0, 1, key_of(7), WORD - 1, 1 << 63])
def test_noise_of_each_token_is_the_generators_output(key):
    expected = [-math.log(-math.log(u)) for u in uniforms(key, 200)]
    noise = [gumbel(key, token) for token in range(200)]
    assert noise == pytest.approx(expected, rel=1e-14, abs=1e-15)
    assert gumbels(key, np.arange(200)).tolist() == noise


@pytest.mark.parametrize("key", [0, key_of(7), WORD - 1, 1 << 63])
def test_tensor_hashes_equal_integer_hashes(key):
    remainders = GumbelMax(5000, CPU)._log_remainders([key], None)[0]
    exact = np.log1p(-uniforms(key, 5000))
    np.testing.assert_allclose(remainders.numpy(), exact, rtol=1e-6, atol=1e-5)


def test_the_extreme_hashes_have_finite_noise():
    for k in (0, 2**52 - 1):
        u = (k + 0.5) * 2.0**-52
        assert 0 < u < 1
        assert math.isfinite(-math.log(-math.log(u)))
    assert (2**53 - 1 + 0.5) * 2.0**-53 == 1.0  # why there are 52 bits and not 53


def test_uniform_over_tokens_positions_seeds_and_choices():
    samples = [
        uniforms(key_of(5), 40_000),
        np.array([uniforms(key_of(5, position=i), 1)[0] for i in range(40_000)]),
        np.array([uniforms(key_of(i), 1)[0] for i in range(40_000)]),
        np.array([uniforms(key_of(5, choice=i), 1)[0] for i in range(5_000)]),
    ]
    for sample in samples:
        assert stats.kstest(sample, "uniform").pvalue > ALPHA
        low_bits = (sample * 2**40) % 1
        assert stats.kstest(low_bits, "uniform").pvalue > ALPHA
    assert stats.kstest(samples[0] ** 1.05, "uniform").pvalue < ALPHA


def test_independent_across_tokens_positions_choices_and_seeds():
    base = uniforms(key_of(5), 20_000)
    others = [
        np.roll(base, 1),
        uniforms(key_of(5, position=1), 20_000),
        uniforms(key_of(5, choice=1), 20_000),
        uniforms(key_of(6), 20_000),
    ]
    for other in others:
        assert abs(stats.spearmanr(base, other).statistic) < 0.03
        table = np.histogram2d(base, other, bins=12)[0]
        assert stats.chi2_contingency(table).pvalue > ALPHA
    leaky = (base * 0.1 + others[1]) % 1.05
    assert stats.chi2_contingency(np.histogram2d(base, leaky, bins=12)[0]).pvalue < ALPHA


@pytest.mark.parametrize(
    ("vocab_size", "scale"), [(1, 1.0), (2, 1.0), (33, 0.0), (1003, 0.1), (1003, 3.0), (5000, 20.0), (1003, 1e4)]
)
def test_pruning_never_changes_the_pick(vocab_size, scale):
    logits = random_logits(150, vocab_size, seed=vocab_size, scale=scale)
    logits[::3, 1::2] = -math.inf
    keys = [key_of(seed) for seed in range(len(logits))]
    picks = GumbelMax(vocab_size, CPU)(logits, keys)
    for row, (pick, key) in enumerate(zip(picks, keys, strict=True)):
        z = logits[row].numpy().astype(np.float64)
        assert pick == int(np.argmax(z - z.max() - np.log(-np.log(uniforms(key, vocab_size)))))


def test_a_subset_of_columns_gives_the_pick_of_the_masked_vocabulary():
    logits = random_logits(64, 1003, seed=3)
    keys = [key_of(seed) for seed in range(64)]
    noise = GumbelMax(1003, CPU)
    columns = torch.stack([torch.randperm(1003)[:40].sort().values for _ in range(64)])
    masked = torch.full_like(logits, -math.inf).scatter(1, columns, logits.gather(1, columns))
    assert noise(masked, keys) == noise(logits.gather(1, columns), keys, columns)


def test_equal_scores_go_to_the_lowest_id(monkeypatch):
    monkeypatch.setattr("tests.model_runner.oracles.draw.gumbel", lambda key, token: 0.5)
    monkeypatch.setattr(GumbelMax, "_log_remainders", lambda self, keys, tokens: torch.tensor(-1.0))
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
    assert GumbelMax(4, CPU)(logits, [0, 1]) == [1, 0]
