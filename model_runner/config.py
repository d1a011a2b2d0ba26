"""Settings of the runner."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["auto", "int8", "fp8", "int4", "none"]
Rows = Literal["auto", "int8", "int16"]
KVCacheDType = Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8"]
LogprobsMode = Literal["raw", "processed"]
SpeculationMethod = Literal[
    "auto", "draft_model", "eagle", "grammar", "hydra", "lookahead", "medusa", "mtp", "prediction", "suffix"
]  # fmt: skip
METHOD_ALIASES = {"ngram": "suffix"}
"""Other names of methods of speculation. Suffix decoding finds all that a lookup of n-grams finds."""
REMOVED_METHODS = {"early_exit": "Use 'suffix', or 'draft_model' with a draft model."}
"""Methods of earlier versions, and what to use instead."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is computed at a time."""

    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """How the model is loaded and run. "auto" is resolved once, before loading."""

    model: Path
    """A local folder in the Hugging Face format: config.json, safetensors."""
    device: Device = "auto"
    dtype: DType = "auto"
    """auto: float32 on CPU, the checkpoint's own on CUDA."""
    quantization: Quantization = "auto"
    """auto: int8 on CPU if the native kernels can be built, none elsewhere. int8 is for CPU, fp8 for CUDA."""
    rows: Rows = "auto"
    """What the inputs of products with int8 weights are rounded to on CPU: int8, rotated beforehand, or int16, of which
    12 bits are used. auto: int8 with AVX-512 VNNI, int16 without, where int8 is no faster."""
    exact: bool = True
    """Whether a row's result is the same, bit for bit, in every batch. Only on CUDA can it be given up, for speed."""
    cuda_graphs: bool = True
    """On CUDA: whether small steps are replayed from graphs that were captured at the start."""
    max_model_len: int | None = None
    """None takes the model's own limit."""
    block_size: int = 32
    """Tokens in a KV block; also the tile of the attention."""
    kv_cache_dtype: KVCacheDType = "auto"
    """auto: bfloat16 beside int8 or int4 weights, elsewhere what the model computes in."""
    kv_cache_gib: float | None = None
    """Memory for the KV cache; None takes a share of what is free after the weights."""
    max_num_seqs: int | None = None
    """None takes the platform's."""
    max_num_batched_tokens: int | None = None
    """None takes the platform's."""
    logprobs_mode: LogprobsMode = "raw"
    threads: int | None = None
    """Threads of the CPU kernels; None takes the cores at hand."""
    speculation: SpeculationMethod | Literal["off"] = "auto"
    """For requests that name no method."""
    num_draft_tokens: int = 16
    """Draft tokens of one choice in a step at most, whatever a request asks for."""
    draft_model: Path | None = None
    """A smaller model with the same tokenizer, for the method `draft_model`."""
    heads: tuple[Path, ...] = ()
    """Folders with trained heads: Medusa, Hydra or EAGLE. The embedded model has some of its own."""
    learn: bool = False
    """Whether heads are trained while the model is served, on what it computes."""
    learn_threads: int | None = None
    """Of the process that trains them; None takes 1."""
    learn_memory_gib: float | None = None
    """What that may take; None takes what these heads need, and a quarter of a GiB for what they learn from."""
    aux_model: Path | None = None
    """A weaker model with the same tokenizer, for contrastive decoding."""
