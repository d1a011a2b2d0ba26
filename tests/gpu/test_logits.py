"""Exact mode: a row of logits is the same to the last bit, whatever else its step computes and however it is cut."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tests.conftest import VOCAB_SIZE
from tests.gpu.conftest import Load
from tests.gpu.logits import Trace, Tracer

CASES = [
    pytest.param("llama", {}, id="llama"),
    pytest.param("qwen3_moe", {}, id="qwen3_moe"),
    pytest.param("wide", {}, id="wide"),
    pytest.param("wide", {"quantization": "fp8"}, id="wide-fp8", marks=pytest.mark.cuda_only),
    pytest.param("wide", {"quantization": "int4"}, id="wide-int4"),
    pytest.param("wide", {"kv_cache_dtype": "fp8"}, id="wide-fp8-kv", marks=pytest.mark.cuda_only),
]
CACHED = 64
"""Whole blocks."""


def make_prompts(count: int) -> list[list[int]]:
    """The first is the same for every count, and long enough to be cut."""
    rng = np.random.default_rng(count)
    first = np.random.default_rng(0).integers(3, VOCAB_SIZE, 150).tolist()
    return [first, *(rng.integers(3, VOCAB_SIZE, rng.integers(CACHED + 1, 120)).tolist() for _ in range(count - 1))]


def same(traces: Sequence[Trace], expected: Sequence[Trace], start: int = 0) -> bool:
    return all(
        torch.equal(one.logits, other.logits[start:]) and one.tokens == other.tokens
        for one, other in zip(traces, expected, strict=True)
    )


def near(traces: Sequence[Trace], expected: Sequence[Trace]) -> bool:
    """Nearly the same logits, as far as the tokens before them are the same."""
    errors = []
    for one, other in zip(traces, expected, strict=True):
        pairs = zip(one.tokens, other.tokens, strict=True)
        rows = next((place + 1 for place, (a, b) in enumerate(pairs) if a != b), len(one.rows))
        found, wanted = one.logits[:rows].double(), other.logits[:rows].double()
        errors.append((found - wanted).norm(dim=-1) / wanted.norm(dim=-1))
    return torch.cat(errors).median().item() < 0.05


@pytest.mark.parametrize(("family", "settings"), CASES)
def test_rows_do_not_depend_on_their_step(
    family: str, settings: dict[str, str], load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracer = Tracer(load(family, **settings).runner, monkeypatch)
    (alone,) = tracer.trace(make_prompts(1))
    assert alone.logits.shape == (150, VOCAB_SIZE)
    assert alone.logits.isfinite().all()
    for count in (2, 17, 64):  # in a crowd
        assert same(tracer.trace(make_prompts(count))[:1], [alone]), count
    for chunk in (1, 7, 100):  # in chunks, alone and in a crowd
        assert same(tracer.trace(make_prompts(1), chunk=chunk), [alone]), chunk
        assert same(tracer.trace(make_prompts(3), chunk=chunk)[:1], [alone]), chunk
    for computed in (32, CACHED):  # after what is in the cache already
        before = tracer.trace(make_prompts(4))
        after = tracer.trace(make_prompts(4), computed=computed)
        assert same(after, before, computed), computed


def test_the_comparison_can_fail(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    tracer = Tracer(load("llama").runner, monkeypatch)
    prompt = make_prompts(1)[0]
    (one,), (other,) = tracer.trace([prompt]), tracer.trace([[prompt[0] + 1, *prompt[1:]]])
    assert not same([one], [other])
    assert not near([one], [other])
    assert near([one], [one])


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe", "wide"])
def test_decoding_gives_the_logits_of_the_whole_text(family: str, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    tracer = Tracer(load(family).runner, monkeypatch)
    prompts = make_prompts(4)
    decoded = tracer.trace(prompts, decoded=20)
    texts = [[*prompt, *trace.tokens[:-1]] for prompt, trace in zip(prompts, decoded, strict=True)]
    whole = tracer.trace(texts)
    for prompt, one, other in zip(prompts, decoded, whole, strict=True):
        assert torch.equal(one.logits, other.logits[len(prompt) - 1 :])


@pytest.mark.cuda_only
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe", "wide"])
def test_a_replayed_graph_computes_what_single_launches_do(
    family: str, exact: bool, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed = Tracer(load(family, exact=exact).runner, monkeypatch)
    launched = Tracer(load(family, exact=exact, cuda_graphs=False).runner, monkeypatch)
    for count in (1, 2, 5, 33, 64):
        prompts = make_prompts(count)
        traces = replayed.trace(prompts, decoded=30), launched.trace(prompts, decoded=30)
        assert same(*traces) if exact else near(*traces), count
