"""Folders of heads: what is read, what is written, and what is refused."""

import json
from pathlib import Path

import pytest
import torch

from model_runner.heads.base import HeadsError
from model_runner.heads.checkpoint import HeadsCheckpoint
from model_runner.heads.hydra import HydraHeads, HydraShape, hydra_checkpoint
from model_runner.heads.loading import load_heads, save_heads
from model_runner.heads.medusa import MedusaHeads, MedusaShape, medusa_checkpoint
from tests.model_runner.heads.checkpoints import HIDDEN, TARGET, VOCAB, write

IDS = torch.tensor([2, 3, 9, 30])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 0.0), (torch.bfloat16, 2**-8), (torch.int8, 1 / 254)])
def test_saved_weights_come_back(tmp_path: Path, dtype: torch.dtype, tolerance: float) -> None:
    weight = torch.randn(6, 5)
    weight[2] = 0.0
    bias = torch.randn(6)
    save_heads(tmp_path, {"a": 1}, {"w": weight, "b": bias}, dtype=dtype)
    read = HeadsCheckpoint.read(tmp_path)
    assert read.config == {"a": 1}
    assert torch.equal(read.take("b", 6), bias)
    error = (read.take("w", 6, 5) - weight).abs()
    assert (error <= weight.abs().amax(1, keepdim=True) * tolerance * (1 + 1e-5)).all()
    assert torch.equal(read.take("w", 6, 5)[2], torch.zeros(5))


@pytest.mark.parametrize(("kind", "num_features"), [("medusa", 1), ("hydra", 1), ("hydra", 3)])
def test_heads_come_back(tmp_path: Path, kind: str, num_features: int) -> None:
    hidden, path = torch.randn(3, num_features * HIDDEN), torch.randn(3, 2, HIDDEN)
    if kind == "medusa":
        medusa = MedusaHeads(MedusaShape(HIDDEN, 2, 1, len(IDS), shared_head=True), IDS)
        save_heads(tmp_path, *medusa_checkpoint(medusa), dtype=torch.float32)
        expected = medusa(hidden)
    else:
        features = ("layers.7", "last", "layers.2")[:num_features]
        hydra = HydraHeads(HydraShape(HIDDEN, 2, 2, len(IDS), shared_head=True, features=features), IDS)
        hydra.feature_scale.uniform_(0.5, 2.0)
        save_heads(tmp_path, *hydra_checkpoint(hydra, TARGET.num_layers), dtype=torch.float32)
        expected = hydra.head(2, hidden, path)
    loaded = load_heads(tmp_path, TARGET)
    assert torch.equal(loaded.draft_ids, IDS)
    actual = loaded(hidden) if isinstance(loaded, MedusaHeads) else loaded.head(2, hidden, path)  # type: ignore[operator]
    assert torch.equal(actual, expected)
    if isinstance(loaded, HydraHeads):
        assert torch.equal(loaded.feature_scale, hydra.feature_scale)
    assert loaded.needs == (("last",) if kind == "medusa" else features)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (tmp_path / "ran",))  # type: ignore[return-value]

    (tmp_path / "config.json").write_text("{}")
    torch.save({"a": Harmful()}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(HeadsError, match="cannot be read"):
        load_heads(tmp_path, TARGET)
    assert not (tmp_path / "ran").exists()


def test_folders_without_heads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadsError, match=r"config\.json: No such file"):
        load_heads(tmp_path, TARGET)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(HeadsError, match="does not hold a JSON object"):
        load_heads(tmp_path, TARGET)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(HeadsError, match="not valid JSON"):
        load_heads(tmp_path, TARGET)
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 1}))
    with pytest.raises(HeadsError, match=r"no \.safetensors"):
        load_heads(tmp_path, TARGET)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(HeadsError, match="cannot be read"):
        load_heads(tmp_path, TARGET)


def test_unknown_kinds_are_refused(tmp_path: Path) -> None:
    tensors = {"something.weight": torch.zeros(VOCAB, HIDDEN)}
    with pytest.raises(HeadsError, match="kind unknown are not supported; use medusa, hydra, eagle3 or mtp"):
        load_heads(write(tmp_path, {}, tensors), TARGET)
    with pytest.raises(HeadsError, match="kind mlp"):
        load_heads(write(tmp_path, {"speculators_model_type": "mlp"}, tensors), TARGET)


@pytest.mark.parametrize("has_blocks", [True, False])
def test_float8_is_multiplied_with_its_scales(tmp_path: Path, has_blocks: bool) -> None:
    weight, scales = torch.randn(3, 10, 14).to(torch.float8_e4m3fn), torch.rand(3, 3, 2)
    config = {"quantization_config": {"weight_block_size": [4, 8]}}
    stored = {"w": weight, "w_scale_inv": scales if has_blocks else scales[0, 0, :1]}
    read = HeadsCheckpoint.read(write(tmp_path, config, stored)).take("w", 3, 10, 14)
    for expert, output, entry in ((0, 0, 0), (1, 3, 7), (2, 9, 8), (0, 4, 13)):
        scale = scales[expert, output // 4, entry // 8] if has_blocks else scales[0, 0, 0]
        assert read[expert, output, entry] == weight[expert, output, entry].float() * scale


def test_integers_where_floats_should_be(tmp_path: Path) -> None:
    checkpoint = HeadsCheckpoint.read(
        write(tmp_path, {}, {"a": torch.zeros(2, 2, dtype=torch.int32), "b": torch.zeros(2, 2, dtype=torch.int8)})
    )
    with pytest.raises(HeadsError, match="not floats"):
        checkpoint.take("a", 2, 2)
    with pytest.raises(HeadsError, match="the tensor b_scale is missing"):
        checkpoint.take("b", 2, 2)
