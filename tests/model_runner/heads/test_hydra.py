"""Hydra heads in the published format."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from model_runner.features import LAST
from model_runner.heads.base import HeadsError
from model_runner.heads.hydra import HydraHeads
from model_runner.heads.loading import load_heads
from tests.model_runner.heads.checkpoints import HIDDEN, TARGET, VOCAB, Tensors, random_tensors, silu, write

DEPTH = 3


def published(num_layers: int) -> Tensors:
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(DEPTH):
        for layer in range(num_layers):
            inputs = (head + 2) * HIDDEN if layer == 0 else HIDDEN
            shapes[f"hydra_mlp.{head}.{layer}.linear.weight"] = (HIDDEN, inputs)
            shapes[f"hydra_mlp.{head}.{layer}.linear.bias"] = (HIDDEN,)
        shapes[f"hydra_mlp.{head}.0.res_connection.weight"] = (HIDDEN, (head + 2) * HIDDEN)
        shapes[f"hydra_mlp.{head}.0.res_connection.bias"] = (HIDDEN,)
        shapes[f"hydra_lm_head.{head}.weight"] = (VOCAB, HIDDEN)
        shapes[f"hydra_lm_head.{head}.bias"] = (VOCAB,)
    return random_tensors(shapes)


def config(num_layers: int, **other: object) -> dict[str, object]:
    return {"hydra_num_heads": DEPTH, "hydra_num_layers": num_layers, "grounded_heads": True, **other}


def expected_state(tensors: Tensors, num_layers: int, head: int, hidden: Tensor, path: list[Tensor]) -> Tensor:
    joined = torch.cat([hidden, *path], dim=-1)
    name = f"hydra_mlp.{head}"
    state = joined @ tensors[f"{name}.0.res_connection.weight"].T + tensors[f"{name}.0.res_connection.bias"]
    state = state + silu(joined @ tensors[f"{name}.0.linear.weight"].T + tensors[f"{name}.0.linear.bias"])
    for layer in range(1, num_layers):
        weight, bias = (tensors[f"{name}.{layer}.linear.{part}"] for part in ("weight", "bias"))
        state = state + silu(state @ weight.T + bias)
    return state


@pytest.mark.parametrize("file", ["hydra_lm_head.pt", "model.safetensors"])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_logits_are_those_of_the_formula(tmp_path: Path, num_layers: int, file: str) -> None:
    tensors = published(num_layers)
    heads = load_heads(write(tmp_path, config(num_layers, hydra_head_arch="mlp"), tensors, file), TARGET)
    assert isinstance(heads, HydraHeads)
    assert (heads.kind, heads.depth, heads.needs, heads.draft_ids) == ("hydra", DEPTH, (LAST,), None)
    hidden, embedded = torch.randn(4, HIDDEN), torch.randn(4, DEPTH, HIDDEN)
    joined = heads.join({LAST: hidden})
    for head in range(DEPTH):
        state = expected_state(tensors, num_layers, head, hidden, list(embedded[:, : head + 1].unbind(1)))
        expected = state @ tensors[f"hydra_lm_head.{head}.weight"].T + tensors[f"hydra_lm_head.{head}.bias"]
        torch.testing.assert_close(heads.head(head + 1, joined, embedded[:, : head + 1]), expected)


def test_one_matrix_for_all_heads_over_a_part_of_the_vocabulary(tmp_path: Path) -> None:
    ids = torch.tensor([0, 7, 8, 20])
    shapes = {name: tuple(t.shape) for name, t in published(1).items() if "lm_head" not in name}
    tensors = random_tensors({**shapes, "hydra_lm_head.weight": (len(ids), HIDDEN)})
    heads = load_heads(write(tmp_path, config(1), {**tensors, "d2t": ids - torch.arange(4)}), TARGET)
    assert isinstance(heads, HydraHeads)
    assert torch.equal(heads.draft_ids, ids)
    hidden, embedded = torch.randn(2, HIDDEN), torch.randn(2, 2, HIDDEN)
    expected = expected_state(tensors, 1, 1, hidden, list(embedded.unbind(1))) @ tensors["hydra_lm_head.weight"].T
    torch.testing.assert_close(heads.head(2, heads.join({LAST: hidden}), embedded), expected)


def test_features_of_an_earlier_layer(tmp_path: Path) -> None:
    """hidden_state_offset k takes transformers' hidden_states[-(k + 1)]."""
    heads = load_heads(write(tmp_path, config(1, hidden_state_offset=2), published(1)), TARGET)
    assert heads.needs == ("layers.6",)


def test_several_hidden_states_are_joined_in_the_order_of_their_offsets(tmp_path: Path) -> None:
    shapes = {name: tuple(t.shape) for name, t in published(1).items()}
    wider = {
        name: (shape[0], shape[1] + 2 * HIDDEN) if "mlp" in name and len(shape) == 2 else shape
        for name, shape in shapes.items()
    }
    tensors = random_tensors(wider)
    heads = load_heads(write(tmp_path, config(1, hidden_state_offsets=[2, 0, 5]), tensors), TARGET)
    assert isinstance(heads, HydraHeads)
    assert heads.needs == ("layers.6", LAST, "layers.3")
    features = {need: torch.randn(4, HIDDEN) for need in ("layers.3", "layers.6", LAST)}
    embedded = torch.randn(4, DEPTH, HIDDEN)
    joined = torch.cat([features[need] for need in ("layers.6", LAST, "layers.3")], dim=-1)
    for head in range(DEPTH):
        state = expected_state(tensors, 1, head, joined, list(embedded[:, : head + 1].unbind(1)))
        expected = state @ tensors[f"hydra_lm_head.{head}.weight"].T + tensors[f"hydra_lm_head.{head}.bias"]
        torch.testing.assert_close(heads.head(head + 1, heads.join(features), embedded[:, : head + 1]), expected)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"hidden_state_offsets": []}, "hidden_state_offsets is"),
        ({"hidden_state_offsets": [1, -1]}, "hidden_state_offsets is"),
        ({"hidden_state_offsets": [1, "2"]}, "hidden_state_offsets is"),
        ({"hidden_state_offsets": 3}, "hidden_state_offsets is"),
        ({"hidden_state_offsets": [1, 9]}, "hidden_state_offset is 9, but the model has 8 layers"),
        ({"hidden_state_offset": 9}, "hidden_state_offset is 9, but the model has 8 layers"),
    ],
)
def test_layers_that_are_not_there_are_refused(tmp_path: Path, entries: dict[str, object], message: str) -> None:
    with pytest.raises(HeadsError, match=message):
        load_heads(write(tmp_path, config(1, **entries), published(1)), TARGET)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"hydra_head_arch": "prefix-mlp"}, "architecture prefix-mlp are not supported"),
        ({"hydra_head_arch": "cross-attn"}, "architecture cross-attn are not supported"),
        ({"grounded_heads": False}, "not supported"),
    ],
)
def test_other_architectures_are_refused(tmp_path: Path, other: dict[str, object], message: str) -> None:
    with pytest.raises(HeadsError, match=message):
        load_heads(write(tmp_path, {**config(1), **other}, published(1)), TARGET)


def test_a_number_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(HeadsError, match="hydra_num_layers"):
        load_heads(write(tmp_path, {"hydra_num_heads": DEPTH}, published(1)), TARGET)
