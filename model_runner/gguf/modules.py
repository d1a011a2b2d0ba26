"""Tensors of GGUF files as transformers' modules have them, where the server's own layers read them in another form."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from model_runner.weights.interleaved_experts import as_modules

Tensors = dict[str, Tensor]


def module_tensors(tensors: Tensors, entries: Mapping[str, int | str]) -> Tensors:
    """Tensors in the form of the modules that a config.json with these entries describes."""
    change = _FORMS.get(str(entries["model_type"]))
    return tensors if change is None else change(tensors, entries)


def _interleaved(tensors: Tensors, entries: Mapping[str, int | str]) -> Tensors:
    return as_modules(tensors)


def _inputs_first(tensors: Tensors, entries: Mapping[str, int | str]) -> Tensors:
    """Llama 4's experts [experts, inputs, outputs]."""
    ends = (".experts.gate_up_proj", ".experts.down_proj")
    return {
        name: tensor.transpose(1, 2).contiguous() if name.endswith(ends) else tensor for name, tensor in tensors.items()
    }


def _by_key_head(tensors: Tensors, entries: Mapping[str, int | str]) -> Tensors:
    """Qwen3-Next's queries, keys, values and z in one linear, with all outputs of a key head together."""
    heads, width = int(entries["linear_num_key_heads"]), int(entries["linear_key_head_dim"])
    found = dict(tensors)
    for name in [name for name in tensors if name.endswith(".in_proj_qkv.weight")]:
        path = name.removesuffix("qkv.weight")
        qkv, z = found.pop(name), found.pop(f"{path}z.weight")
        values = len(qkv) - 2 * heads * width
        parts = [*torch.split(qkv, [heads * width, heads * width, values]), z]
        joined = torch.cat([part.view(heads, -1, qkv.shape[1]) for part in parts], dim=1)
        found[f"{path}qkvz.weight"] = joined.reshape(-1, qkv.shape[1])
    return found


_FORMS: Mapping[str, Callable[[Tensors, Mapping[str, int | str]], Tensors]] = {
    "gpt_oss": _interleaved,
    "llama4_text": _inputs_first,
    "qwen3_next": _by_key_head,
}
"""By model type."""
