"""Medusa heads in the published format."""

from pathlib import Path

import pytest
import torch

from model_runner.features import LAST
from model_runner.heads.base import HeadsError
from model_runner.heads.loading import load_heads
from tests.model_runner.heads.checkpoints import HIDDEN, TARGET, VOCAB, Tensors, random_tensors, silu, write

DEPTH = 3


def published(num_layers: int, vocab: int = VOCAB) -> Tensors:
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(DEPTH):
        for layer in range(num_layers):
            shapes[f"{head}.{layer}.linear.weight"] = (HIDDEN, HIDDEN)
            shapes[f"{head}.{layer}.linear.bias"] = (HIDDEN,)
        shapes[f"{head}.{num_layers}.weight"] = (vocab, HIDDEN)
    return random_tensors(shapes)


def config(num_layers: int) -> dict[str, object]:
    return {"medusa_num_heads": DEPTH, "medusa_num_layers": num_layers, "base_model_name_or_path": "lmsys/vicuna"}


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_logits_are_those_of_the_formula(tmp_path: Path, num_layers: int, file: str) -> None:
    tensors = published(num_layers)
    heads = load_heads(write(tmp_path, config(num_layers), tensors, file), TARGET)
    hidden = torch.randn(5, HIDDEN)
    logits = heads(hidden)
    assert logits.shape == (5, DEPTH, VOCAB)
    assert (heads.kind, heads.depth, heads.needs, heads.draft_ids) == ("medusa", DEPTH, (LAST,), None)
    for head in range(DEPTH):
        state = hidden
        for layer in range(num_layers):
            weight, bias = (tensors[f"{head}.{layer}.linear.{name}"] for name in ("weight", "bias"))
            state = state + silu(state @ weight.T + bias)
        torch.testing.assert_close(logits[:, head], state @ tensors[f"{head}.{num_layers}.weight"].T)


def test_layers_that_are_one_module_in_the_training_code(tmp_path: Path) -> None:
    """`[ResBlock()] * 2` saves the same tensors under both names."""
    tensors = published(2)
    for head in range(DEPTH):
        for name in ("weight", "bias"):
            tensors[f"{head}.1.linear.{name}"] = tensors[f"{head}.0.linear.{name}"]
    heads = load_heads(write(tmp_path, config(2), tensors, "medusa_lm_head.pt"), TARGET)
    hidden = torch.randn(2, HIDDEN)
    weight, bias = tensors["0.0.linear.weight"], tensors["0.0.linear.bias"]
    once = hidden + silu(hidden @ weight.T + bias)
    twice = once + silu(once @ weight.T + bias)
    torch.testing.assert_close(heads(hidden)[:, 0], twice @ tensors["0.2.weight"].T)


def test_one_matrix_for_all_heads_over_a_part_of_the_vocabulary(tmp_path: Path) -> None:
    ids = torch.tensor([1, 4, 5, 30, 39])
    shapes = {name: tuple(t.shape) for name, t in published(1).items() if ".linear." in name}
    tensors = random_tensors({**shapes, "lm_head.weight": (len(ids), HIDDEN)})
    heads = load_heads(write(tmp_path, config(1), {**tensors, "d2t": ids - torch.arange(5)}), TARGET)
    assert torch.equal(heads.draft_ids, ids)
    hidden = torch.randn(2, HIDDEN)
    state = hidden + silu(hidden @ tensors["2.0.linear.weight"].T + tensors["2.0.linear.bias"])
    torch.testing.assert_close(heads(hidden)[:, 2], state @ tensors["lm_head.weight"].T)


def test_heads_of_another_target_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadsError, match=rf"0.1.weight has the shape \({VOCAB + 1}, {HIDDEN}\)"):
        load_heads(write(tmp_path / "vocab", config(1), published(1, VOCAB + 1)), TARGET)
    narrow = {name: tensor[..., :8] for name, tensor in published(1).items()}
    narrow["0.0.linear.weight"] = narrow["0.0.linear.weight"][:8]
    with pytest.raises(HeadsError, match="trained for a hidden size of 8, but the model's is 16"):
        load_heads(write(tmp_path / "hidden", config(1), narrow), TARGET)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = published(1)
    del tensors["1.0.linear.bias"]
    with pytest.raises(HeadsError, match=r"the tensor 1\.0\.linear\.bias is missing"):
        load_heads(write(tmp_path, config(1), tensors), TARGET)
