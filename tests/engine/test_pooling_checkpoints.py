"""Checkpoints that were saved without the head of a language model: for embeddings, and for classification."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification

from model_runner.config import RunnerConfig
from model_runner.contract import Pooling, SamplingParams
from model_runner.refusal import UnsupportedModelError
from model_runner.runner import ModelRunner
from scheduler.interface import EngineRequest
from tests.conftest import tiny_config
from tests.engine.conftest import Harness

PROMPT = tuple(range(3, 60))


@pytest.fixture
def save(tmp_path: Path, tiny_model: Callable[[str], Path]) -> Callable[..., Path]:
    def write(kind: Any, family: str, **settings: Any) -> Path:
        torch.manual_seed(1)
        config = tiny_config(family)
        for name, value in settings.items():
            setattr(config, name, value)
        kind.from_config(config).save_pretrained(tmp_path)
        (tmp_path / "tokenizer.json").write_text((tiny_model(family) / "tokenizer.json").read_text())
        return tmp_path

    return write


def pooled(folder: Path, pooling: Pooling) -> np.ndarray:
    config = RunnerConfig(folder, quantization="none", kv_cache_gib=0.01, speculation="off")
    harness = Harness(ModelRunner.load(config))
    request = EngineRequest("r", PROMPT, SamplingParams(pooling=pooling), 0)
    return np.frombuffer(harness.run(harness.engine(), [request])["r", 0].pooled, "<f4")


@torch.inference_mode()
def test_a_model_without_any_head(save: Callable[..., Path]) -> None:
    folder = save(AutoModel, "qwen3")
    model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    expected = model(torch.tensor([PROMPT])).last_hidden_state[0].mean(0)
    np.testing.assert_allclose(pooled(folder, Pooling("mean")), expected.numpy(), atol=1e-4)


@torch.inference_mode()
def test_a_classification_head_says_what_it_does_in_transformers(save: Callable[..., Path]) -> None:
    folder = save(AutoModelForSequenceClassification, "llama", num_labels=1)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    expected = model(torch.tensor([PROMPT])).logits[0]
    np.testing.assert_allclose(pooled(folder, Pooling("classes")), expected.numpy(), rtol=1e-4)


def test_a_checkpoint_that_has_not_the_head_it_names_is_refused(save: Callable[..., Path]) -> None:
    folder = save(AutoModel, "llama", architectures=["LlamaForSequenceClassification"])
    text = (folder / "config.json").read_text().replace("LlamaModel", "LlamaForSequenceClassification")
    (folder / "config.json").write_text(text)
    with pytest.raises(UnsupportedModelError, match=r"has no weight score\.weight of \[classes, 64\]"):
        pooled(folder, Pooling("classes"))
