"""The definitions of sampling once more: one row at a time, in float64 numpy, with no thought of speed."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from model_runner.contract import SamplingParams

Vector = NDArray[np.float64]


def softmax(logits: Vector) -> Vector:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


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
    return z


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


def truncated(z: Vector, params: SamplingParams) -> Vector:
    if params.temperature == 0:
        return z
    z = z / params.temperature
    if params.typical_p < 1:
        z = typical(z, params.typical_p)
    if params.top_k > 0:
        z = top_k(z, params.top_k)
    if params.top_p < 1:
        z = top_p(z, params.top_p)
    if params.min_p > 0:
        z = min_p(z, params.min_p)
    return z


def final(logits: Vector, params: SamplingParams, prompt: Sequence[int] = (), output: Sequence[int] = ()) -> Vector:
    """The logits that are sampled from; -inf outside the support."""
    return truncated(constrained(logits, params, prompt, output), params)
