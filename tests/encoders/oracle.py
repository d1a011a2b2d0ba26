"""Numbers of encoders by transformers' own modules, for one text at a time, and explicit sums."""

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file
from transformers import AutoModel, AutoModelForSequenceClassification

Vector = NDArray[np.float64]


class Oracle:
    """The model in a folder, with transformers' own attention in float32."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def _encoder(self) -> Any:
        return AutoModel.from_pretrained(self._folder, attn_implementation="eager").eval()

    @cached_property
    def _classifier(self) -> Any:
        return AutoModelForSequenceClassification.from_pretrained(self._folder, attn_implementation="eager").eval()

    @torch.inference_mode()
    def embed(self, tokens: list[int]) -> Vector:
        """The vector of a text by the folder's modules."""
        ids = torch.tensor([tokens])
        hidden = self._encoder(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
        states = hidden.numpy().astype(np.float64)
        vector = np.zeros(0)
        for entry in json.loads((self._folder / "modules.json").read_text())[1:]:
            path = self._folder / entry["path"]
            config = json.loads((path / "config.json").read_text())
            match entry["type"].rpartition(".")[2]:
                case "Pooling":
                    vector = np.concatenate([_pooled(states, mode) for mode in _modes(config)])
                case "Dense":
                    weights = load_file(path / "model.safetensors")
                    vector = weights["linear.weight"].astype(np.float64) @ vector + weights["linear.bias"]
                    vector = np.tanh(vector) if config["activation_function"].endswith("Tanh") else vector
                case "Normalize":
                    vector = vector / np.linalg.norm(vector)
        return vector

    @torch.inference_mode()
    def classify(self, tokens: list[int], types: list[int]) -> Vector:
        """The numbers of the classification head; token types are used if the model has any."""
        ids = torch.tensor([tokens])
        more = {"token_type_ids": torch.tensor([types])} if _has_types(self._classifier.config) else {}
        logits = self._classifier(input_ids=ids, attention_mask=torch.ones_like(ids), **more).logits[0]
        result: Vector = logits.numpy().astype(np.float64)
        return result


def _has_types(config: Any) -> bool:
    return getattr(config, "type_vocab_size", 0) > 1 and config.model_type != "mpnet"


def _modes(config: Mapping[str, Any]) -> list[str]:
    """In sentence-transformers' order."""
    switches = ["cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken"]
    return [switch for switch in switches if config[f"pooling_mode_{switch}"]]


def _pooled(states: Vector, mode: str) -> Vector:
    weights = np.arange(1, len(states) + 1, dtype=np.float64)
    result: Vector = {
        "cls_token": states[0],
        "lasttoken": states[-1],
        "max_tokens": states.max(0),
        "mean_tokens": states.mean(0),
        "mean_sqrt_len_tokens": states.sum(0) / np.sqrt(len(states)),
        "weightedmean_tokens": weights @ states / weights.sum(),
    }[mode]
    return result


def cosine(one: Vector, other: Vector) -> float:
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))
