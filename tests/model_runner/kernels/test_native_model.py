"""Models that one native call runs: what the modules of transformers compute around the same layers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from model_runner.kernels.library import Kernels
from model_runner.models.features import LAST, layer_input
from model_runner.models.native_model import NativeModel, RotaryTable, read_native_model
from model_runner.models.packed import NativePacker
from model_runner.models.refusal import UnsupportedModelError
from model_runner.platforms.cpu import prepare
from tests.model_runner.decoder_models import CASES
from tests.model_runner.kernels.decoder_runs import LENGTHS, FusedModel, served_model, step_batch

NEEDS = (LAST, *(layer_input(layer) for layer in range(4)))
WHOLE = [(sequence, 0, length) for sequence, length in enumerate(LENGTHS)]


def near(result: Tensor, expected: Tensor) -> bool:
    """Whether results are equal except for rounding, as in test_decoder_layer.agree."""
    errors = (result - expected).norm(dim=-1) / expected.norm(dim=-1)
    return bool(errors.median() < 2e-6) and bool(errors.max() < 0.02)


@pytest.mark.parametrize("case", CASES)
def test_equals_the_modules_of_transformers(case: str, kernels: Kernels) -> None:
    native, modules = FusedModel(case, kernels).targets(NEEDS)
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
    ("case", "spoil"),
    [
        ("gemma2", {"embedding_scale": 7.0}),
        ("granite", {"embedding_scale": 1.0}),
        ("llama", {"norm_eps": 1e-6}),
        ("gemma2", {"logits_softcap": None}),
        ("vaultgemma", {"logits_softcap": 29.0}),
        ("granite", {"logits_scale": 1.0}),
        ("hyperclovax", {"logits_scale": 0.2}),
    ],
)
def test_a_model_that_computes_something_else_is_found_out(
    case: str, spoil: dict[str, Any], kernels_library: Path
) -> None:
    kernels = Kernels(kernels_library, threads=1)
    model = FusedModel(case, kernels)
    expected = model.targets()[1].forward(step_batch(WHOLE))
    model.native = NativeModel(kernels, replace(model.native._parts, **spoil))
    assert not near(model.targets()[0].forward(step_batch(WHOLE)), expected)


@pytest.mark.parametrize("case", ["llama", "gemma3_text"])
def test_what_is_wanted_changes_nothing(case: str, kernels: Kernels) -> None:
    model = FusedModel(case, kernels)
    batch = step_batch(WHOLE)
    plain, _ = model.targets()
    logits = plain.forward(batch)
    assert plain.features() == {}
    target, _ = model.targets(NEEDS[:1])
    few = replace(batch, logits_index=np.array([3, 80, 100, 114]))
    assert torch.equal(target.forward(few, NEEDS[1:]), logits[[3, 80, 100, 114]])
    features = dict(target.features())
    assert target.features() == {}
    for need in NEEDS:
        alone, _ = model.targets((need,))
        none = replace(batch, logits_index=np.array([], dtype=np.int64))
        assert alone.forward(none).shape == (0, 320)
        assert torch.equal(alone.features()[need], features[need])


def test_no_tokens(kernels: Kernels) -> None:
    target, _ = FusedModel("llama", kernels).targets(NEEDS)
    assert target.forward(step_batch([])).shape == (0, 320)
    assert all(feature.shape == (0, 48) for feature in target.features().values())


def test_a_token_that_is_not_in_the_vocabulary_is_refused(kernels: Kernels) -> None:
    target, _ = FusedModel("llama", kernels).targets()
    batch = step_batch(WHOLE)
    for token in (-1, 320):
        tokens = batch.tokens.copy()
        tokens[5] = token
        with pytest.raises(IndexError, match="not in the vocabulary of 320"):
            target.forward(replace(batch, tokens=tokens))


def test_layers_that_are_not_there_are_refused(kernels: Kernels) -> None:
    model = FusedModel("llama", kernels)
    with pytest.raises(UnsupportedModelError, match="need the input of layer 9, but the model has only 4 layers"):
        model.targets((layer_input(9),))


@pytest.mark.parametrize("steps", [[1], [1024, 1025], [5000], [3, 2000, 4100, 9000]])
def test_angles_are_those_of_the_module_wherever_the_table_grew(steps: list[int]) -> None:
    rotary = served_model("llama").model.rotary_emb
    like = torch.empty(0)
    table = RotaryTable(lambda positions: rotary(like, positions))
    for length in steps:
        table.reach(length)
    expected = RotaryTable(lambda positions: rotary(like, positions))
    expected.reach(16384)
    assert len(table._cos) >= steps[-1]
    assert (table.struct.cos, table.struct.sin) == table._pointers()
    for one, other, direct in zip(
        (table._cos, table._sin),
        (expected._cos, expected._sin),
        rotary(like, torch.arange(steps[-1]).unsqueeze(0)),
        strict=True,
    ):
        assert torch.equal(one, other[: len(one)])
        assert torch.equal(one[: steps[-1]], direct[0])


def other_class(model: Any) -> None:
    model.__class__ = type("OtherForCausalLM", (type(model),), {})


def other_layer(model: Any) -> None:
    model.model.layers[2] = served_model("llama").model.layers[2]


def biased_head(model: Any) -> None:
    model.lm_head.bias = nn.Parameter(torch.zeros(320))


def dense_head(model: Any) -> None:
    model.lm_head = nn.Linear(48, 320, bias=False)


def other_rotary(model: Any) -> None:
    model.model.rotary_emb.rope_type = "dynamic"


@pytest.mark.parametrize("change", [other_class, other_layer, biased_head, dense_head, other_rotary])
def test_a_model_with_an_unknown_part_is_left_to_its_modules(
    change: Callable[[PreTrainedModel], None], kernels_library: Path
) -> None:
    kernels = Kernels(kernels_library, threads=1)
    model = served_model("llama")
    prepare(model, NativePacker(kernels, "int8"))
    assert read_native_model(model, kernels) is not None
    change(model)
    assert read_native_model(model, kernels) is None


def test_a_table_that_finds_no_memory_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    rotary = served_model("llama").model.rotary_emb
    table = RotaryTable(lambda positions: rotary(torch.empty(0), positions))
    before = table._cos, table._sin, table.struct.cos, table.struct.sin
    for num_found in (0, 1, 2):  # the last time for cos alone
        found = iter([torch.cat] * num_found)
        monkeypatch.setattr(torch, "cat", lambda parts, found=found, **_: next(found)(parts))
        with pytest.raises((StopIteration, RuntimeError)):
            table.reach(2000)
        monkeypatch.undo()
        assert (table._cos, table._sin, table.struct.cos, table.struct.sin) == before
    table.reach(2000)
    assert len(table._cos) == len(table._sin) == 2048
