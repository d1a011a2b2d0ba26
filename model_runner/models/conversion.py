"""Bring a checkpoint into the form that starts fast: safetensors and tokenizer.json.

Run as a program, so that a server that finds its model in the cache never imports any of this:

    python -P -m model_runner.models.conversion PARENT SOURCE TARGET

If it fails, the last line that it prints says why, below the trace.
"""

import math
import mmap
import os
import struct
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model_runner.models.refusal import UnsupportedModelError, few, refused
from model_runner.processes import die_with_parent

if TYPE_CHECKING:
    from tokenizers import Tokenizer


_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The head of one file."""

    metadata: Mapping[str, Any]
    """Numbers, truth values and texts, and lists of them."""
    tensors: Mapping[str, int]
    """The number of each tensor's block format, by the tensor's name."""

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))


def read_gguf(path: Path) -> GgufFile:
    """Read the head of a file.

    Raises:
        UnsupportedModelError: if it is no GGUF file of a version that is known, or ends before its weights begin.
        OSError: if it cannot be read.
    """
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise UnsupportedModelError("it does not begin as a GGUF file does")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                return _Reader(content).read()
            except (struct.error, OverflowError, UnicodeDecodeError) as error:
                raise UnsupportedModelError("it is damaged, or ends before its weights begin") from error


class _Reader:
    """Takes one value after the other; what ends too early raises struct.error."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._at = len(_MAGIC)

    def read(self) -> GgufFile:
        (version,) = self._take("I")
        if version not in _VERSIONS:
            raise UnsupportedModelError(f"it is GGUF version {version}; versions 2 and 3 can be read")
        num_tensors, num_keys = self._take("QQ")
        metadata = {}
        for _ in range(num_keys):
            key = self._text()
            metadata[key] = self._value(*self._take("I"))
        tensors = {}
        for _ in range(num_tensors):
            name = self._text()
            (num_dimensions,) = self._take("I")
            self._take(f"{num_dimensions}Q")
            tensors[name], _ = self._take("IQ")
        return GgufFile(metadata, tensors)

    def _value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self._take(_NUMBERS[kind])[0]
        if kind == _TEXT:
            return self._text()
        if kind != _ARRAY:
            raise UnsupportedModelError(f"its metadata has a value of the unknown type {kind}")
        element, count = self._take("IQ")
        if element in _NUMBERS:
            return list(self._take(f"{count}{_NUMBERS[element]}"))
        if element != _TEXT:
            raise UnsupportedModelError(f"its metadata has a list of values of the type {element}, which is unknown")
        return [self._text() for _ in range(count)]

    def _text(self) -> str:
        (size,) = self._take("Q")
        (content,) = self._take(f"{size}s")
        return str(content, "utf-8")

    def _take(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{form}", self._content, self._at)
        self._at += struct.calcsize(f"<{form}")
        return values


_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_MARKS, _SPACES = r" ?[^\s\p{L}\p{N}]+", r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _plain(digits: str) -> str:
    """Words whatever their case."""
    return rf"{_ENDINGS}|{_BEFORE}\p{{L}}+|{digits}|{_MARKS}[\r\n]*|{_SPACES}"


def _cased(endings: str, digits: str) -> str:
    """Words that begin anew at a capital after a small letter."""
    words = rf"{_BEFORE}{_UPPER}*{_LOWER}+{endings}|{_BEFORE}{_UPPER}+{_LOWER}*{endings}"
    return rf"{words}|{digits}|{_MARKS}[\r\n/]*|{_SPACES}"


def _named(names: Iterable[str], way: str) -> dict[str, str]:
    return dict.fromkeys(names, way)


_GPT2, _DIGITS = "GPT-2's", "GPT-2's, with every digit a piece of its own"
_LLAMA3_NAMES = {
    "llama3",
    "llama-v3",
    "llama-bpe",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "midm-2.0",
    "lfm2",
    "jina-v5-nano",
}
_WAYS = {
    **_named(("gpt-2", "phi-2", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "gigachat", "a.x-4.0"), _GPT2),
    **_named(("mellum", "exaone4", "mpt", "olmo", "jais", "trillion", "granite-docling"), _GPT2),
    **_named(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **_named((*_LLAMA3_NAMES, "dbrx", "smaug-bpe"), _plain(r"\p{N}{1,3}")),
    **_named(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan"), _plain(r"\p{N}")),
    **_named(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _cased(f"{_ENDINGS}?", r"\p{N}{1,3}")),
    "tekken": _cased("", r"\p{N}"),
}
"""An expression for each name, or one of the two ways of GPT-2."""
_WHOLE_PIECES = _LLAMA3_NAMES | {"tekken"}
"""Names of vocabularies in which a piece that is a token is one, whatever the merges say."""


def check_splitting(file: GgufFile) -> None:
    """Raises UnsupportedModelError if the way in which the vocabulary splits text is not known."""
    name = _name(file)
    if name is not None and name not in _WAYS:
        raise UnsupportedModelError(
            f"how it splits text before tokens are made of it (tokenizer.ggml.pre = {name or 'nothing'}) is not known"
        )


def set_splitting(file: GgufFile, tokenizer: "Tokenizer") -> None:
    """Have a tokenizer split text in the way that the file names, which was checked."""
    from tokenizers import Regex  # noqa: PLC0415
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split  # noqa: PLC0415

    name = _name(file)
    if name is None:
        return
    way = _WAYS[name]
    gpt2, no_further = ByteLevel(add_prefix_space=False), ByteLevel(add_prefix_space=False, use_regex=False)
    if way == _GPT2:
        tokenizer.pre_tokenizer = gpt2
    elif way == _DIGITS:
        tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), gpt2])
    else:
        tokenizer.pre_tokenizer = Sequence([Split(Regex(way), behavior="isolated"), no_further])
    tokenizer.model.ignore_merges = name in _WHOLE_PIECES


def _name(file: GgufFile) -> str | None:
    """Of the way; empty if the file names none, None for vocabularies that are not of bytes: these do not split."""
    if file.metadata.get("tokenizer.ggml.model") != "gpt2":
        return None
    return str(file.metadata.get("tokenizer.ggml.pre", ""))


_27B = {("gemma2", 46), ("gemma3", 62)}
"""Architectures and numbers of layers by which llama.cpp tells the models whose queries it scales in another way."""


def check_head(file: GgufFile) -> None:
    """Raises UnsupportedModelError for what the head of a file rules out."""
    if not file.architecture:
        raise UnsupportedModelError("its metadata names no general.architecture")
    if (kind := file.metadata.get("general.type", "model")) != "model":
        raise UnsupportedModelError(f"it holds no model: general.type is {kind}")
    if file.metadata.get("split.count", 1) > 1 or file.metadata.get("split.no", 0) > 0:
        raise UnsupportedModelError(
            f"it is part {file.metadata.get('split.no', 0) + 1} of {file.metadata.get('split.count')} of a model, and "
            "the others would not be read; merge them with llama.cpp's `llama-gguf-split --merge`"
        )
    if names := [name for name in file.tensors if name.startswith("rope_")]:
        raise UnsupportedModelError(f"its rotary positions are scaled by the tensor {few(names)}, which is not read")
    _check_formats(file)


def check_config(file: GgufFile, config: Any) -> None:
    """Raises UnsupportedModelError unless the configuration that transformers made says all that the metadata say."""
    prefix = f"{file.architecture}."
    said = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    if missing := _REQUIRED - said.keys():
        raise UnsupportedModelError(f"its metadata lack {few([prefix + key for key in missing])}")
    for key, value in sorted((_defaults(said) | said).items()):
        became = _HARMLESS[key] if key in _HARMLESS else _READ[key](config) if key in _READ else None
        if not _same(value, became):
            raise UnsupportedModelError(
                f"transformers drops a part of its metadata: {prefix}{key} is {value}, and is read as {became}"
            )
    _check_scale_of_queries(file, config)


def check_tensors(file: GgufFile, used: Collection[str]) -> None:
    """Raises UnsupportedModelError if there are tensors that no parameter was loaded from.

    Args:
        file: that was loaded.
        used: names of tensors that transformers looks for; of stacked experts, without `.weight`.
    """
    if unused := [name for name in file.tensors if name not in used and name.removesuffix(".weight") not in used]:
        raise UnsupportedModelError(f"it has tensors that nothing is loaded from: {few(unused)}")


def _check_formats(file: GgufFile) -> None:
    """Have one block of each format unpacked."""
    import numpy as np  # noqa: PLC0415
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize  # noqa: PLC0415

    for number in set(file.tensors.values()):
        names = [name for name, used in file.tensors.items() if used == number]
        try:
            kind = GGMLQuantizationType(number)
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except (ValueError, KeyError, NotImplementedError) as error:
            raise UnsupportedModelError(
                f"it has tensors in a block format that is not known ({number}): {few(names)}"
            ) from error


def _same(said: Any, became: Any) -> bool:
    """Whether a value became the same value; zero and None say that there is nothing."""
    if isinstance(said, float) and isinstance(became, int | float):
        return math.isclose(said, became, rel_tol=1e-6)
    return bool(said == became) or (said in (0, None) and said is not False and became in (0, None))


def _defaults(said: Mapping[str, Any]) -> dict[str, Any]:
    """What llama.cpp takes where a file says nothing, and transformers may take something else."""
    heads = said["attention.head_count"]
    return {"rope.freq_base": 10000.0, "attention.head_count_kv": heads, "attention.sliding_window": None}


def _check_scale_of_queries(file: GgufFile, config: Any) -> None:
    scale = getattr(config, "query_pre_attn_scalar", None)
    if (file.architecture, config.num_hidden_layers) in _27B:
        expected = config.hidden_size / config.num_attention_heads
    else:
        expected = _head_dim(config)
    if scale is not None and scale != expected:
        raise UnsupportedModelError(f"its queries are scaled by {expected:g} ** -0.5, and would be by {scale} ** -0.5")


def _head_dim(config: Any) -> int:
    dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return dim


def _rope(config: Any, kind: str) -> Mapping[str, Any]:
    """Rotary parameters of layers of a kind, or of all of them where they do not differ."""
    parameters = getattr(config, "rope_parameters", None) or {}
    found: Mapping[str, Any] = parameters.get(kind, parameters)
    return found


def _rotated(config: Any) -> int:
    share: float = _rope(config, "full_attention").get("partial_rotary_factor") or 1.0
    return int(_head_dim(config) * share)


def _attribute(*names: str) -> Callable[[Any], Any]:
    """Reads the first of some attributes that a configuration has."""
    return lambda config: next((getattr(config, name) for name in names if hasattr(config, name)), None)


_REQUIRED = {"context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count"}
_READ: Mapping[str, Callable[[Any], Any]] = {
    "context_length": _attribute("max_position_embeddings"),
    "embedding_length": _attribute("hidden_size"),
    "block_count": _attribute("num_hidden_layers"),
    "feed_forward_length": _attribute("intermediate_size"),
    "vocab_size": _attribute("vocab_size"),
    "use_parallel_residual": _attribute("use_parallel_residual"),
    "attention.head_count": _attribute("num_attention_heads"),
    "attention.head_count_kv": _attribute("num_key_value_heads"),
    "attention.key_length": _head_dim,
    "attention.value_length": _head_dim,
    "attention.layer_norm_rms_epsilon": _attribute("rms_norm_eps"),
    "attention.layer_norm_epsilon": _attribute("layer_norm_eps", "norm_epsilon", "norm_eps"),
    "attention.sliding_window": _attribute("sliding_window"),
    "attention.sliding_window_pattern": _attribute("_sliding_window_pattern"),
    "attn_logit_softcapping": _attribute("attn_logit_softcapping"),
    "final_logit_softcapping": _attribute("final_logit_softcapping"),
    "rope.freq_base": lambda config: _rope(config, "full_attention").get("rope_theta"),
    "rope.freq_base_swa": lambda config: _rope(config, "sliding_attention").get("rope_theta"),
    "rope.dimension_count": _rotated,
    "expert_count": _attribute("num_experts"),
    "expert_used_count": _attribute("num_experts_per_tok"),
    "expert_feed_forward_length": _attribute("moe_intermediate_size"),
    "expert_shared_feed_forward_length": _attribute("shared_expert_intermediate_size"),
}
"""What each key of the metadata became in a configuration."""
_HARMLESS: Mapping[str, Any] = {
    "rope.scaling.type": "none",
    "rope.scaling.factor": 1.0,
    "rope.scale_linear": 1.0,
    "attention.causal": True,
    "tensor_data_layout": "Meta AI original pth",
    "pooling_type": 3,  # the last token, which is what embeddings are made of where nothing is said
}
"""Keys whose only value that transformers does right is the one that needs nothing done."""


def convert_gguf(source: Path, target: Path) -> None:
    """Unpack the weights of a GGUF file to float32 and write them, with config and tokenizer, into `target`.

    Raises:
        UnsupportedModelError: if transformers cannot read the file, or not all of it as it is meant.
    """
    file = read_gguf(source)
    check_head(file)
    check_splitting(file)
    with refused(f"transformers fails on its {file.architecture} model"):
        config = _read_config(source, file)
        tokenizer = _read_tokenizer(source, file)
        model = _read_model(source, file, config)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def convert_tokenizer(source: Path, target: Path) -> None:
    """Make a folder that links to the files of `source` and adds the tokenizer.json that it lacks."""
    from transformers import AutoTokenizer  # noqa: PLC0415

    target.mkdir(parents=True)
    AutoTokenizer.from_pretrained(source, trust_remote_code=False).save_pretrained(target)
    for file in source.iterdir():
        if not (target / file.name).exists():
            (target / file.name).symlink_to(file.resolve())


def _read_config(source: Path, file: GgufFile) -> Any:
    from transformers import AutoConfig  # noqa: PLC0415  (takes seconds, in which the parent may die)

    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name, trust_remote_code=False)
    check_config(file, config)
    return config


def _read_tokenizer(source: Path, file: GgufFile) -> Any:
    from transformers import AutoTokenizer  # noqa: PLC0415

    tokenizer: Any = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, trust_remote_code=False)
    set_splitting(file, tokenizer.backend_tokenizer)
    return tokenizer


def _read_model(source: Path, file: GgufFile, config: Any) -> Any:
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, GgufConfig  # noqa: PLC0415
    from transformers.modeling_gguf_pytorch_utils import (  # noqa: PLC0415
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    from model_runner.models.loading import check_report  # noqa: PLC0415

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        source.parent,
        config=config,
        gguf_file=source.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        trust_remote_code=False,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are refused with the others
    )
    model, report = loaded
    check_report(source, model, report)
    processor = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)(config=config.to_dict())  # type: ignore[no-untyped-call]
    check_tensors(file, get_gguf_hf_weights_map(model, processor))
    return model


def main() -> None:
    """Convert argv[2], a GGUF file or a folder, into the folder argv[3], unless process argv[1] is no more waiting."""
    parent, source, target = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    die_with_parent()
    if os.getppid() != parent:
        return
    try:
        with refused("transformers fails", OSError):
            (convert_tokenizer if source.is_dir() else convert_gguf)(source, target)
    except (UnsupportedModelError, OSError) as error:
        traceback.print_exc(file=sys.stdout)
        print(" ".join(str(error).split()))  # noqa: T201
        sys.exit(1)


if __name__ == "__main__":
    main()
