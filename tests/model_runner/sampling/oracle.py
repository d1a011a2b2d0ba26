"""The definitions of sampling once more: one row at a time, in float64 numpy, with no thought of speed."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from model_runner.contract import Dry, SamplingParams
from tests.model_runner.oracles.draw import gumbel

Vector = NDArray[np.float64]


def softmax(logits: Vector) -> Vector:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def pick(logits: NDArray[np.float32], key: int, temperature: float) -> int:
    """The highest logit's token, or a draw; -1 where the logits are not finite."""
    highest = logits.max().astype(np.float64)
    if not np.isfinite(highest):
        return -1
    if temperature == 0:
        return int(logits.argmax())
    with np.errstate(over="ignore"):
        relative = ((logits.astype(np.float64) - highest) / temperature).astype(np.float32)
    noise = np.array([gumbel(key, token) for token in range(len(logits))])
    return int((relative.astype(np.float64) + noise).argmax())


def banned_tokens(params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> set[int]:
    history = [*prompt, *output]
    banned = set()
    for word in params.bad_words:
        head = list(word[:-1])
        if not head or history[-len(head) :] == head:
            banned.add(word[-1])
    if len(output) < params.min_tokens:
        banned |= set(params.stop_token_ids)
    n = params.no_repeat_ngram_size
    if n and len(history) >= n - 1:
        tail = history[len(history) - (n - 1) :]
        banned |= {history[i + n - 1] for i in range(len(history) - n + 1) if history[i : i + n - 1] == tail}
    return banned


def constrained(logits: Vector, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> Vector:
    z = np.array(logits, dtype=np.float64)
    for token, bias in params.logit_bias:
        z[token] += bias
    if params.allowed_token_ids is not None:
        z[[token for token in range(len(z)) if token not in params.allowed_token_ids]] = -np.inf
    z[list(banned_tokens(params, prompt, output))] = -np.inf
    for token in {*prompt, *output}:
        factor = params.repetition_penalty
        z[token] = z[token] / factor if z[token] > 0 else z[token] * factor
    for token in set(output):
        z[token] -= output.count(token) * params.frequency_penalty + params.presence_penalty
    if params.dry is not None:
        for token, amount in dry_penalties(params.dry, [*prompt, *output]).items():
            z[token] -= amount
    if params.exponential_decay_length_penalty is not None:
        start, factor = params.exponential_decay_length_penalty
        for token in set(params.stop_token_ids):
            if len(output) > start and np.isfinite(z[token]):
                z[token] += abs(z[token]) * (factor ** (len(output) - start) - 1)
    return z


def dry_penalties(dry: Dry, history: Sequence[int]) -> dict[int, float]:
    """Penalties by token: every earlier position is compared with the end, token by token."""
    num = len(history)
    breakers = {(token, *breaker.rest) for breaker in dry.breakers for token in breaker.first}
    ends = [
        end
        for end in range(1, num + 1)
        for breaker in breakers
        if end >= len(breaker) and tuple(history[end - len(breaker) : end]) == breaker
    ]
    start = max([0 if dry.last_n == -1 else max(0, num - dry.last_n), *ends])
    window = 0 if dry.last_n == -1 else max(0, num - dry.last_n)
    longest: dict[int, int] = {}
    for place in range(num):
        length = 0
        while place - length > window and num - length > start and history[place - length - 1] == history[-length - 1]:
            length += 1
        if length >= dry.allowed_length and (history[place],) not in breakers:
            longest[history[place]] = max(length, longest.get(history[place], 0))
    return {token: dry.multiplier * dry.base ** (length - dry.allowed_length) for token, length in longest.items()}


def typical(z: Vector, mass: float) -> Vector:
    p = softmax(z)
    with np.errstate(divide="ignore", invalid="ignore"):
        logp = np.log(p)
        entropy = -np.nansum(p * logp)
    distance = np.abs(-(z - z.max() - np.log(np.exp(z - z.max()).sum())) - entropy)
    kept, total = set(), 0.0
    for token in np.argsort(distance, kind="stable"):
        if total >= mass and distance[token] > max(distance[list(kept)]):
            break
        kept.add(int(token))
        total += p[token]
    return np.where(np.isin(np.arange(len(z)), list(kept)), z, -np.inf)


def top_k(z: Vector, k: int) -> Vector:
    return np.where(z >= np.sort(z)[::-1][min(k, len(z)) - 1], z, -np.inf)


def top_p(z: Vector, mass: float) -> Vector:
    p = softmax(z)
    kept, total = [], 0.0
    for token in sorted(range(len(z)), key=lambda token: (-p[token], token)):
        if kept and total >= mass:
            break
        kept.append(token)
        total += p[token]
    return np.where(np.isin(np.arange(len(z)), kept), z, -np.inf)


def min_p(z: Vector, share: float) -> Vector:
    p = softmax(z)
    return np.where(p >= share * p.max(), z, -np.inf)


def top_n_sigma(z: Vector, n: float) -> Vector:
    finite = z[np.isfinite(z)]
    return np.where(z - z.max() >= -n * np.std(finite - z.max()), z, -np.inf)


def entropy(p: Vector) -> float:
    return -float(np.sum(p[p > 0] * np.log(p[p > 0])))


def cutoff(z: Vector, epsilon: float) -> Vector:
    p = softmax(z)
    return np.where((p >= epsilon) | (z == z.max()), z, -np.inf)


def eta(z: Vector, epsilon: float) -> Vector:
    return cutoff(z, min(epsilon, np.sqrt(epsilon) * np.exp(-entropy(softmax(z)))))


def xtc(z: Vector, threshold: float) -> Vector:
    p = softmax(z)
    top = [token for token in range(len(z)) if p[token] >= threshold and np.isfinite(z[token])]
    out = sorted(top, key=lambda token: (-z[token], token))[:-1]
    return np.where(np.isin(np.arange(len(z)), out), -np.inf, z)


def mirostat(z: Vector, mu: float) -> Vector:
    with np.errstate(divide="ignore"):
        few = -np.log2(softmax(z)) <= mu
    few[np.argmax(z)] = True
    return np.where(few, z, -np.inf)


def truncated(z: Vector, params: SamplingParams, coin: float = 0.0, mu: float | None = None) -> Vector:
    """`coin` is a uniform number for XTC."""
    if params.temperature == 0:
        return z
    excludes = params.xtc is not None and coin < params.xtc.probability
    steps: dict[str, Callable[[Vector], Vector]] = {
        "temperature": lambda z: z / params.temperature,
        "top_n_sigma": lambda z: top_n_sigma(z, params.top_n_sigma) if params.top_n_sigma > 0 else z,
        "typical_p": lambda z: typical(z, params.typical_p) if params.typical_p < 1 else z,
        "epsilon_cutoff": lambda z: cutoff(z, params.epsilon_cutoff),
        "eta_cutoff": lambda z: eta(z, params.eta_cutoff) if params.eta_cutoff > 0 else z,
        "top_k": lambda z: top_k(z, params.top_k) if params.top_k > 0 else z,
        "top_p": lambda z: top_p(z, params.top_p) if params.top_p < 1 else z,
        "min_p": lambda z: min_p(z, params.min_p),
        "xtc": lambda z: xtc(z, params.xtc.threshold) if excludes else z,
        "mirostat": lambda z: mirostat(z, 2 * params.mirostat.tau if mu is None else mu) if params.mirostat else z,
    }
    for name in params.sampler_order:
        z = steps[name](z)
    return z


def final(
    logits: Vector,
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    coin: float = 0.0,
    mu: float | None = None,
) -> Vector:
    """The logits that are sampled from; -inf outside the support."""
    return truncated(constrained(logits, params, prompt, output), params, coin, mu)
