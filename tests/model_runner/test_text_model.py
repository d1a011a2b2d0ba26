"""Models for images and text, served for their text, and families whose code does not fit a flat batch as it is."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    BertConfig,
    DeepseekV2Config,
    DoryConfig,
    FalconConfig,
    MinistralConfig,
    NemotronConfig,
    PretrainedConfig,
)

from bench.tiny_models import tiny_config, write_tiny_model
from model_runner.config import RunnerConfig
from model_runner.modules.call import ModelCall
from model_runner.modules.classes import change_modules
from model_runner.modules.loading import inspect_model, load_config, load_model
from model_runner.modules.text_model import watch_calls
from model_runner.platforms.cpu import CpuPlatform
from model_runner.refusal import UnsupportedModelError
from model_runner.target import modules_of

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llava")
    write_tiny_model("llava", folder)
    return folder


def num_parameters(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


def test_a_tower_is_left_unread_and_that_is_said_once(llava: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "samewise"):
        model: Any = load_model(llava, load_config(llava), torch.float32)
    assert isinstance(model.model.vision_tower, nn.Identity)
    assert num_parameters(model) == inspect_model(load_config(llava)).num_parameters
    lines = [record.message for record in caplog.records if record.message.startswith("text only")]
    stored = load_file(llava / "model.safetensors")
    num_unread = sum("language_model" not in name and "lm_head" not in name for name in stored)
    assert lines == [
        f"text only  {num_unread} weights of model.vision_tower, model.multi_modal_projector are left unread"
    ]


def test_a_checkpoint_may_lack_the_tower(llava: Path, tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in load_file(llava / "model.safetensors").items() if "vision" not in name}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((llava / "config.json").read_bytes())
    load_model(tmp_path, load_config(tmp_path), torch.float32)


def test_other_weights_than_the_towers_are_no_excuse(llava: Path, tmp_path: Path) -> None:
    tensors = load_file(llava / "model.safetensors") | {"model.language_model.other.weight": torch.ones(2)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((llava / "config.json").read_bytes())
    with pytest.raises(UnsupportedModelError, match=r"does not use: model\.language_model\.other\.weight$"):
        load_model(tmp_path, load_config(tmp_path), torch.float32)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MinistralConfig(**SIZES, head_dim=None), "has no head_dim in config.json, which its model needs"),
        (NemotronConfig(**SIZES), "has no num_key_value_heads in config.json"),
        (DeepseekV2Config(**SIZES, num_experts_per_tok=None), "has no num_experts_per_tok in config.json"),
        (BertConfig(**SIZES), "not causal"),
        (tiny_config("git"), "computes attention in classes of its own"),
        (FalconConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=1, alibi=True), "bias by distance"),
        (tiny_config("bloom"), "does not use transformers' attention interface"),
        (tiny_config("instructblip"), "needs more than tokens: 'pixel_values' and 'qformer_input_ids'"),
        (tiny_config("blt"), "reads values of tensors to decide what it computes"),
        (tiny_config("kosmos-2.5"), "counts positions in its own way"),
        (DoryConfig(**SIZES, recurrent_kv_cache_mode="last_loop"), "depend on how a prompt is cut"),
    ],
    ids=lambda one: one.model_type if isinstance(one, PretrainedConfig) else "",
)
def test_reasons_of_refusals(config: PretrainedConfig, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason) as refusal:
        inspect_model(config)
    assert str(refusal.value).endswith("; docs/reference/model-types.md lists the supported models")


def test_calls_are_counted_where_they_are_not_layers() -> None:
    shape = inspect_model(tiny_config("diffllama"))
    assert (shape.num_layers, len(shape.kv)) == (4, 8)


def test_parts_that_share_a_weight_with_a_used_one_are_used() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(2, 2), nn.Linear(2, 2)
            self.sharing = nn.Linear(2, 2)
            self.sharing.weight = self.used.weight
            self.empty = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.used(x)
            return result

    model = Model()
    with watch_calls(model) as uncalled:
        model(torch.ones(1, 2))
        assert uncalled() == ["idle"]
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("family", ["dbrx", "longcat_flash", "step3p7"])
def test_experts_of_a_loop_give_the_same_in_the_common_form(family: str, tmp_path: Path) -> None:
    write_tiny_model(family, tmp_path)
    config = load_config(tmp_path)
    model = load_model(tmp_path, config, torch.float32, "batched_mm")
    own = {"dbrx": "DbrxExperts", "longcat_flash": "LongcatFlashExperts", "step3p7": "Step3p7Experts"}[family]
    changed: Any = next(module for module in model.modules() if type(module).__name__ == own)
    before: Any = load_looped(tmp_path, own)
    num_experts = getattr(changed, "total_experts", None) or changed.num_experts
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(9, 64, generator=generator)
    chosen = torch.rand(9, num_experts, generator=generator).topk(2).indices
    weights = torch.rand(9, 2, generator=generator)
    with torch.no_grad():
        expected = before(hidden, chosen, weights).view(9, 64)
    assert torch.allclose(changed(hidden, chosen, weights), expected, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("family", ["dbrx", "longcat_flash", "step3p7"])
def test_experts_of_a_loop_are_packed(family: str, tmp_path: Path) -> None:
    write_tiny_model(family, tmp_path)
    platform = CpuPlatform(RunnerConfig(tmp_path))
    model = platform.load(tmp_path, platform.inspect(tmp_path))
    experts = [module.packed for module in modules_of(model).modules() if hasattr(module, "packed")]
    assert len({type(one) for one in experts}) == 1


def test_experts_of_jetmoe_are_linear_layers(tmp_path: Path) -> None:
    write_tiny_model("jetmoe", tmp_path)
    model: Any = load_model(tmp_path, load_config(tmp_path), torch.float32)
    hidden = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name in ("JetMoeMoE", "JetMoeMoA"):
            own: Any = next(module for module in model.modules() if type(module).__name__ == name)
            before: Any = load_looped(tmp_path, name)
            results = [
                run(hidden) if name == "JetMoeMoE" else run.reduce(*run.map(hidden)[::2]) for run in (own, before)
            ]
            torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def load_looped(folder: Path, name: str) -> nn.Module:
    """The first module of this class as transformers loads it."""
    from transformers import AutoConfig  # noqa: PLC0415

    from bench.tiny_models import auto_class  # noqa: PLC0415

    model = auto_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype=torch.float32)
    return next(module for module in model.modules() if type(module).__name__ == name)


def test_experts_keep_their_loop_where_transformers_has_no_function_for_them() -> None:
    model = nn.Module()
    model.config = tiny_config("llama")
    model.config._experts_implementation = None
    change_modules(model)  # type: ignore[arg-type]


def test_a_step_ends_with_the_call(llava: Path) -> None:
    model = load_model(llava, load_config(llava), torch.float32)
    call, again = ModelCall(model), ModelCall(model)
    assert call._step is again._step  # one for the model and its twins
    token = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(AttributeError):
        call(token, token, token, None)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="the model is in a pass"):
        _ = call._step.attention
