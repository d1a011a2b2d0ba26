"""Models that would be loaded in part, or not run at all: refused in one line that names them and says why."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BltConfig,
    GitConfig,
    GPTJConfig,
    ModernBertDecoderConfig,
    PretrainedConfig,
    WhisperConfig,
)

from model_runner.config import RunnerConfig
from model_runner.modules.loading import load_config, load_model
from model_runner.refusal import UnsupportedModelError
from model_runner.runner import ModelRunner
from scheduler.interface import EngineRequest
from tests.conftest import tiny_config
from tests.engine.conftest import GREEDY, Harness
from tests.engine.test_oracle import check, prompts

TOKENS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
VISION = {**SIZES, "image_size": 32, "patch_size": 16}
PART = {**SIZES, "vocab_size": 64}
LOCAL = {**PART, "hidden_size_global": 32}
WHISPER = {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 32, "encoder_layers": 1}

FOREIGN: dict[str, Callable[[], PretrainedConfig]] = {
    "gptj": lambda: GPTJConfig(**TOKENS, n_embd=32, n_layer=2, n_head=2, rotary_dim=8, n_positions=64),
    "git": lambda: GitConfig(**TOKENS, **SIZES, vision_config=VISION),
    "blt": lambda: BltConfig(
        **TOKENS,
        patcher_config=PART,
        encoder_config=LOCAL,
        decoder_config=LOCAL,
        global_config=SIZES,
        encoder_hash_byte_group_vocab=10,
    ),
    "whisper": lambda: WhisperConfig(
        **TOKENS, **WHISPER, is_encoder_decoder=False, encoder_attention_heads=2, decoder_start_token_id=1
    ),
    "modernbert-decoder": lambda: ModernBertDecoderConfig(**TOKENS, **SIZES, cls_token_id=1, sep_token_id=2),
}


@pytest.mark.parametrize("family", FOREIGN)
def test_models_that_meet_code_not_written_for_them(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are refused with the reason, or answer as generate() does where a version of transformers has them work."""
    model = AutoModelForCausalLM.from_config(FOREIGN[family]())
    model.save_pretrained(tmp_path)
    config = RunnerConfig(tmp_path, device="cpu", kv_cache_gib=0.01, quantization="none")
    with caplog.at_level(logging.INFO):
        try:
            runner = ModelRunner.load(config)
        except UnsupportedModelError as refusal:
            reason = str(refusal)
            assert f"{tmp_path} (a {family} model)" in reason
            assert not ("attention" in reason and "docs/reference/model-types.md" not in reason)
            assert "\n" not in reason
            assert not any(record.exc_info for record in caplog.records)
            return
    texts = prompts(4, model.config.vocab_size, (1, 40), seed=1)
    check(Harness(runner), tmp_path, [EngineRequest(f"{i}", text, GREEDY, 8) for i, text in enumerate(texts)])


def test_the_trace_is_logged_as_debug(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    AutoModelForCausalLM.from_config(FOREIGN["git"]()).save_pretrained(tmp_path)
    with caplog.at_level(logging.DEBUG, "samewise"), pytest.raises(UnsupportedModelError):
        ModelRunner.load(RunnerConfig(tmp_path, device="cpu", kv_cache_gib=0.01))
    assert any(record.exc_info for record in caplog.records if record.levelno == logging.DEBUG)


# -- weights -----------------------------------------------------------------------------------------------------------

Change = Callable[[dict[str, Tensor]], object]


@pytest.fixture
def changed(tiny_model: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """Makes a checkpoint with other weights, and perhaps another configuration, than the tiny Llama's."""

    def make(change: Change, **settings: Any) -> Path:
        tensors = load_file(tiny_model("llama") / "model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        config = json.loads((tiny_model("llama") / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | settings))
        return tmp_path

    return make


def load(folder: Path) -> Any:
    return load_model(folder, load_config(folder), torch.float32)


def without(*names: str) -> Change:
    return lambda tensors: [tensors.pop(name) for name in names]


def with_rows(*names: str, rows: int = 3) -> Change:
    return lambda tensors: tensors.update({name: torch.ones(rows, 64) for name in names})


NORMS = [f"model.layers.{layer}.input_layernorm.weight" for layer in range(3)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without("model.norm.weight"), r"\(a llama model\) has no weights: model\.norm\.weight$"),
        (without("lm_head.weight", *NORMS), r"has no weights: lm_head\.weight, .*0.*norm\.weight, .*1.*and 1 more$"),
        (
            with_rows("lm_head.weight"),
            r"has weights of another shape: lm_head\.weight \[3, 64\] instead of \[320, 64\]$",
        ),
        (
            with_rows("model.layers.0.self_attn.q_proj.lora_A.weight"),
            r"has weights that the model does not use: model\.layers\.0\.self_attn\.q_proj\.lora_A\.weight$",
        ),
        (with_rows("model.layers.3.enorm.weight"), r"does not use: model\.layers\.3\.enorm\.weight$"),
        (with_rows("score.weight", "score.bias"), r"does not use: score\.bias, score\.weight$"),
        (
            lambda tensors: tensors.update(other=tensors.pop("model.norm.weight")),
            r"has no weights: model\.norm\.weight; and has weights that the model does not use: other$",
        ),
    ],
    ids=["missing", "several missing", "shape", "unused", "a layer too many", "a head", "renamed"],
)
def test_weights_that_do_not_fit_one_to_one(change: Change, reason: str, changed: Callable[..., Path]) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        load(changed(change))


def inverse_frequencies(tensors: dict[str, Tensor]) -> None:
    """As Llama's first checkpoints have them in each layer."""
    tensors |= {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(8) for layer in range(3)}


def only_one_embedding(tensors: dict[str, Tensor]) -> None:
    del tensors["lm_head.weight"]


@pytest.mark.parametrize(
    ("change", "settings"),
    [
        (only_one_embedding, {"tie_word_embeddings": True}),
        (inverse_frequencies, {}),
        (with_rows("model.layers.3.enorm.weight"), {"num_nextn_predict_layers": 1}),
        (only_one_embedding, {"architectures": ["LlamaModel"]}),
    ],
    ids=["tied", "buffers", "multi-token prediction", "no head"],
)
def test_what_is_no_fault_of_a_checkpoint(
    change: Change, settings: dict[str, Any], changed: Callable[..., Path], tiny_model: Callable[[str], Path]
) -> None:
    model, whole = load(changed(change, **settings)), load(tiny_model("llama"))
    head = whole.lm_head.weight
    for (name, weight), other in zip(model.named_parameters(), whole.parameters(), strict=False):
        assert other is head or torch.equal(weight, other), name


def test_a_head_may_be_missing_only_where_none_is_needed(changed: Callable[..., Path]) -> None:
    folder = changed(only_one_embedding, architectures=["LlamaForCausalLM"])
    with pytest.raises(UnsupportedModelError, match=r"has no weights: lm_head\.weight$"):
        load(folder)
    (folder / "modules.json").write_text("[]")  # sentence-transformers' models for embeddings
    load(folder)


# -- code that a checkpoint brings -------------------------------------------------------------------------------------


def test_code_of_a_checkpoint_is_neither_run_nor_asked_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question was asked"))
    classes = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "planted.Planted")
    (tmp_path / "planted.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "planted", "auto_map": classes}))
    with pytest.raises(
        UnsupportedModelError, match=r"no model that transformers can read: .*custom code.*model-types\.md"
    ):
        load_config(tmp_path)
    tiny_config("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"auto_map": classes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=r"cannot be loaded: .*no file named model\.safetensors"):
        load(tmp_path)
    assert not (tmp_path / "mark").exists()
