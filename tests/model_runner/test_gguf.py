"""GGUF files: served as the models that they were made from, or refused for what would be read wrongly."""

import json
import re
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM

from model_runner.gguf.architectures import ARCHITECTURES
from model_runner.gguf.checkpoint import GgufCheckpoint
from model_runner.gguf.header import IncompleteHeadError, parse_head, read_gguf
from model_runner.gguf.tokenizer import end_tokens, read_vocabulary, split_text
from model_runner.hub.access import ModelNotFoundError
from model_runner.hub.conversion import convert_gguf
from model_runner.hub.description import describe
from model_runner.hub.repository import local_path
from model_runner.modules.loading import load_config, load_model
from model_runner.refusal import UnsupportedModelError
from model_runner.spec.known_config import read_known_config
from model_runner.spec.model_spec import read_model_spec
from tests.model_runner.gguf_families import FAMILIES, WITH_IMAGES, make_config, stir
from tests.model_runner.gguf_files import Contents, architecture_name, contents_of, vocabulary

Change = Callable[[Contents], object]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes a file with what is changed in it."""

    def make(family: str = "llama", change: Change = lambda contents: None) -> Path:
        contents = contents_of(make_config(family), stir, family if family in WITH_IMAGES else "")
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


def logits_of(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    model: Any = load_model(folder, load_config(folder), torch.float32)
    model.set_attn_implementation("eager")
    logits: torch.Tensor = model(tokens).logits
    return logits


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = GgufCheckpoint(path)
    return {name: checkpoint.tensor(name).clone() for name in checkpoint.shapes}


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_file_becomes_the_model_that_it_was_made_from(
    family: str, write: Callable[..., Path], tmp_path: Path
) -> None:
    convert_gguf(write(family), tmp_path / "converted")
    if (known := read_known_config(tmp_path / "converted")) is not None:
        read_model_spec(known, GgufCheckpoint(tmp_path / "model.gguf"))  # raises an error if transformers is needed
    torch.manual_seed(5)
    expected: Any = AutoModelForCausalLM.from_config(make_config(family)).eval()
    stir(expected)
    tokens = torch.randint(3, 300, (1, 120), generator=torch.Generator().manual_seed(1))
    wanted = expected(tokens).logits
    assert torch.allclose(logits_of(tmp_path / "converted", tokens), wanted, atol=1e-4 * float(wanted.abs().max()))


@torch.inference_mode()
def test_weights_of_modules_are_read_once_and_stay(write: Callable[..., Path], tmp_path: Path) -> None:
    """A plain matrix is not copied as it is read, and what is served does not change when the file is replaced."""
    path = write("olmo2")
    convert_gguf(path, tmp_path / "converted")
    checkpoint, name = GgufCheckpoint(path), "model.layers.0.mlp.down_proj.weight"
    ((matrix,),) = checkpoint.matrices(name)
    assert checkpoint.tensor(name).data_ptr() == matrix.read().data_ptr()
    model: Any = load_model(tmp_path / "converted", load_config(tmp_path / "converted"), torch.float32)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    file = (tmp_path / "converted" / "model.gguf").resolve()
    with file.open("r+b") as stream:
        stream.write(bytes(file.stat().st_size))
    assert not checkpoint.tensor(name).any()
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_text_of_models_with_images_and_layers_without_recurrences_may_have_their_keys(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    """Converters write sizes of recurrences for Granite 4's models that have none, and one number for each layer."""
    sizes = dict.fromkeys(("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank"), 4)
    hybrid = keys(**{f"granite__ssm__{name}": size for name, size in sizes.items()})
    heads = keys(granite__attention__head_count_kv=[2, 2, 2], granite__expert_shared_feed_forward_length=100)
    convert_gguf(write("granite", lambda contents: (hybrid(contents), heads(contents))), tmp_path / "granite")
    images = keys(qwen3vl__rope__dimension_sections=[4, 2, 2, 0], qwen3vl__n_deepstack_layers=3)
    convert_gguf(write("qwen3vl", images), tmp_path / "images")
    config = json.loads((tmp_path / "images" / "config.json").read_text())
    assert config["model_type"] == "qwen3"
    assert "mrope_section" not in config["rope_parameters"]


def test_there_is_a_model_of_each_architecture() -> None:
    names = {family if family in WITH_IMAGES else architecture_name(make_config(family)) for family in FAMILIES}
    assert names == ARCHITECTURES.keys()


@torch.inference_mode()
def test_parts_are_read_as_one_model(write: Callable[..., Path], tmp_path: Path) -> None:
    whole = write()
    convert_gguf(whole, tmp_path / "whole")
    expected = weights_of(whole)
    parts = split(contents_of(make_config("llama"), stir), tmp_path / "parts", 3)
    for number, part in enumerate(parts):
        convert_gguf(part, tmp_path / f"from-{number}")
        for name in ("tokenizer.json", "config.json"):
            assert (tmp_path / f"from-{number}" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
        weights = weights_of(tmp_path / f"from-{number}" / part.name)
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


def split(contents: Contents, folder: Path, count: int) -> list[Path]:
    """Writes the contents in parts, as llama.cpp's own program does."""
    folder.mkdir()
    names = list(contents.tensors)
    paths = []
    for number in range(count):
        own = {name: contents.tensors[name] for name in names[number::count]}
        keys = {"split.no": number, "split.count": count, "split.tensors.count": len(names)}
        part = Contents(contents.architecture, {**(contents.keys if number == 0 else {}), **keys}, own)
        paths.append(part.write(folder / f"model-{number + 1:05}-of-{count:05}.gguf"))
    return paths


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"])
def test_weights_are_those_that_llama_cpps_own_library_reads(kind: str, write: Callable[..., Path]) -> None:
    """Random blocks, in a matrix whose rows are reordered, and in one whose rows are not."""
    block_format = gguf.GGMLQuantizationType[kind]
    width = 256
    weights, num_bytes = gguf.GGML_QUANT_SIZES[block_format]
    blocks = np.random.default_rng(3).integers(0, 120, (64, width // weights * num_bytes), np.uint8)

    def quantise(contents: Contents) -> None:
        keys(llama__embedding_length=width, llama__attention__key_length=16, llama__attention__value_length=16)(
            contents
        )
        for name in ("blk.0.attn_q.weight", "blk.0.ffn_up.weight"):
            contents.tensors[name] = blocks
            contents.raw[name] = block_format

    checkpoint = GgufCheckpoint(write(change=quantise))
    (up,), (query,) = (
        checkpoint.matrices(f"model.layers.0.{name}.weight")[0] for name in ("mlp.up_proj", "self_attn.q_proj")
    )
    expected = gguf.dequantize(blocks, block_format)
    assert np.array_equal(up.read(), expected, equal_nan=True)
    halves = expected.reshape(4, 8, 2, width).swapaxes(1, 2).reshape(64, width)
    assert np.array_equal(query.read(), halves, equal_nan=True)
    for matrix, whole in ((up, expected), (query, halves)):
        matrix.drop(0, 64)
        assert np.array_equal(matrix.read(16, 48), whole[16:48], equal_nan=True)


@pytest.mark.parametrize(
    ("family", "projection", "norm", "stored_more"),
    [
        ("qwen35", "mtp.fc", "mtp.pre_fc_norm_hidden", 1),
        ("glm4moe", "model.layers.3.eh_proj", "model.layers.3.hnorm", 0),
    ],
)
def test_a_module_for_prediction_has_its_published_names(
    family: str, projection: str, norm: str, stored_more: int, write: Callable[..., Path], tmp_path: Path
) -> None:
    """Files have it as one more layer."""

    def predict(contents: Contents) -> None:
        of_norm, of_layer = np.arange(64, dtype=np.float32), contents.tensors["blk.1.attn_k.weight"]
        contents.tensors |= {
            "blk.3.nextn.eh_proj.weight": np.ones((64, 128), np.float32),
            "blk.3.nextn.hnorm.weight": of_norm + stored_more,
            "blk.3.attn_k.weight": of_layer,
        }
        contents.keys |= {f"{family}.block_count": 4, f"{family}.nextn_predict_layers": 1}

    path = write(family, predict)
    convert_gguf(path, tmp_path / "converted")
    assert load_config(tmp_path / "converted").num_hidden_layers == 3
    checkpoint = GgufCheckpoint(path)
    assert checkpoint.shapes[f"{projection}.weight"] == (64, 128)
    assert checkpoint.tensor(f"{norm}.weight").tolist() == list(range(64))
    layer = "mtp.layers.0" if projection.startswith("mtp") else "model.layers.3"
    assert f"{layer}.self_attn.k_proj.weight" in checkpoint.shapes


def test_keys_and_values_of_older_latent_attention_are_one_tensor(write: Callable[..., Path]) -> None:
    def older(contents: Contents) -> None:
        parts = [contents.tensors.pop(f"blk.0.attn_{name}_b.weight") for name in "kv"]
        joined = np.concatenate([parts[0].swapaxes(1, 2), parts[1]], axis=1)
        contents.tensors["blk.0.attn_kv_b.weight"] = joined.reshape(-1, joined.shape[-1])

    names = [f"model.layers.{layer}.self_attn.kv_b_proj.weight" for layer in range(2)]
    new, old = (weights_of(write("deepseek2", change)) for change in (lambda contents: None, older))
    assert all(torch.equal(new[name], old[name]) for name in names)


def test_inputs_are_in_order_where_columns_of_blocks_are_not(write: Callable[..., Path]) -> None:
    """Qwen 3.5's value heads: files have the first one of each key head, then the second ones."""
    block_format = gguf.GGMLQuantizationType.Q8_0
    blocks = np.random.default_rng(3).integers(0, 120, (64, 34), np.uint8)

    def quantise(contents: Contents) -> None:
        contents.tensors["blk.0.ssm_out.weight"] = blocks
        contents.raw["blk.0.ssm_out.weight"] = block_format

    checkpoint = GgufCheckpoint(write("qwen35", quantise))
    (output,) = checkpoint.matrices("model.layers.0.linear_attn.out_proj.weight")[0]
    stored = gguf.dequantize(blocks, block_format)
    expected = stored.reshape(64, 2, 2, 8).swapaxes(1, 2).reshape(64, 32)
    assert np.array_equal(output.read(), expected)
    kept = output.blocks()
    assert kept is not None
    assert kept.input_order is not None
    placed = np.empty_like(stored)
    placed[:, kept.input_order.numpy()] = stored
    assert np.array_equal(placed, expected)


def test_half_precision_is_kept(write: Callable[..., Path]) -> None:
    def narrow(contents: Contents) -> None:
        contents.tensors["blk.0.attn_k.weight"] = contents.tensors["blk.0.attn_k.weight"].astype(np.float16)

        contents.tensors["blk.0.ffn_up.weight"] = contents.tensors["blk.0.ffn_up.weight"].astype(np.float16)

    checkpoint = GgufCheckpoint(write(change=narrow))
    key = checkpoint.tensor("model.layers.0.self_attn.k_proj.weight")
    (up,) = checkpoint.matrices("model.layers.0.mlp.up_proj.weight")[0]
    assert up.read().dtype == torch.float16
    stored = contents_of(make_config("llama"), stir).tensors["blk.0.attn_k.weight"].astype(np.float16)
    assert np.array_equal(key, stored.reshape(2, 8, 2, 64).swapaxes(1, 2).reshape(32, 64))


def test_transformers_is_not_needed(write: Callable[..., Path], tmp_path: Path) -> None:
    """It takes seconds to import."""
    code = (
        "import sys; from pathlib import Path; from model_runner.hub.conversion import convert_gguf; "
        f"convert_gguf(Path({str(write())!r}), Path({str(tmp_path / 'converted')!r})); "
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_head_is_read_as_llama_cpps_own_library_reads_it(write: Callable[..., Path]) -> None:
    path = write()
    own, other = read_gguf(path), gguf.GGUFReader(path)
    assert {name: (tensor.block_format, tensor.shape, tensor.offset) for name, tensor in own.tensors.items()} == {
        tensor.name: (tensor.tensor_type, tuple(map(int, reversed(tensor.shape))), tensor.data_offset)
        for tensor in other.tensors
    }
    fields = {name: field.contents() for name, field in other.fields.items() if not name.startswith("GGUF.")}
    metadata = {key: one.tolist() if isinstance(one, np.ndarray) else one for key, one in own.metadata.items()}
    assert metadata == fields


def test_arrays_of_numbers_take_their_own_size() -> None:
    count = 16 << 20
    head = struct.pack("<4sIQQQ3sIIQ", b"GGUF", 3, 0, 1, 3, b"a.b", 9, 0, count) + bytes(count)
    tracemalloc.start()
    numbers = parse_head(head, Path("m.gguf")).metadata["a.b"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert numbers.nbytes == count
    assert peak < 2 * count


def test_a_file_needs_no_ending(write: Callable[..., Path], tmp_path: Path) -> None:
    blob = write().rename(tmp_path / f"sha256-{'0' * 64}")
    assert local_path(str(blob)) == blob
    assert describe(blob).architecture == "llama"
    convert_gguf(blob, tmp_path / "converted")
    assert [path.name for path in (tmp_path / "converted").glob("*.gguf")] == [f"{blob.name}.gguf"]


def test_what_cannot_be_served_is_not_shown(write: Callable[..., Path]) -> None:
    for changed, reason in (({"general__type": "adapter"}, "it holds no model"), ({}, "ends before the weights")):
        path = write(change=keys(**changed))
        if not changed:
            path.write_bytes(path.read_bytes()[:-1000])
        with pytest.raises(ModelNotFoundError, match=reason):
            describe(path)


# -- tokenizers --------------------------------------------------------------------------------------------------------


def converted_tokenizer(write: Callable[..., Path], target: Path, pre: str, **words: Any) -> Tokenizer:
    """The tokenizer of a vocabulary with that name in `tokenizer.ggml.pre`."""

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
        tokenizer = converted_tokenizer(write, tmp_path / pre, pre, last="aba")
        assert tokenizer.encode("aba", add_special_tokens=False).tokens == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"tokenizer.ggml.pre": "gpt-2"}, ["a"]),
        ({"tokenizer.ggml.pre": "llama-bpe"}, ["<s>", "a"]),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, ["a"]),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}, ["<s>", "a", "</s>"]),
    ],
)
def test_what_is_put_around_a_prompt(
    words: dict[str, Any], expected: list[str], write: Callable[..., Path], tmp_path: Path
) -> None:
    convert_gguf(write(change=lambda contents: contents.keys.update(words)), tmp_path / "converted")
    tokenizer = Tokenizer.from_file(str(tmp_path / "converted" / "tokenizer.json"))
    assert tokenizer.encode("a").tokens == expected


def test_the_end_of_a_message_does_not_end_an_output_of_harmony(write: Callable[..., Path]) -> None:
    def ends(*last: str) -> list[int]:
        words = vocabulary(320)
        words["tokenizer.ggml.tokens"][-len(last) :] = last
        words["tokenizer.ggml.token_type"][-len(last) :] = [3] * len(last)
        return end_tokens(read_vocabulary(read_gguf(write(change=lambda contents: contents.keys.update(words)))))

    assert ends("<|end|>") == [2, 319]
    assert ends("<|end|>", "<|call|>", "<|return|>") == [2, 318, 319]


def test_every_token_that_ends_a_turn_ends_an_output(write: Callable[..., Path], tmp_path: Path) -> None:
    path = write(change=lambda contents: contents.keys.update(vocabulary(320, last="<end_of_turn>")))
    assert end_tokens(read_vocabulary(read_gguf(path))) == [2, 319]
    convert_gguf(path, tmp_path / "converted")
    assert json.loads((tmp_path / "converted" / "config.json").read_text())["eos_token_id"] == [2, 319]


def test_chat_templates_keep_their_names(write: Callable[..., Path], tmp_path: Path) -> None:
    named = {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "{{ tools }}"}
    for number, more in enumerate(({}, named)):
        words = {"tokenizer.chat_template": "{{ messages }}", **more}
        convert_gguf(write(change=lambda contents, words=words: contents.keys.update(words)), tmp_path / str(number))
    one, two = (json.loads((tmp_path / name / "tokenizer_config.json").read_text())["chat_template"] for name in "01")
    assert one == "{{ messages }}"
    assert {item["name"]: item["template"] for item in two} == {
        "tool_use": "{{ tools }}",
        "default": "{{ messages }}",
    }


def pieces_and_scores() -> dict[str, float]:
    """A vocabulary of sentencepiece: letters, bytes, and random pieces with random scores."""
    random = np.random.default_rng(8)
    letters = "abc▁"
    pieces = ["".join(random.choice(list(letters), random.integers(2, 5))) for _ in range(60)]
    scores = dict.fromkeys(letters, -1000.0) | {piece: -float(random.integers(1, 10**6)) for piece in pieces}
    return {"<unk>": 0.0, "<s>": 0.0, "</s>": 0.0, **{f"<0x{byte:02X}>": 0.0 for byte in range(256)}, **scores}


def merged(text: str, scores: dict[str, float]) -> list[str]:
    """Brute force: of all neighbours that are a token together the best are merged, the first ones of equal."""
    pieces = list(text)
    while True:
        pairs = [left + right for left, right in pairwise(pieces)]
        known = [(-scores[pair], place) for place, pair in enumerate(pairs) if pair in scores]
        if not known:
            return [part for piece in pieces for part in ([piece] if piece in scores else bytes_of(piece))]
        _, place = min(known)
        pieces[place : place + 2] = [pairs[place]]


def bytes_of(piece: str) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in piece.encode()]


@pytest.mark.parametrize("begins_with_space", [True, False])
def test_pieces_of_sentencepiece_are_merged_by_their_scores(
    begins_with_space: bool,
    write: Callable[..., Path],
    tmp_path: Path,
) -> None:
    scores = pieces_and_scores()
    words = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": list(scores),
        "tokenizer.ggml.scores": list(scores.values()),
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(scores) - 259)],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": begins_with_space,
        "tokenizer.ggml.merges": None,
    }
    config = make_config("llama")
    config.vocab_size = len(scores)
    contents = contents_of(config)
    contents.keys = {key: value for key, value in (contents.keys | words).items() if value is not None}
    convert_gguf(contents.write(tmp_path / "model.gguf"), tmp_path / "converted")
    tokenizer = Tokenizer.from_file(str(tmp_path / "converted" / "tokenizer.json"))
    random = np.random.default_rng(9)
    for _ in range(300):
        text = "".join(random.choice(list("abc  é"), random.integers(1, 20)))
        spelled = ("▁" if begins_with_space else "") + text.replace(" ", "▁")
        encoded = tokenizer.encode(text)
        assert encoded.tokens == ["<s>", *merged(spelled, scores)]
        assert tokenizer.decode(encoded.ids) == text


def test_expressions_are_those_that_transformers_has() -> None:
    """In the versions of it that have them."""
    module = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    for name, expression in getattr(module, "GGUF_PRE_TOKENIZER_SPLITS", {}).items():
        tokenizer = Tokenizer(models.BPE())
        split_text(name, tokenizer)
        assert json.loads(tokenizer.to_str())["pre_tokenizer"]["pretokenizers"][0]["pattern"] == {"Regex": expression}


@pytest.mark.embedded
def test_the_embedded_models_text_is_split_as_its_publisher_does(embedded_folder: Path) -> None:
    converted, true = (Tokenizer.from_file(str(embedded_folder / "tokenizer.json")) for _ in range(2))
    own = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    true.pre_tokenizer = pre_tokenizers.Sequence(own)
    for text in ("12 345  6.789e10 ²³ ½ x1y22", "7" * 30, "Don't pay £1,234.50 by 2026-11-24!\n    42"):
        assert converted.encode(text).ids == true.encode(text).ids


def test_spaces_are_the_longest_tokens_of_spaces_in_gemmas_files(tmp_path: Path) -> None:
    """As sentencepiece finds symbols that its user defined; llama.cpp's server gives the same tokens."""
    words = {"<unk>": 2, "<s>": 3, "</s>": 3, "a": 1, "▁": 1, "  ": 4, "   ": 4, " " * 7: 4}
    config = make_config("gemma3")
    config.vocab_size = len(words)
    contents = contents_of(config)
    contents.keys |= {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(words),
        "tokenizer.ggml.token_type": list(words.values()),
        "tokenizer.ggml.scores": [-1000.0] * len(words),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": False,
    }
    contents.keys = {key: value for key, value in contents.keys.items() if key != "tokenizer.ggml.merges"}
    convert_gguf(contents.write(tmp_path / "model.gguf"), tmp_path / "converted")
    tokenizer = Tokenizer.from_file(str(tmp_path / "converted" / "tokenizer.json"))
    encoded = tokenizer.encode("a" + " " * 12 + "a a", add_special_tokens=False)
    assert [len(token) for token in encoded.tokens] == [1, 7, 3, 2, 1, 1, 1]
    assert tokenizer.decode(encoded.ids) == "a" + " " * 12 + "a a"


# -- files that are refused --------------------------------------------------------------------------------------------


def one_bit(contents: Contents) -> None:
    """A format that the library knows and cannot unpack."""
    contents.tensors["blk.0.ffn_up.weight"] = np.zeros((100, 18), np.uint8)
    contents.raw["blk.0.ffn_up.weight"] = gguf.GGMLQuantizationType.Q1_0


REFUSED: dict[str, tuple[str, Change, str]] = {
    "other factors": ("llama", tensor("rope_freqs.weight", 9), r"rope_freqs\.weight has the shape \[9\], not \[8\]"),
    "factors of another scaling": (
        "llama",
        lambda contents: contents.tensors.update({"rope_freqs.weight": np.arange(1, 9, dtype=np.float32)}),
        r"rope_freqs\.weight are not those of Llama 3",
    ),
    "scaled twice": (
        "llama 3",
        keys(llama__rope__scaling__type="linear"),
        r"scaled twice: by linear and by rope_freqs",
    ),
    "longrope": ("phi3", keys(phi3__rope__scaling__type="longrope"), r"scaling of type longrope is not supported"),
    "factors of longrope": (
        "phi3",
        tensor("rope_factors_long.weight", 8),
        r"rope_factors_short\.weight and rope_factors_long\.weight is missing, or does not have the shape \[8\]",
    ),
    "factors of longrope for other heads": (
        "phi3 with LongRoPE",
        tensor("rope_factors_long.weight", 9),
        r"does not have the shape \[8\]",
    ),
    "bidirectional attention": ("llama", keys(llama__attention__causal=False), r"causal is False; only True"),
    "values of another size": ("llama", keys(llama__attention__value_length=8), r"value_length is 8; only 16"),
    "an unknown key": ("llama", keys(llama__residual_scale=0.2), r"keys .* for a llama model: llama\.residual_scale"),
    "layers that differ": ("llama", keys(llama__feed_forward_length=[100, 100, 50]), r"differ in llama\.feed_forward"),
    "no number of layers": ("llama", keys(llama__block_count=None), r"lack llama\.block_count"),
    "a text for a number": ("llama", keys(llama__block_count="three"), r"llama\.block_count is 'three'"),
    "no heads in some layers": (
        "llama",
        keys(llama__attention__head_count_kv=[2, 0, 2]),
        r"differ in llama\.attention",
    ),
    "two modules for prediction": ("qwen35", keys(qwen35__nextn_predict_layers=2), r"2 modules for .* only one"),
    "types of too few layers": (
        "qwen35",
        keys(qwen35__attention__recurrent_layers=[True, False]),
        r"recurrent_layers has 2 entries for 3 layers",
    ),
    "scores of another kind": ("lfm2moe", keys(lfm2moe__expert_gating_func=1), r"expert_gating_func is 1; only 2"),
    "no heads": ("llama", keys(llama__attention__head_count=0), r"llama\.attention\.head_count is 0"),
    "groups of experts": ("dots1", keys(dots1__expert_group_count=4), r"expert_group_count is 4; only 1"),
    "softmax for sigmoid": ("dots1", keys(dots1__expert_gating_func=1), r"expert_gating_func is 1; only 2"),
    "a part without its name": ("llama", keys(split__count=3, split__no=0), r"split into 3 parts, and its name says 1"),
    "an adapter": ("llama", keys(general__type="adapter"), r"no model: general\.type is adapter"),
    "a part for images": ("llama", lambda contents: setattr(contents, "architecture", "clip"), r"the vision part"),
    "another architecture": (
        "llama",
        lambda contents: setattr(contents, "architecture", "mamba"),
        r"architecture mamba cannot be read; these can: arcee, .*safetensors",
    ),
    "unknown splitting": ("llama", keys(tokenizer__ggml__pre="viking"), r"pre = viking\) is not known"),
    "splitting not named": ("llama", keys(tokenizer__ggml__pre=None), r"pre = nothing\) is not known"),
    "another tokenizer": ("llama", keys(tokenizer__ggml__model="rwkv"), r"of the kind rwkv; gemma4, gpt2 and llama"),
    "no vocabulary": ("llama", keys(tokenizer__ggml__tokens=None), r"tokenizer\.ggml\.tokens is missing"),
    "merges of nothing": ("llama", keys(tokenizer__ggml__merges=["qq qq"]), r"vocabulary and merges do not fit"),
    "types for some tokens": ("llama", keys(tokenizer__ggml__token_type=[1, 1]), r"types for 2 of its 320 tokens"),
    "no scores": ("llama", keys(tokenizer__ggml__model="llama"), r"scores for 0 of its 320 tokens"),
    "more tokens than rows": ("llama", lambda c: c.keys.update(vocabulary(330)), r"330 tokens, and .* only 320 rows"),
    "a scale": ("llama", tensor("blk.0.ffn_up.scale", 1), r"nothing is loaded from: blk\.0\.ffn_up\.scale$"),
    "a tensor of another name": ("llama", tensor("blk.x.ffn_up.weight", 1), r"loaded from: blk\.x\.ffn_up"),
    "no embedding": (
        "llama",
        lambda contents: contents.tensors.pop("token_embd.weight"),
        r"token_embd\.weight is missing",
    ),
    "experts that do not fit": (
        "mixtral",
        tensor("blk.0.ffn_up_exps.weight", 3, 100, 64),
        r"shapes that do not fit",
    ),
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


def test_a_part_that_is_missing(tmp_path: Path) -> None:
    parts = split(contents_of(make_config("llama")), tmp_path / "parts", 3)
    parts[1].unlink()
    with pytest.raises(UnsupportedModelError, match=r"one of 3 parts, and model-00002-of-00003\.gguf is missing"):
        read_gguf(parts[0])


def test_parts_of_another_model(tmp_path: Path) -> None:
    parts = split(contents_of(make_config("llama")), tmp_path / "parts", 3)
    parts[2].write_bytes(parts[1].read_bytes())
    with pytest.raises(UnsupportedModelError, match=r"model-00003-of-00003\.gguf says that it is part 2"):
        read_gguf(parts[0])


def test_without_types_control_tokens_are_those_that_are_named_or_look_like_it(write: Callable[..., Path]) -> None:
    words = ["<s>", "a", "</s>", "<|im_start|>", "<end_of_turn>", "<b>"]
    own = {"tokens": words, "token_type": None, "bos_token_id": 0, "eos_token_id": 2}
    vocabulary = read_vocabulary(read_gguf(write(change=keys(**{f"tokenizer__ggml__{k}": v for k, v in own.items()}))))
    assert vocabulary.types == [3, 1, 3, 3, 3, 1]
    assert set(end_tokens(vocabulary)) == {2, 4}


def test_weights_that_are_cut_off(write: Callable[..., Path], tmp_path: Path) -> None:
    path = write()
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(UnsupportedModelError, match=r"ends before the weights of .* do: .* download it again"):
        convert_gguf(path, tmp_path / "converted")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: content[:4000], "is damaged or incomplete: it ends before its weights"),
        (lambda content: content[:30], "is damaged or incomplete: it ends before its weights"),
        (lambda content: b"GGML" + content[4:], "is not a GGUF file; download it again"),
        (lambda content: content[:4] + b"\x01" + content[5:], "is GGUF version 1; versions 2 and 3"),
        (
            lambda content: content[:16] + b"\xff" * 8 + content[24:],
            "is damaged or incomplete|unknown type|is damaged: it has",
        ),
    ],
)
def test_a_file_that_is_damaged(
    damage: Callable[[bytes], bytes], reason: str, write: Callable[..., Path], tmp_path: Path
) -> None:
    path = write()
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UnsupportedModelError, match=reason):
        read_gguf(path)


def test_a_head_may_end_with_the_file_and_not_before(tmp_path: Path) -> None:
    """As a list of texts does, of which the last one is the last of all."""
    key, texts = b"tokenizer.ggml.tokens", [b"a", "é".encode(), b"", b"long"]
    listed = b"".join(struct.pack("<Q", len(text)) + text for text in texts)
    content = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(key)) + key + struct.pack("<IIQ", 9, 8, len(texts)) + listed
    path = tmp_path / "a.gguf"
    assert parse_head(content, path).metadata == {key.decode(): [text.decode() for text in texts]}
    for end in range(4, len(content)):
        with pytest.raises(IncompleteHeadError):
            parse_head(content[:end], path)


def test_any_end_is_too_early_and_none_is_an_error_of_another_kind(write: Callable[..., Path], tmp_path: Path) -> None:
    content = write().read_bytes()
    begin = len(content) - sum(tensor.nbytes for tensor in contents_of(make_config("llama")).tensors.values())
    for end in range(5, begin - 4096, 97):
        (tmp_path / "cut.gguf").write_bytes(content[:end])
        with pytest.raises(UnsupportedModelError, match=re.escape("is damaged")):
            read_gguf(tmp_path / "cut.gguf")
