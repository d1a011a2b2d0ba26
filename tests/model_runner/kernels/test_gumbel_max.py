"""The native draw gives the tokens of the one in torch, bit for bit."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_runner.kernels.library import Kernels
from model_runner.sampling.noise import Stream, noise_key
from tests.model_runner.oracles.draw import GumbelMax, gumbel

CPU = torch.device("cpu")
WORD = 1 << 64
GOLDEN = 0x9E3779B97F4A7C15
TEMPERATURES = (1.0, 0.7, 1.3, 2.0, 0.01, 1e-30, 1e-320, 1e30)
SIZES = (1, 2, 15, 16, 17, 63, 64, 65, 1000, 49_152)


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def keys_of(count: int, seed: int = 0) -> list[int]:
    """Keys for many seeds, choices and positions."""
    return [noise_key(seed * 7919 + i, i % 5, Stream.TARGET, i * i) for i in range(count)]


def divided(logits: Tensor, temperature: float) -> Tensor:
    """As sampling.truncations does."""
    old = logits.double()
    return ((old - old.amax(-1, keepdim=True)) / temperature).float() if temperature != 1 else logits


def native(kernels: Kernels, logits: Tensor, keys: list[int], temperature: float = 1.0) -> list[int]:
    return picked(kernels, logits, [(row, key, temperature) for row, key in enumerate(keys)])


def picked(
    kernels: Kernels, logits: Tensor, draws: Sequence[tuple[int, int, float]], masks: NDArray[np.int32] | None = None
) -> list[int]:
    """By row, key and temperature."""
    keys = np.array([key for _, key, _ in draws], dtype=np.uint64)
    temperatures = np.array([temperature for _, _, temperature in draws])
    tokens: list[int] = kernels.pick(logits, keys, temperatures, [row for row, _, _ in draws], masks).tolist()
    return tokens


def drawn(logits: Tensor, keys: list[int], temperature: float = 1.0) -> list[int]:
    """The tokens that torch draws."""
    return GumbelMax(logits.shape[1], CPU)(divided(logits, temperature), keys)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("size", SIZES)
def test_draws_what_torch_draws(all_kernels: list[Kernels], size: int, temperature: float) -> None:
    count = 12 if size > 10_000 else 200
    for seed, scale in enumerate((0.0, 0.1, 3.0, 20.0, 1e4, 1e-42, 1e30)):
        logits = random(count, size, seed=seed, scale=scale)
        logits[1::3, 1::2] = -math.inf
        logits[2::3] = logits[2::3].round()
        keys = keys_of(count, seed)
        expected = drawn(logits, keys, temperature)
        for kernels in all_kernels:
            assert native(kernels, logits, keys, temperature) == expected, kernels.isa


@pytest.mark.parametrize("size", [2, 17, 1000])
def test_many_draws(all_kernels: list[Kernels], size: int) -> None:
    logits = random(1, size, seed=size, scale=3.0).expand(20_000, -1).contiguous()
    for seed, temperature in ((1, 1.0), (2, 0.8)):
        keys = keys_of(20_000, seed)
        expected = drawn(logits, keys, temperature)
        for kernels in all_kernels:
            assert native(kernels, logits, keys, temperature) == expected, kernels.isa


def test_a_single_finite_logit_wins_wherever_it_is(kernels: Kernels) -> None:
    logits = torch.full((131, 131), -math.inf)
    for value in (-1e38, 0.0, 5.0, torch.finfo(torch.float32).max):
        for temperature in TEMPERATURES:
            assert native(kernels, logits.fill_diagonal_(value), keys_of(131), temperature) == list(range(131))


def test_logits_so_far_apart_that_their_difference_is_no_float(kernels: Kernels) -> None:
    logits = random(300, 33).sign() * torch.finfo(torch.float32).max
    for temperature in (1.0, 0.5, 1e30, 1e39):
        assert native(kernels, logits, keys_of(300), temperature) == drawn(logits, keys_of(300), temperature)


def test_rows_are_independent_and_may_be_drawn_from_in_any_order(kernels: Kernels, kernels_library: Path) -> None:
    logits, keys = random(40, 999, scale=2.0), keys_of(40)
    temperatures = [TEMPERATURES[row % 4] for row in range(40)]
    draws = list(zip(range(40), keys, temperatures, strict=True))
    alone = [picked(kernels, logits[row : row + 1], [(0, key, heat)])[0] for row, key, heat in draws]
    shuffled = [*draws[::-3], *draws[::2], draws[7]]
    for threads in (1, 2, 3):
        team = Kernels(kernels_library, threads, kernels.isa)
        assert picked(team, logits, draws) == alone
        assert picked(team, logits, shuffled) == [alone[row] for row, _, _ in shuffled]
    assert picked(kernels, logits, []) == []


def test_without_a_temperature_the_first_of_the_highest_wins(kernels: Kernels) -> None:
    for size in SIZES:
        logits = random(30, size, seed=size).round()
        logits[::3, : size // 2] = -math.inf
        assert native(kernels, logits, keys_of(30), 0.0) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_has_no_finite_highest_logit_has_no_token(kernels: Kernels, temperature: float) -> None:
    for size in (1, 17, 1000):
        for place in {0, size // 2, size - 1}:
            logits = random(4, size, seed=size)
            logits[0, place], logits[1, place], logits[2] = math.nan, math.inf, -math.inf
            tokens = native(kernels, logits, keys_of(4), temperature)
            assert tokens[:3] == [-1, -1, -1]
            assert tokens[3] >= 0


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("size", [*SIZES, 64 + 33, 64 + 40])
def test_masks_hide_tokens_and_whatever_their_logits_are(kernels: Kernels, size: int, temperature: float) -> None:
    count = 30
    allowed = random(count, size, seed=7) > 0.5
    allowed[0] = False
    words = np.zeros((count, -(-size // 32) * 32), dtype=np.bool_)
    words[:, :size] = allowed.numpy()
    masks = np.packbits(words, axis=1, bitorder="little").view(np.int32)
    logits = random(count, size, seed=size, scale=3.0)
    hidden = logits.masked_fill(~allowed, -math.inf)
    logits[1::2] = logits[1::2].masked_fill(~allowed[1::2], math.nan)
    draws = [(row, key, temperature) for row, key in enumerate(keys_of(count))]
    assert picked(kernels, logits, draws, masks) == picked(kernels, hidden, draws)
    assert picked(kernels, logits, draws[5:9], masks[5:9]) == picked(kernels, hidden, draws[5:9])


def undo_xorshift(x: int, bits: int) -> int:
    result = x
    for _ in range(64 // bits):
        result = x ^ (result >> bits)
    return result


def key_with(token: int, word: int) -> int:
    """The key with which this token's hash is this word."""
    x = undo_xorshift(word, 31) * pow(0x94D049BB133111EB, -1, WORD) % WORD
    x = undo_xorshift(x, 27) * pow(0xBF58476D1CE4E5B9, -1, WORD) % WORD
    return (undo_xorshift(x, 30) - (token + 1) * GOLDEN) % WORD


RARE_HASHES = [WORD - 1, WORD - (1 << 12), WORD - (1 << 13), 0, 1 << 63]
RARE_HASHES += [WORD - (1 << bits) + offset for bits in (20, 33, 34, 35, 40, 58, 63) for offset in (-1, 0, 1)]


@pytest.mark.parametrize("word", RARE_HASHES)
def test_hashes_that_no_search_would_find(kernels: Kernels, word: int) -> None:
    """Among them the highest noise that there is: a bound that is too low would lose the token."""
    token, size = 70, 150
    key = key_with(token, word)
    noise = [gumbel(key, other) for other in range(size)]
    assert max(noise) <= 36.75
    others = [[place for place in range(size) if place != token], [*range(64), *range(128, size)]]
    for known in others:  # in the second case, the token is the only one of its block that could win
        rival = max(noise[other] for other in known)
        for margin in (-0.5, -2e-3, -1e-5, 1e-5, 2e-3, 0.5):
            logits = torch.full((1, size), -1000.0)
            logits[0, known] = 0.0
            logits[0, token] = rival - noise[token] + margin
            assert native(kernels, logits, [key]) == GumbelMax(size, CPU)(logits, [key])
            assert (native(kernels, logits, [key]) == [token]) == (margin > 0)


def test_the_inverse_of_the_hash_is_one() -> None:
    for word in RARE_HASHES:
        uniform = ((word >> 12) + 0.5) * 2.0**-52
        assert gumbel(key_with(70, word), 70) == pytest.approx(-math.log(-math.log(uniform)), rel=1e-14)


def near_pairs(key: int, size: int) -> list[tuple[int, int]]:
    """Pairs of tokens whose noise differs by less than 1e-8."""
    x = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(GOLDEN) + np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    noise = -np.log(-np.log(((x >> np.uint64(12)) + 0.5) * 2.0**-52))
    order = noise.argsort()
    near = np.flatnonzero(np.diff(noise[order]) < 1e-8)
    return list(zip(order[near].tolist(), order[near + 1].tolist(), strict=True))


def test_equal_scores_go_to_the_lowest_token(kernels: Kernels) -> None:
    """Where the noise of two tokens differs by what is a float, that logit makes their scores equal."""
    size, (key,) = 200_000, keys_of(1)
    first = []
    for low, high in near_pairs(key, size):
        difference = gumbel(key, low) - gumbel(key, high)
        if float(np.float32(difference)) != difference or difference + gumbel(key, high) != gumbel(key, low):
            continue
        first.append(low < high)
        logits = torch.full((1, size), -math.inf)
        logits[0, low], logits[0, high] = 0.0, difference
        assert native(kernels, logits, [key]) == [min(low, high)]
        assert GumbelMax(size, CPU)(logits, [key]) == [min(low, high)]
    assert min(first.count(True), first.count(False)) > 5
