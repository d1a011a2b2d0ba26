"""From a folder to a model that is ready to run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as hf_logging

from model_runner.models.hf_attention import ATTENTION_NAME, register_attention
from model_runner.models.inspection import UnsupportedModelError


def load_config(folder: Path) -> PretrainedConfig:
    """Read config.json.

    Raises:
        UnsupportedModelError: if transformers does not know the architecture.
    """
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder)
    except (ValueError, KeyError) as error:
        raise UnsupportedModelError(f"{folder} holds no model that transformers can read: {error}") from error
    return config


def check_tokenizers(model: Path, other: Path, role: str) -> None:
    """Raises ValueError unless two models' folders hold the same vocabulary; `role` is what the other one is for."""
    if _vocabulary(model) != _vocabulary(other):
        raise ValueError(f"the {role} model {other} has another vocabulary than {model}; it cannot speak of its tokens")


def _vocabulary(folder: Path) -> dict[str, int] | None:
    path = folder / "tokenizer.json"
    return Tokenizer.from_file(str(path)).get_vocab() if path.exists() else None


def load_model(
    folder: Path,
    config: PretrainedConfig,
    dtype: torch.dtype,
    experts: str | None = None,
    device: torch.device | None = None,
) -> PreTrainedModel:
    """Load a model whose attention is ours, in evaluation mode.

    Args:
        folder: of the model.
        config: its configuration, as `checkpoint_quantization.as_served` has it.
        dtype: what the weights are loaded as.
        experts: how transformers runs experts; None for its own choice.
        device: where the weights are read to; the CPU if it is None.
    """
    register_attention()
    with quiet():
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            experts_implementation=experts,
            device_map=device,
        )
    result: PreTrainedModel = model.eval().requires_grad_(requires_grad=False)
    return result


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' own progress bars."""
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        hf_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
