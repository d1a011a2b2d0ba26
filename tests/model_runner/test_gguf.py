"""GGUF files: served as the models that they were made from, or refused for what would be read wrongly."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PretrainedConfig

from model_runner.models.conversion import GgufFile, convert_gguf, read_gguf, set_splitting
from model_runner.models.refusal import UnsupportedModelError
from tests.conftest import tiny_config
from tests.model_runner.gguf_files import Contents, contents_of, vocabulary

Change = Callable[[Contents], object]


def make_config(family: str) -> PretrainedConfig:
    """One that transformers reads rightly."""
    config: Any = tiny_config(family)
    if family == "qwen3":
        config.head_dim = 128
    if family == "gemma3":
        config.sliding_window, config.query_pre_attn_scalar, config._sliding_window_pattern = 40, 256, 6
        config.head_dim, config.layer_types = 256, ["sliding_attention"] * 3
    return config


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes a file with what is changed in it."""

    def make(family: str = "llama", change: Change = lambda contents: None) -> Path:
        contents = contents_of(make_config(family))
        change(contents)
        return contents.write(tmp_path / "model.gguf")

    return make


def keys(**values: Any) -> Change:
    """Sets metadata, with __ for the dots of their names; None removes it."""

    def change(contents: Contents) -> None:
        contents.keys |= {name.replace("__", "."): value for name, value in values.items()}
        contents.keys = {name: value for name, value in contents.keys.items() if value is not None}

    return change


def tensor(name: str, *shape: int) -> Change:
    return lambda contents: contents.tensors.update({name: np.ones(shape, np.float32)})


# -- files that are served ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@torch.inference_mode()
def test_a_file_becomes_the_model_that_it_was_made_from(
    family: str, write: Callable[..., Path], tmp_path: Path
) -> None:
    convert_gguf(write(family), tmp_path / "converted")
    torch.manual_seed(5)
    expected: Any = AutoModelForCausalLM.from_config(make_config(family)).eval()
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "converted", dtype=torch.float32).eval()
    tokens = torch.arange(3, 60).unsqueeze(0)
    assert torch.allclose(model(tokens).logits, expected(tokens).logits, atol=1e-4)


def test_a_head_is_read_as_llama_cpps_own_library_reads_it(write: Callable[..., Path]) -> None:
    path = write()
    own, other = read_gguf(path), gguf.GGUFReader(path)
    assert own.tensors == {tensor.name: tensor.tensor_type for tensor in other.tensors}
    fields = {name: field.contents() for name, field in other.fields.items() if not name.startswith("GGUF.")}
    assert own.metadata == fields


def converted_tokenizer(write: Callable[..., Path], target: Path, pre: str, **words: Any) -> Tokenizer:
    """What becomes of a vocabulary with that name in `tokenizer.ggml.pre`."""

    def change(contents: Contents) -> None:
        contents.keys |= vocabulary(320, **words) | {"tokenizer.ggml.pre": pre}

    convert_gguf(write(change=change), target)
    return Tokenizer.from_file(str(target / "tokenizer.json"))


def test_every_digit_is_a_piece_where_a_vocabulary_is_of_that_kind(write: Callable[..., Path], tmp_path: Path) -> None:
    merges = ["1 2", "Ġ Ġ"]
    for pre, expected in (("gpt-2", ["12", "Ġ", "Ġ", "12"]), ("smollm", ["1", "2", "ĠĠ", "1", "2"])):
        tokenizer = converted_tokenizer(write, tmp_path / pre, pre, merges=merges, last="ĠĠ")
        assert tokenizer.encode("12  12").tokens == expected


def test_a_piece_that_is_a_token_is_one_in_vocabularies_of_llama_3(write: Callable[..., Path], tmp_path: Path) -> None:
    for pre, expected in (("gpt-2", ["ab", "a"]), ("llama-bpe", ["aba"])):
        assert converted_tokenizer(write, tmp_path / pre, pre, last="aba").encode("aba").tokens == expected


def test_expressions_are_those_that_transformers_has() -> None:
    """In the versions of it that have them."""
    module = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    for name, expression in getattr(module, "GGUF_PRE_TOKENIZER_SPLITS", {}).items():
        if name == "qwen35":
            continue  # its models are refused
        tokenizer = Tokenizer(models.BPE())
        set_splitting(GgufFile({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": name}, {}), tokenizer)
        assert json.loads(tokenizer.to_str())["pre_tokenizer"]["pretokenizers"][0]["pattern"] == {"Regex": expression}


@pytest.mark.embedded
def test_the_embedded_models_text_is_split_as_its_publisher_does(embedded_folder: Path) -> None:
    converted, true = (Tokenizer.from_file(str(embedded_folder / "tokenizer.json")) for _ in range(2))
    own = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    true.pre_tokenizer = pre_tokenizers.Sequence(own)
    for text in ("12 345  6.789e10 ²³ ½ x1y22", "7" * 30, "Don't pay £1,234.50 by 2026-11-24!\n    42"):
        assert converted.encode(text).ids == true.encode(text).ids


# -- files that are refused --------------------------------------------------------------------------------------------


def experts(contents: Contents) -> None:
    """Mixtral's: of Llama's architecture."""
    keys(llama__expert_count=4, llama__expert_used_count=2)(contents)
    for layer in range(3):
        for part, shape in (("gate", (4, 100, 64)), ("up", (4, 100, 64)), ("down", (4, 64, 100))):
            del contents.tensors[f"blk.{layer}.ffn_{part}.weight"]
            tensor(f"blk.{layer}.ffn_{part}_exps.weight", *shape)(contents)
        tensor(f"blk.{layer}.ffn_gate_inp.weight", 4, 64)(contents)


def one_bit(contents: Contents) -> None:
    """A format that the library knows and cannot unpack."""
    contents.tensors["blk.0.ffn_up.weight"] = np.zeros((100, 18), np.uint8)
    contents.raw["blk.0.ffn_up.weight"] = gguf.GGMLQuantizationType.Q1_0


REFUSED: dict[str, tuple[str, Change, str]] = {
    "rotary scaling in a tensor": ("llama", tensor("rope_freqs.weight", 8), r"scaled by the tensor rope_freqs\.weight"),
    "experts": ("llama", experts, r"llama\.expert_count is 4, and is read as None"),
    "yarn": ("qwen3", keys(qwen3__rope__scaling__type="yarn"), r"rope\.scaling\.type is yarn"),
    "linear": ("llama", keys(llama__rope__scaling__type="linear"), r"rope\.scaling\.type is linear"),
    "a factor": ("gemma3", keys(gemma3__rope__scaling__factor=8.0), r"rope\.scaling\.factor is 8\.0"),
    "an older factor": ("llama", keys(llama__rope__scale_linear=4.0), r"rope\.scale_linear is 4\.0"),
    "the scale of queries": (
        "gemma3",
        keys(gemma3__attention__key_length=128, gemma3__attention__value_length=128),
        r"queries are scaled by 128 \*\* -0\.5, and would be by 256",
    ),
    "a window": ("llama", keys(llama__attention__sliding_window=64), r"sliding_window is 64, and is read as None"),
    "the size of heads": ("qwen3", keys(qwen3__attention__key_length=64), r"key_length is 64, and is read as 128"),
    "bidirectional attention": ("llama", keys(llama__attention__causal=False), r"causal is False"),
    "an unknown key": ("llama", keys(llama__residual_scale=0.2), r"llama\.residual_scale is 0\.2"),
    "no number of layers": ("llama", keys(llama__block_count=None), r"lack llama\.block_count"),
    "a part": ("llama", keys(split__count=3, split__no=0), r"part 1 of 3 .*llama-gguf-split --merge"),
    "a later part": ("llama", keys(split__count=3, split__no=2), r"part 3 of 3"),
    "an adapter": ("llama", keys(general__type="adapter"), r"no model: general\.type is adapter"),
    "unknown splitting": ("llama", keys(tokenizer__ggml__pre="deepseek-llm"), r"pre = deepseek-llm\) is not known"),
    "splitting untold": ("llama", keys(tokenizer__ggml__pre=None), r"pre = nothing\) is not known"),
    "a bias": ("llama", tensor("blk.0.attn_q.bias", 64), r"nothing is loaded from: blk\.0\.attn_q\.bias$"),
    "a scale": ("llama", tensor("blk.0.ffn_up.scale", 1), r"nothing is loaded from: blk\.0\.ffn_up\.scale$"),
    "no weights": (
        "llama",
        lambda contents: contents.tensors.pop("blk.1.ffn_up.weight"),
        r"\(a llama model\) has no weights: model\.layers\.1\.mlp\.up_proj\.weight$",
    ),
    "another shape": ("llama", tensor("output_norm.weight", 32), r"of another shape: model\.norm\.weight \[32\]"),
    "one bit": ("llama", one_bit, r"a block format that is not known .*: blk\.0\.ffn_up\.weight$"),
}


@pytest.mark.parametrize(("family", "change", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_file_that_would_be_read_wrongly(
    family: str, change: Change, reason: str, write: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=reason) as refusal:
        convert_gguf(write(family, change), tmp_path / "converted")
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "converted").exists()


def test_an_architecture_that_transformers_does_not_know(tmp_path: Path) -> None:
    path = Contents("granite", {"granite.block_count": 1}, {"a": np.ones(3, np.float32)}).write(tmp_path / "a.gguf")
    with pytest.raises(UnsupportedModelError, match=r"fails on its granite model: .*granite is not supported yet"):
        convert_gguf(path, tmp_path / "converted")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: content[:4000], "is damaged, or ends before its weights"),
        (lambda content: content[:30], "is damaged, or ends before its weights"),
        (lambda content: b"GGML" + content[4:], "does not begin as a GGUF file"),
        (lambda content: content[:4] + b"\x01" + content[5:], "is GGUF version 1; versions 2 and 3"),
        (lambda content: content[:16] + b"\xff" * 8 + content[24:], "is damaged, or ends|unknown type"),
    ],
)
def test_a_file_that_is_damaged(
    damage: Callable[[bytes], bytes], reason: str, write: Callable[..., Path], tmp_path: Path
) -> None:
    path = write()
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UnsupportedModelError, match=reason):
        read_gguf(path)


def test_any_end_is_too_early_and_none_is_an_error_of_another_kind(write: Callable[..., Path], tmp_path: Path) -> None:
    content = write().read_bytes()
    begin = len(content) - sum(tensor.nbytes for tensor in contents_of(make_config("llama")).tensors.values())
    for end in range(5, begin - 4096, 97):
        (tmp_path / "cut.gguf").write_bytes(content[:end])
        with pytest.raises(UnsupportedModelError, match=re.escape("is damaged")):
            read_gguf(tmp_path / "cut.gguf")
