"""The target's parts that training uses: its embedding, its head, and its most frequent tokens."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from model_runner.heads.base import Example, TargetShape
from model_runner.modules.loading import load_config, quiet
from model_runner.spec.model_folder import open_checkpoint


def choose_draft_ids(examples: Iterable[Example], size: int, vocab_size: int) -> Tensor:
    """The `size` most frequent tokens of the answers, ascending [min(size, vocab_size)] int64.

    Among equally frequent tokens the lowest ids are chosen: byte-pair vocabularies are sorted from frequent to rare.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for example in examples:
        counts += np.bincount(example.tokens[example.num_prompt :], minlength=vocab_size)
    frequent = np.argsort(-counts, kind="stable")[:size]
    return torch.from_numpy(np.sort(frequent))


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """The target's embedding and head."""

    shape: TargetShape
    embedding: nn.Module
    """Token ids [...] -> [..., hidden] float32."""
    head: Tensor  # [vocab, hidden] in stored type
    scale: float
    """Factor on the logits in some model families."""
    softcap: float | None
    """Logits z become softcap * tanh(z / softcap)."""

    @classmethod
    def load(cls, folder: Path) -> "TargetWeights":
        """Load a target's embedding and head; reads only these if the files have them under the model's own names.

        They are then memory-mapped: the system reads rows on demand, and can drop them again.
        """
        with quiet():
            model: Any = _from_files(folder) or AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, trust_remote_code=False
            )
        text = model.config.get_text_config()
        factor = getattr(text, "logit_scale", None) or 1 / (getattr(text, "logits_scaling", None) or 1.0)
        softcap = getattr(text, "final_logit_softcapping", None)
        head = model.get_output_embeddings().weight.detach()
        embedding = _Embedding(model.get_input_embeddings())
        return cls(TargetShape.of(model.config), embedding, head, factor, softcap)


class _Embedding(nn.Module):
    """A target's embedding whose rows are converted to float32 when they are used."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.register_buffer("stored", embedding.weight.detach(), persistent=False)
        embedding.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        embedding.padding_idx = None  # it would be checked against the rows, and only affects gradients
        self._embedding = embedding

    def forward(self, ids: Tensor) -> Tensor:
        rows: Tensor = self.stored[ids.flatten()].float()  # type: ignore[index]
        taken: Tensor = functional_call(self._embedding, {"weight": rows}, torch.arange(len(rows), device=ids.device))
        return taken.view(*ids.shape, -1)


def ends_in_files(folder: Path) -> bool:
    """Whether TargetWeights.load can read only the two parts. Raises UnsupportedModelError."""
    return _from_files(folder) is not None


def _from_files(folder: Path) -> nn.Module | None:
    """The model with embedding and head, and nothing else loaded. None if the files lack these names."""
    with init_empty_weights(include_buffers=False):
        model: Any = AutoModelForCausalLM.from_config(load_config(folder), trust_remote_code=False)  # type: ignore[no-untyped-call]
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    if model.config.get_text_config().tie_word_embeddings:
        ends[1].weight = ends[0].weight
    parameters = dict(model.named_parameters())
    wanted = [next(name for name, parameter in parameters.items() if parameter is end.weight) for end in ends]
    checkpoint = open_checkpoint(folder)
    names = set(wanted).intersection(() if checkpoint is None else checkpoint.shapes)
    found = {name: checkpoint.matrices(name)[0][0].read() for name in names if checkpoint is not None}
    if found.keys() != set(wanted) or not all(tensor.is_floating_point() for tensor in found.values()):
        return None
    for end, name in zip(ends, wanted, strict=True):
        end.weight = nn.Parameter(found[name], requires_grad=False)
    return cast(nn.Module, model)
