"""Models that one native call runs: what the modules of transformers compute around the same layers."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, Qwen3_5TextConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from model_runner.features import LAST, layer_input
from model_runner.kernels.interface import CPU
from model_runner.kernels.library import Kernels
from model_runner.refusal import UnsupportedModelError
from model_runner.spec.families import FAMILIES, Family, ModelFamily
from model_runner.spec.model_spec import read_model_spec
from model_runner.spec.rotary import RotaryTable, fix_long_rope, rotary_frequencies
from model_runner.weights.checkpoint import TensorCheckpoint
from tests.model_runner.decoder_models import CASES, HYBRIDS, tiny_model
from tests.model_runner.kernels.decoder_runs import LENGTHS, FusedModel, step_batch

NEEDS = (LAST, *(layer_input(layer) for layer in range(4)))
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
WHOLE = [(sequence, 0, length) for sequence, length in enumerate(LENGTHS)]


def near(result: Tensor, expected: Tensor) -> bool:
    """Whether results are equal except for rounding, as in test_decoder_layer.agree."""
    errors = (result - expected).norm(dim=-1) / expected.norm(dim=-1)
    return bool(errors.median() < 2e-6) and bool(errors.max() < 0.02)


@pytest.mark.parametrize("case", [*CASES, *HYBRIDS])
def test_equals_the_modules_of_transformers(case: str, kernels_library: Path) -> None:
    """With one instruction set: `test_linear.py` and `test_decoder_layer.py` compare them all."""
    model = FusedModel(case, Kernels(kernels_library, threads=2))
    native, modules = model.target(NEEDS), model.modules(NEEDS)
    batch = step_batch(WHOLE)
    logits, expected_logits = native.forward(batch), modules.forward(batch)
    taken, expected = native.features(), modules.features()
    assert taken.keys() == set(NEEDS)
    for need in NEEDS:
        if need == LAST:
            torch.testing.assert_close(taken[need], expected[need], rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(taken[need], expected[need])
    assert near(logits, expected_logits)


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("gemma2", {"embedding_scale": 7.0}),
        ("granite", {"embedding_scale": 1.0}),
        ("llama", {"norm_eps": 1e-6}),
        ("gemma2", {"logits_softcap": 0.0}),
        ("vaultgemma", {"logits_softcap": 29.0}),
        ("granite", {"logits_scale": 1.0}),
        ("hyperclovax", {"logits_scale": 0.2}),
    ],
)
def test_a_model_that_computes_something_else_is_found_out(
    case: str, changes: dict[str, float], kernels_library: Path
) -> None:
    model = FusedModel(case, Kernels(kernels_library, threads=1), changes=changes)
    native, modules = model.target(), model.modules()
    assert not near(native.forward(step_batch(WHOLE)), modules.forward(step_batch(WHOLE)))


@pytest.mark.parametrize("case", ["llama", "gemma3_text"])
def test_what_is_wanted_changes_nothing(case: str, kernels: Kernels) -> None:
    model = FusedModel(case, kernels)
    batch = step_batch(WHOLE)
    plain = model.target()
    logits = plain.forward(batch)
    assert plain.features() == {}
    target = model.target(NEEDS[:1])
    few = replace(batch, logits_index=np.array([3, 80, 100, 114]))
    assert torch.equal(target.forward(few, NEEDS[1:]), logits[[3, 80, 100, 114]])
    features = dict(target.features())
    assert target.features() == {}
    for need in NEEDS:
        alone = model.target((need,))
        none = replace(batch, logits_index=np.array([], dtype=np.int64))
        assert alone.forward(none).shape == (0, 320)
        assert torch.equal(alone.features()[need], features[need])


def test_no_tokens(kernels: Kernels) -> None:
    target = FusedModel("llama", kernels).target(NEEDS)
    assert target.forward(step_batch([])).shape == (0, 320)
    assert all(feature.shape == (0, 48) for feature in target.features().values())


def test_a_token_that_is_not_in_the_vocabulary_is_refused(kernels: Kernels) -> None:
    target = FusedModel("llama", kernels).target()
    batch = step_batch(WHOLE)
    for token in (-1, 320):
        tokens = batch.tokens.copy()
        tokens[5] = token
        with pytest.raises(IndexError, match="not in the vocabulary of 320"):
            target.forward(replace(batch, tokens=tokens))


def test_layers_that_are_not_there_are_refused(kernels: Kernels) -> None:
    model = FusedModel("llama", kernels)
    with pytest.raises(UnsupportedModelError, match="need the input of layer 9, but the model has only 4 layers"):
        model.target((layer_input(9),))


def rotary_tables(family: ModelFamily, config: Any) -> dict[str | None, RotaryTable] | None:
    frequencies = rotary_frequencies(family, config)
    return None if frequencies is None else {kind: RotaryTable(*one) for kind, one in frequencies.items()}


def family_of(case: str) -> Family:
    model_type = case.split(maxsplit=1)[0]
    return FAMILIES["emu3_text_model" if model_type == "emu3" else model_type]


def table_of(case: str) -> RotaryTable:
    """A table of a tiny model."""
    family, config = family_of(case).model, tiny_model(case).config.get_text_config()
    tables = rotary_tables(family, config)
    assert tables is not None
    return next(iter(tables.values()))


@pytest.mark.parametrize("case", [*CASES, *HYBRIDS])
def test_angles_are_those_of_transformers(case: str) -> None:
    model = tiny_model(case)
    if getattr(model.model, "rotary_emb", None) is None:
        return
    config, rotary, positions = model.config.get_text_config(), model.model.rotary_emb, torch.arange(1024)[None]
    family = family_of(case).model
    tables = rotary_tables(family, config)
    assert tables is not None
    assert set(tables) == (set(config.layer_types) if family.rotary_by_kind else {None})
    for kind, table in tables.items():
        keywords = {} if kind is None else {"layer_type": kind}
        for own, expected in zip((table._cos, table._sin), rotary(torch.empty(0), positions, **keywords), strict=True):
            repeats = own.shape[1] // expected.shape[-1]  # gpt-oss computes each pair's angle once
            assert torch.equal(own, expected[0].repeat(1, repeats))


@pytest.mark.parametrize("sections", [None, [3, 2, 1], [11, 11, 10]])
def test_angles_in_an_image_are_those_of_transformers(sections: list[int] | None) -> None:
    own = {} if sections is None else {"mrope_section": sections}
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, **own}
    config = Qwen3_5TextConfig(head_dim=128, rope_parameters=rope)
    tables = rotary_tables(FAMILIES["qwen3_5_text"].model, config)
    assert tables is not None
    positions = torch.randint(1000, (3, 50), generator=torch.Generator().manual_seed(0))
    expected = Qwen3_5TextRotaryEmbedding(config)(torch.empty(0), positions[:, None])
    table = tables[None].of_axes(positions)
    for found, right in zip((table._cos, table._sin), expected, strict=True):
        assert torch.equal(found, right[0])


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "linear", "factor": 3.0, "partial_rotary_factor": 0.5},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.3},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 8, "beta_slow": 2},
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "mscale": 0.7,
            "mscale_all_dim": 1,
        },
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "truncate": False},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 20},
        {
            **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 65536, "truncate": False},
            **{"beta_fast": 1e-3, "beta_slow": 1e-6},
        },
    ],
)
def test_angles_with_scaling_are_those_of_transformers(rope: dict[str, Any]) -> None:
    config = AutoConfig.for_model("llama", rope_parameters={"rope_theta": 500.0, **rope}, head_dim=20)
    expected = LlamaRotaryEmbedding(config)(torch.empty(0), torch.arange(1024)[None])
    tables = rotary_tables(FAMILIES["llama"].model, config)
    assert tables is not None
    assert torch.equal(tables[None]._cos, expected[0][0])
    assert torch.equal(tables[None]._sin, expected[1][0])


@pytest.mark.parametrize("limit", [64, 65, None])
@pytest.mark.parametrize("rope", [{}, {"factor": 6.0}, {"attention_factor": 1.2}, {"partial_rotary_factor": 0.8}])
def test_angles_of_long_rope_are_those_of_transformers(rope: dict[str, Any], limit: int | None) -> None:
    pairs = int(20 * rope.get("partial_rotary_factor", 1.0)) // 2
    factors = {"short_factor": [1 + 0.1 * pair for pair in range(pairs)], "long_factor": [2.0] * pairs}
    config = AutoConfig.for_model(
        "llama",
        rope_parameters={
            **{"rope_type": "longrope", "rope_theta": 500.0, "original_max_position_embeddings": 64},
            **factors,
            **rope,
        },
        head_dim=20,
        max_position_embeddings=1024,
    )
    length = 64 if limit == 64 else 1024  # transformers chooses by the length
    expected = LlamaRotaryEmbedding(config)(torch.empty(0), torch.arange(length)[None])
    assert rotary_tables(FAMILIES["llama"].model, config) is None
    fix_long_rope(config, limit)
    tables = rotary_tables(FAMILIES["llama"].model, config)
    assert tables is not None
    assert torch.equal(tables[None]._cos[:length], expected[0][0])
    assert torch.equal(tables[None]._sin[:length], expected[1][0])


@pytest.mark.parametrize("steps", [[1], [1024, 1025], [5000], [3, 2000, 4100, 9000]])
def test_angles_are_the_same_wherever_the_table_grew(steps: list[int]) -> None:
    table, expected = table_of("llama"), table_of("llama")
    for length in steps:
        table.reach(length)
    expected.reach(16384)
    assert len(table._cos) >= steps[-1]
    assert (table.struct.cos, table.struct.sin) == table._pointers()
    for one, other in zip((table._cos, table._sin), (expected._cos, expected._sin), strict=True):
        assert torch.equal(one, other[: len(one)])


def other_class(config: Any, tensors: dict[str, Tensor]) -> None:
    config.model_type = "olmo2"


def biased_head(config: Any, tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.bias"] = torch.zeros(320)


def other_rotary(config: Any, tensors: dict[str, Tensor]) -> None:
    config.rope_parameters["rope_type"] = "dynamic"


def other_activation(config: Any, tensors: dict[str, Tensor]) -> None:
    config.hidden_act = "gelu"


@pytest.mark.parametrize("change", [other_class, biased_head, other_rotary, other_activation])
def test_a_model_with_an_unknown_part_is_left_to_its_modules(change: Callable[[Any, dict[str, Tensor]], None]) -> None:
    model = tiny_model("llama")
    tensors = dict(model.state_dict())
    assert read_model_spec(model.config, TensorCheckpoint(tensors)) is not None
    changed = copy.deepcopy(model.config)
    change(changed, tensors)
    assert read_model_spec(changed, TensorCheckpoint(tensors)) is None


def test_the_embedding_of_a_prediction_module_is_not_the_decoders() -> None:
    model = tiny_model("dots1")
    tensors = {**model.state_dict(), "model.layers.4.embed_tokens.weight": torch.zeros(320, 48)}
    assert read_model_spec(model.config, TensorCheckpoint(tensors)) is None
    model.config.num_nextn_predict_layers = 1
    assert read_model_spec(model.config, TensorCheckpoint(tensors)) is not None


def test_a_table_that_finds_no_memory_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    table = table_of("llama")
    before = table._cos, table._sin, table.struct.cos, table.struct.sin
    real = torch.cat
    for num_found in (0, 1):  # the second time for cos alone
        found = iter([real] * num_found)

        def cat(parts: Any, found: Any = found, **options: Any) -> Tensor:
            # Angles are made of two halves; the table's parts are not.
            return real(parts, **options) if options else next(found)(parts)

        monkeypatch.setattr(torch, "cat", cat)
        with pytest.raises((StopIteration, RuntimeError)):
            table.reach(2000)
        monkeypatch.undo()
        assert (table._cos, table._sin, table.struct.cos, table.struct.sin) == before
    table.reach(2000)
    assert len(table._cos) == len(table._sin) == 2048


def test_a_twin_has_its_own_cache(kernels: Kernels) -> None:
    native = FusedModel("llama", kernels).native
    twin = native.twin()
    assert not any(one.struct == other.struct for one, other in zip(native.layers, twin.layers, strict=True))
    twin.bind([CPU.new("SwKvCache", kv_heads=number) for number in range(4)])
    assert [layer.struct.cache.kv_heads for layer in twin.layers] == [0, 1, 2, 3]
    assert [layer.struct.cache.kv_heads for layer in native.layers] == [0, 0, 0, 0]
