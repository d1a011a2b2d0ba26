"""What training takes from the target's weights: its embedding, and the distribution that heads shall learn."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from model_runner.models.heads.base import TargetShape
from model_runner.models.loading import quiet


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """The two ends of a target, in float32."""

    shape: TargetShape
    embedding: nn.Module
    """Token ids [n] -> [n, hidden]."""
    head: Tensor  # [vocab, hidden]
    scale: float
    """Factor on the logits, as some families have it."""
    softcap: float | None
    """Logits z become softcap * tanh(z / softcap)."""

    @classmethod
    def load(cls, folder: Path) -> "TargetWeights":
        """Reads the whole model and keeps the two."""
        with quiet():
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model.requires_grad_(requires_grad=False)
        text = model.config.get_text_config()
        factor = getattr(text, "logit_scale", None) or 1 / (getattr(text, "logits_scaling", None) or 1.0)
        softcap = getattr(text, "final_logit_softcapping", None)
        head = model.get_output_embeddings().weight.detach()
        return cls(TargetShape.of(model.config), model.get_input_embeddings(), head, factor, softcap)


class Teacher:
    """The target's logits over a draft vocabulary."""

    def __init__(self, target: TargetWeights, draft_ids: Tensor, device: torch.device, dtype: torch.dtype) -> None:
        self._rows = target.head[draft_ids].to(device, dtype)
        self._scale = target.scale
        self._softcap = target.softcap

    @torch.no_grad()
    def __call__(self, hidden: Tensor) -> Tensor:
        """Hidden states LAST [n, hidden] -> [n, draft_vocab]."""
        logits = F.linear(hidden.to(self._rows.dtype), self._rows) * self._scale
        return logits if self._softcap is None else (logits / self._softcap).tanh() * self._softcap
