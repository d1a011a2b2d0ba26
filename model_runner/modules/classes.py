"""Which classes of transformers' modules need something of ours, and what: families are named in these tables only.

A class is changed twice: once before its weights are used, so that it has a form that the server can pack
(`CHANGES`), and once before the first pass, so that what looks at other tokens goes through the server (`HOOKS`).
"""

from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel

from model_runner.modules import attention, compressed, indexers, ngrams
from model_runner.modules.head_weights import separate_heads
from model_runner.modules.looped_experts import (
    change_dbrx,
    change_longcat,
    in_common_form,
    prepare_experts,
    prepare_router,
    run,
    run_with_identities,
)
from model_runner.modules.mixers import call_recurrences, lightning
from model_runner.modules.step import CurrentStep, Function
from model_runner.modules.transformers_private import accept_falcon, accept_gpt_neo, accept_llama4

Entry = TypeVar("Entry")
Change = Callable[[Any, PreTrainedModel], None]
"""Changes a module of a model in place."""
Hook = Callable[[Any, CurrentStep, nn.Module], None]
"""Connects a module with the step of its model."""

REFUSED: dict[str, str] = {"kosmos-2.5": "counts positions in its own way"}
"""Types that cannot be served although their parts could, and why."""

ACCEPTANCES: dict[str, Callable[[str], None]] = {
    "falcon": accept_falcon,
    "gpt_neo": accept_gpt_neo,
    "llama4": accept_llama4,
}
"""Preparations by type, before a model is built with the attention of a name."""


def _as_plain_linear(module: Any, _: PreTrainedModel) -> None:
    module.__class__ = nn.Linear


def _on_all_rows(module: Any, _: PreTrainedModel) -> None:
    """Experts that transformers runs on all rows, each on its part of them."""
    module.is_transposed = module.takes_all_rows = True


CHANGES: dict[str, Change] = {
    "DbrxExperts": in_common_form(change_dbrx, run),
    "FalconLinear": _as_plain_linear,
    "JetMoeParallelExperts": prepare_experts,
    "JetMoeTopKGating": prepare_router,
    "Llama4TextExperts": _on_all_rows,
    "LongcatFlashExperts": in_common_form(change_longcat, run_with_identities),
    "Step3p7Experts": in_common_form(lambda _: None, run),
    "ZambaMambaMixer": partial(separate_heads, ("x_proj_weight", "dt_proj_weight")),
}
"""By class: changes before weights are used."""


def _method(name: str, ours: Function) -> Hook:
    """Have a method compute by `ours`, which takes the step, the module and the method's arguments."""

    def hook(module: Any, current: CurrentStep, _: nn.Module) -> None:
        own = MethodType(getattr(type(module), name), module)
        setattr(module, name, current.choose(own, partial(ours, current, module)))

    return hook


def _forward(ours: Function) -> Hook:
    return _method("forward", ours)


def _calls(*names: str) -> Hook:
    return lambda module, current, _: call_recurrences(names, module, current)


def _pools(indexer: Any, current: CurrentStep, model: nn.Module) -> None:
    """Qwen4's indexers, which also need the rotary positions of other tokens."""
    rotary = next(module for module in model.modules() if type(module).__name__ == "Qwen4ExpTextRotaryEmbedding")
    _forward(partial(indexers.by_pools, rotary))(indexer, current, model)


_DELTA = _calls("causal_conv1d_fn", "torch_chunk_gated_delta_rule")
_KIMI = _calls("causal_conv1d_fn", "chunk_kimi_delta_attention")
_MAMBA = _calls("causal_conv1d_fn", "mamba_selective_scan")
_MAMBA2 = _calls("causal_conv1d_fn", "mamba2_chunk_scan")
_SHORT = _calls("causal_conv1d_fn")

MIXERS: dict[str, Hook] = {
    "BailingHybridDeltaAttention": _KIMI,
    "BambaMixer": _MAMBA2,
    "FalconH1Mixer": _MAMBA2,
    "FalconMambaMixer": _MAMBA,
    "Glm5NextTextLinearAttention": _KIMI,
    "GraniteMoeHybridMambaLayer": _MAMBA2,
    "JambaMambaMixer": _MAMBA,
    "KimiLinearDeltaAttention": _KIMI,
    "LaraMiniGatedDeltaNet": _DELTA,
    "Lfm2MoeShortConv": _SHORT,
    "Lfm2ShortConv": _SHORT,
    "Lfm3ShortConv": _SHORT,
    "Mamba2Mixer": _MAMBA2,
    "MambaMixer": _MAMBA,
    "MiniMaxLightningAttention": _forward(lightning),
    "NemotronHMamba2Mixer": _MAMBA2,
    "OlmoHybridGatedDeltaNet": _DELTA,
    "Qwen3NextGatedDeltaNet": _DELTA,
    "Qwen3_5GatedDeltaNet": _DELTA,
    "Qwen3_5MoeGatedDeltaNet": _DELTA,
    "Qwen4ExpTextGatedDeltaNet": _DELTA,
    "Zamba2MambaMixer": _MAMBA2,
    "ZambaMambaMixer": _MAMBA,
}
"""Recurrent mixers, by class: they are right with these hooks."""
INDEXERS: dict[str, Hook] = {
    "AXK2Indexer": _forward(indexers.lightning),
    "DeepseekV32Indexer": _forward(indexers.lightning),
    "Dots3NoteTextIndexer": _forward(indexers.lightning),
    "Glm5NextTextIndexer": _forward(indexers.by_gated_pools),
    "GlmMoeDsaIndexer": _forward(indexers.lightning),
    "HYV4Indexer": _forward(partial(indexers.lightning, rotates_last=True)),
    "HYV4VLIndexer": _forward(partial(indexers.lightning, rotates_last=True)),
    "MiniMaxM3VLIndexer": _forward(indexers.by_blocks),
    "MistralLarge4TextIndexer": _forward(indexers.from_hidden),
    "Qwen4ExpTextQSAIndexer": _pools,
}
"""Indexers, by class. Models with one take `indexers.MASKS`."""
HOOKS: dict[str, Hook] = {
    **MIXERS,
    **INDEXERS,
    "DeepseekV4CSACompressor": _forward(compressed.compress),
    "DeepseekV4HCACompressor": _forward(compressed.compress),
    "FalconAttention": _forward(attention.falcon),
    "GPTNeoSelfAttention": _method("_attn", attention.gpt_neo),
    "GPTNeoXJapaneseAttention": _method("_attn", attention.gpt_neox_japanese),
    "Gemma3Attention": attention.see_images,
    "Gemma4TextAttention": attention.see_images_in_windows,
    "Gemma4UnifiedTextAttention": attention.see_images_in_windows,
    "Glm5NextTextAttention": _method("build_attention_mask_from_topk", indexers.mask_of_indices),
    "Llama4TextAttention": attention.scale_by_position,
    "Qwen4ExpTextNGramEmbedding": ngrams.shift_tokens,
    "Qwen4ExpTextPLELayer": ngrams.convolve_tokens,
    "XGLMAttention": _forward(attention.xglm),
    "modeling_openai.Attention": _method("_attn", attention.openai_gpt),
}
"""By class, and where its name says too little by module and class: hooks before the first pass."""


def change_modules(model: PreTrainedModel) -> None:
    """Change the modules of all known classes in place, with the same weights."""
    for module, change in _known(model, CHANGES):
        change(module, model)


def hook_modules(model: nn.Module, current: CurrentStep) -> None:
    """Connect the modules of all known classes with the step. Outside of a pass, they compute as before.

    Raises:
        ValueError: if a module is not what this version of transformers was tested with.
    """
    for module, hook in _known(model, HOOKS):
        hook(module, current, model)


def has_indexers(model: nn.Module) -> bool:
    """Whether a model has indexers, and so takes masks."""
    return any(True for _ in _known(model, INDEXERS))


def _known(model: nn.Module, table: dict[str, Entry]) -> Iterator[tuple[Any, Entry]]:
    """Each module of a model whose class is in a table, with its entry."""
    for module in list(model.modules()):
        name = type(module).__name__
        file = type(module).__module__.rpartition(".")[2]
        entry = table.get(name, table.get(f"{file}.{name}"))
        if entry is not None:
            yield module, entry
