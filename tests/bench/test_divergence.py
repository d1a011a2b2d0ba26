"""Divergences of distributions: equal to scipy's, and zero between equal models."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM

from bench.quality import divergence, log_probabilities
from model_runner.config import RunnerConfig


def test_it_is_the_mean_of_scipys_over_all_places() -> None:
    one, other = (torch.randn(2, 30, 50, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    expected = stats.entropy(one.softmax(-1).numpy(), other.softmax(-1).numpy(), axis=-1).mean()
    assert divergence(one.log_softmax(-1), other.log_softmax(-1)) == pytest.approx(expected, rel=1e-5)
    assert divergence(one.log_softmax(-1), one.log_softmax(-1)) == 0


def test_distributions_are_those_of_transformers(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("llama")
    texts = [list(range(3, 80)), list(range(9, 12))]
    config = RunnerConfig(folder, device="cpu", quantization="none", kv_cache_dtype="float32", kv_cache_gib=0.01)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for text, found in zip(texts, log_probabilities(config, texts), strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([text])).logits[0].log_softmax(-1)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
