"""Configuration of the model runner."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["auto", "int8", "fp8", "int4", "none"]
InputType = Literal["auto", "int8", "int16"]
KVCacheDType = Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8"]
LogprobsMode = Literal["raw", "processed"]
SpeculationMethod = Literal[
    "auto", "draft_model", "eagle", "grammar", "hydra", "lookahead", "medusa", "mtp", "prediction", "suffix"
]  # fmt: skip
METHOD_ALIASES = {"ngram": "suffix"}
"""Other names of speculation methods. Suffix decoding finds everything that an n-gram lookup finds."""
REMOVED_METHODS = {"early_exit": "Use 'suffix', or 'draft_model' with a draft model."}
"""Methods of earlier versions, with advice on a replacement."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Limits on how much is computed at a time."""

    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """How the model is loaded and run. "auto" values are resolved once, before loading."""

    model: Path
    """A local folder in the Hugging Face format, with config.json and safetensors files."""
    device: Device = "auto"
    dtype: DType = "auto"
    """auto: float32 on CPU, the checkpoint's type on CUDA."""
    quantization: Quantization = "auto"
    """auto: int8 on CPU, none on CUDA. int8 is for CPU, fp8 for CUDA, int4 for both."""
    multiplies_stored_blocks: bool = False
    """Whether weights that a checkpoint stores in blocks (GGUF, GPTQ, AWQ) are multiplied in these blocks on CPU, if
    `quantization` and `activation_type` are auto."""
    activation_type: InputType = "auto"
    """How inputs of int8 products are rounded on CPU: to int8 after a rotation, or to int16 with 12 significant bits.
    auto: int8 with AVX-512 VNNI, int16 without it, because int8 is no faster there."""
    exact: bool = True
    """Whether a row's result is bit-identical in every batch. Only CUDA can trade this for speed."""
    cuda_graphs: bool = True
    """On CUDA: whether small steps are replayed from CUDA graphs captured at startup."""
    max_model_len: int | None = None
    """None uses the model's own limit."""
    block_size: int = 32
    """Tokens in a KV block; also the tile of the attention kernels."""
    kv_cache_dtype: KVCacheDType = "auto"
    """auto: bfloat16 with int8 or int4 weights on CPU, otherwise the type that the model computes in."""
    kv_cache_gib: float | None = None
    """Memory for the KV cache; None uses a share of the memory that the weights leave free."""
    max_num_seqs: int | None = None
    """None uses the platform's default."""
    max_num_batched_tokens: int | None = None
    """None uses the platform's default."""
    logprobs_mode: LogprobsMode = "raw"
    threads: int | None = None
    """Threads of the CPU kernels; None uses all available cores."""
    speculation: SpeculationMethod | Literal["off"] = "auto"
    """Default method, for requests that name none."""
    num_draft_tokens: int = 16
    """Maximum number of draft tokens per choice and step, for all requests."""
    draft_model: Path | None = None
    """A smaller model with the same tokenizer, for the method `draft_model`."""
    heads: tuple[Path, ...] = ()
    """Folders with trained heads (Medusa, Hydra or EAGLE), in addition to heads that the model's checkpoint has."""
    learn: bool = False
    """Whether heads are trained on served requests while the server runs."""
    learn_threads: int | None = None
    """Threads of the training process; None uses 1."""
    learn_memory_gib: float | None = None
    """Memory of the training process; None uses what these heads need, and 0.25 GiB for training examples."""
    images: bool = True
    """Whether prompts may have images, if the model takes them. Otherwise its tower is not loaded."""
    max_image_pixels: int = 50_000_000
    """Pixels of the largest image, for the memory plan."""
    image_cache_gib: float = 0.5
    """Memory for features of images. Features that were evicted are computed again when they are needed."""
    aux_model: Path | None = None
    """A weaker model with the same tokenizer, for contrastive decoding."""
