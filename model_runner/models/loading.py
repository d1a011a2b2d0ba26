"""From a folder to a model that is ready to run."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as hf_logging

from model_runner.models.classification import CLASSIFIES, HEAD_NAMES
from model_runner.models.hf_attention import ATTENTION_NAME, register_attention
from model_runner.models.refusal import UnsupportedModelError, describe_model, few, refused


def load_config(folder: Path) -> PretrainedConfig:
    """Read config.json.

    Raises:
        UnsupportedModelError: if transformers does not know the architecture.
    """
    with refused(f"{folder} holds no model that transformers can read"):
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
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

    Raises:
        UnsupportedModelError: if transformers cannot load it, or not all of the model and of the checkpoint's weights
            became one.
    """
    register_attention()
    with refused(f"{describe_model(config)} cannot be loaded"), quiet():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            experts_implementation=experts,
            device_map=device,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused with the others
        )
        model, report = loaded
        check_report(folder, model, report)
    result: PreTrainedModel = model.eval().requires_grad_(requires_grad=False)
    return result


def check_report(folder: Path, model: PreTrainedModel, report: Mapping[str, Any]) -> None:
    """Raises UnsupportedModelError unless every weight of the model was loaded, and every one of the checkpoint used.

    What transformers ignores by design, as tied weights and modules of multi-token prediction, it does not report.

    Args:
        folder: of the checkpoint.
        model: as it was loaded.
        report: transformers' own: `missing_keys`, `mismatched_keys` and `unexpected_keys`.
    """
    missing = set(report["missing_keys"]) - _head_that_may_be_missing(folder, model)
    unexpected = {key for key in report["unexpected_keys"] if not _is_known_beside(key, model.config)}
    mismatched = [f"{key} {list(stored)} instead of {list(own)}" for key, stored, own in report["mismatched_keys"]]
    faults = (
        ("has no weights", missing),
        ("has weights of another shape", mismatched),
        ("has weights that the model does not use", unexpected),
    )
    if found := [f"{fault}: {few(names)}" for fault, names in faults if names]:
        raise UnsupportedModelError(f"{describe_model(model.config)} {'; and '.join(found)}")


def _head_that_may_be_missing(folder: Path, model: PreTrainedModel) -> set[str]:
    """Names of the head's weights, if the checkpoint is of a model for embeddings or classification."""
    architecture = str((model.config.architectures or [""])[0])
    is_bare = architecture.endswith("Model") and not architecture.endswith("LMHeadModel")
    if not is_bare and not architecture.endswith(CLASSIFIES) and not (folder / "modules.json").is_file():
        return set()
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    weights = () if head is None else tuple(head.parameters())
    return {name for name, weight in model.named_parameters() if any(weight is one for one in weights)}


def _is_known_beside(key: str, config: PretrainedConfig) -> bool:
    """Whether something other than the model uses a weight, or would: see heads/mtp.py and classification.py."""
    text: Any = config.get_text_config()
    layer = re.search(r"\blayers\.(\d+)\.", key)
    num_modules = getattr(text, "num_nextn_predict_layers", None) or 0
    if layer is not None and 0 <= int(layer[1]) - text.num_hidden_layers < num_modules:
        return True
    classifies = str((config.architectures or [""])[0]).endswith(CLASSIFIES)
    return classifies and key in HEAD_NAMES


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' own progress bars and reports."""
    verbosity = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        hf_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
        hf_logging.set_verbosity(verbosity)
