"""Modules for multi-token prediction, in the names of their targets' checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model_runner.features import LAST
from model_runner.heads.base import HeadsError, TargetShape
from model_runner.heads.loading import load_heads
from model_runner.heads.mtp import MTPHeads
from model_runner.kv_cache import KVShape
from tests.model_runner.heads.checkpoints import Tensors, write
from tests.model_runner.heads.mtp_modules import LAYERS, NextN, Qwen, one_by_one

TARGET = TargetShape(32, 50, LAYERS)
COUNT = 5
EH_PROJ = f"model.layers.{LAYERS}.eh_proj.weight"


def as_they_are(tensors: Tensors) -> Tensors:
    return tensors


def target_of(module: NextN | Qwen) -> TargetShape:
    return TargetShape(module.config.hidden_size, module.config.vocab_size, module.config.num_hidden_layers)


def attending(scale: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """An `Attend` that keeps what it was given: every token sees all before it, and itself."""
    keys: list[Tensor] = []
    values: list[Tensor] = []

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys.extend(key)
        values.extend(value)
        group = query.shape[1] // key.shape[1]
        k, v = (torch.stack(past).repeat_interleave(group, dim=1) for past in (keys, values))  # [seen, heads, dim]
        scores = torch.einsum("nhd,shd->nhs", query, k) * scale
        seen = torch.arange(len(k) - len(query), len(k)).unsqueeze(1)
        scores = scores.masked_fill((torch.arange(len(k)) > seen).unsqueeze(1), float("-inf"))
        return torch.einsum("nhs,shd->nhd", scores.softmax(-1), v)

    return attend


@pytest.mark.parametrize(
    ("make", "kind", "stored", "kv"),
    [
        (NextN, "deepseek_v3", as_they_are, KVShape(4, 20, 10)),
        (NextN, "glm4_moe_lite", as_they_are, KVShape(4, 20, 10)),
        (NextN, "glm4_moe", as_they_are, KVShape(2, 16, 16, 2)),
        (Qwen, "qwen3_5_text", as_they_are, KVShape(2, 16, 16, 2)),
        (Qwen, "qwen3_5_moe_text", as_they_are, KVShape(2, 16, 16, 2)),
        (Qwen, "qwen3_5_moe_text", one_by_one, KVShape(2, 16, 16, 2)),
        (Qwen, "qwen3_next", one_by_one, KVShape(2, 16, 16, 2)),
    ],
    ids=["deepseek", "glm lite", "glm", "qwen3.5", "qwen3.5 experts", "qwen3.5 experts one by one", "qwen3-next"],
)
def test_states_and_logits_are_those_of_the_formulas(
    make: type[NextN | Qwen], kind: str, stored: Callable[[Tensors], Tensors], kv: KVShape, tmp_path: Path
) -> None:
    module = make(kind)
    heads = load_heads(write(tmp_path, module.config.to_dict(), stored(module.tensors())), target_of(module))
    assert isinstance(heads, MTPHeads)
    assert (heads.kind, heads.needs, heads.draft_ids, heads.embed_tokens) == ("mtp", (LAST,), None, None)
    assert heads.kv == kv
    size = (COUNT, module.config.hidden_size)
    embedded, hidden = torch.randn(size), torch.randn(size)
    expected = module.states(embedded, hidden)

    attend = attending(heads.scale)
    state = heads.first_state({LAST: hidden})
    positions = torch.arange(COUNT)
    parts = [heads.step(embedded[:3], state[:3], positions[:3], attend)]
    parts += [heads.step(embedded[i : i + 1], state[i : i + 1], positions[i : i + 1], attend) for i in (3, 4)]
    actual = torch.cat(parts)
    torch.testing.assert_close(actual, expected.float(), rtol=1e-4, atol=1e-4)
    head = torch.randn(module.config.vocab_size, size[1])
    logits = heads.logits(actual, lambda rows: rows @ head.T)
    torch.testing.assert_close(logits, module.logits(expected, head).float(), rtol=1e-3, atol=1e-3)


def test_the_module_of_a_model_for_images_and_text_is_found(tmp_path: Path) -> None:
    module = Qwen()
    config = {"model_type": "qwen3_5", "text_config": module.config.to_dict() | {"mtp_num_hidden_layers": 1}}
    heads = load_heads(write(tmp_path, config, module.tensors()), target_of(module))
    assert torch.equal(heads.state_dict()["projection.weight"], module.weights["fc.weight"])


@pytest.mark.parametrize(
    ("entries", "added", "reason"),
    [
        ({"num_nextn_predict_layers": 2}, {}, "several modules"),
        ({}, {EH_PROJ: torch.zeros(32, 64).to(torch.float8_e4m3fn)}, r"float8 without .*eh_proj\.weight_scale_inv"),
        ({"model_type": "exaone_moe"}, {}, "multi-token prediction of exaone_moe models is not supported"),
        ({}, {f"{EH_PROJ}_scale": torch.ones(1)}, r"not supported: .*eh_proj\.weight_scale$"),
        ({"hidden_size": 48}, {}, "hidden size of 48"),
    ],
    ids=["several", "float8", "another kind", "unknown weights", "another target"],
)
def test_what_cannot_be_served_is_refused(entries: dict[str, Any], added: Tensors, reason: str, tmp_path: Path) -> None:
    module = NextN()
    with pytest.raises(HeadsError, match=reason):
        load_heads(write(tmp_path, module.config.to_dict() | entries, module.tensors() | added), TARGET)


def test_incomplete_modules_are_refused(tmp_path: Path) -> None:
    module = NextN()
    tensors = module.tensors()
    del tensors[f"model.layers.{LAYERS}.mlp.experts.2.up_proj.weight"]
    with pytest.raises(HeadsError, match=r"the tensor model\.layers\.3\.mlp\.experts\.2\.up_proj\.weight is missing"):
        load_heads(write(tmp_path / "lacking", module.config.to_dict(), tensors), TARGET)
    qwen = Qwen()
    without = write(tmp_path / "without", qwen.config.to_dict(), {"model.norm.weight": torch.ones(64)})
    with pytest.raises(HeadsError, match=r"has no weights of a module for multi-token prediction \(mtp\.\*\)"):
        load_heads(without, target_of(qwen))
    second = qwen.tensors() | {"mtp.layers.1.input_layernorm.weight": torch.ones(64)}
    with pytest.raises(HeadsError, match=r"weights that are not supported: mtp\.layers\.1\.input_layernorm\.weight"):
        load_heads(write(tmp_path / "second", qwen.config.to_dict(), second), target_of(qwen))
